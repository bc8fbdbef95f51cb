"""Adapters on disk, as PEFT writes and reads them: adapter_config.json and adapter_model.safetensors.

Tensors have the names of the base's family, through its table: base_model.model.MODULE.lora_A.weight (R, I) and
lora_B.weight (O, R); lora_embedding_A (R, V) and lora_embedding_B (D, R); lora_magnitude_vector (O,) with DoRA; modules
that are trained whole under their own names, and so is a head of outputs. base.json is that of `bases.py`.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onward.checkpoint.bases import (
    BASE,
    CONFIG,
    BaseModel,
    base_folder,
    base_of,
    check_adapter_folder,
    check_base,
    is_adapter,
)
from onward.checkpoint.folder import describe, load_model
from onward.checkpoint.gguf.header import Header, opened
from onward.checkpoint.weights import fill, read_tensors
from onward.errors import UserError
from onward.families import HF, Family, family
from onward.files import flush, read_json, written_whole
from onward.model.adapters import Adapter
from onward.model.decoder import Decoder
from onward.model.heads import NAME, add_head, head_labels
from onward.model.lora import Target, adapter_names, adapters_of, add_adapter, check_adapter, selection, untie, weights

TENSORS = "adapter_model.safetensors"
ADAPTER_FILES = TENSORS, BASE, CONFIG
PREFIX = "base_model.model."
HARMLESS = re.compile(  # keys of adapter_config.json that change no output, or are read from the tensors
    "peft_type|task_type|inference_mode|base_model_name_or_path|revision|auto_mapping|peft_version|fan_in_fan_out|"
    "r|lora_alpha|lora_dropout|use_rslora|use_dora|target_modules|exclude_modules|modules_to_save|rank_pattern|"
    "alpha_pattern|init_lora_weights|layers_to_transform|layers_pattern|loftq_config|eva_config|corda_config|"
    "lora_ga_config|runtime_config|megatron_core|qalora_group_size|ensure_weight_tying"
)
OURS = "lora_A.weight", "lora_B.weight", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"


def load_with_adapters(
    folder: Path,
    adapters: Sequence[Path] = (),
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    *,
    allow_nonfinite: bool = False,
    quantize: str | None = None,
) -> tuple[Decoder, dict[str, Any], Path | Header]:
    """The decoder in a folder with adapters, each named after its folder; the first is in use. Of a folder that holds
    an adapter, its base with it. Also the base's config.json, and what `load_tokenizer` takes.

    Arguments as of `load_model`. A UserError for an adapter of another base.
    """
    if is_adapter(folder):
        adapters, folder = [folder, *adapters], base_folder(folder)
    source = opened(folder)
    model, hf = load_model(source, dtype, device, allow_nonfinite=allow_nonfinite, quantize=quantize)
    names = [adapter.resolve().name for adapter in adapters]
    for name, adapter in zip(names, adapters):
        check_base(adapter, folder)
        load_adapter(model, adapter, hf, name)
    if names:
        selection(model).name = names[0]
    trained = adapters and (adapters[0] / "tokenizer.json").exists()  # perhaps with another chat template
    return model, hf, adapters[0] if trained else source


@dataclass(frozen=True)
class Place:
    """A module of the family that has an adapter: its name, our weights that it joins along its rows, and for a stack
    of experts the index in it. `order` has the row of ours for each of its rows."""

    module: str
    ours: Sequence[str]
    expert: int | None
    order: Tensor


def places(kind: Family, model: Decoder, targets: Mapping[str, Target]) -> Iterator[Place]:
    """The modules of the family of a model that hold its weights, by the family's table; others keep our names."""
    named = set()
    for their, our, *fix in kind.names(model.config):
        ours = [name.removesuffix(".weight") for name in ([our] if isinstance(our, str) else our)]
        if not all(name in targets for name in ours):
            continue
        named.update(ours)
        if isinstance(their, list):
            for expert, one in enumerate(their):
                yield Place(one.removesuffix(".weight"), ours, expert, torch.empty(0))
        elif targets[ours[0]].weight.ndim == 2:
            yield Place(their.removesuffix(".weight"), ours, None, row_order(fix, rows_of(ours, targets)))
    for name, target in targets.items():
        if name not in named and name != "head" and target.weight.ndim == 2:
            yield Place(name, [name], None, torch.arange(len(target.weight)))


def rows_of(ours: Sequence[str], targets: Mapping[str, Target]) -> int:
    return sum(targets[name].weight.size(0) for name in ours)


def row_order(fix: Sequence[Any], rows: int) -> Tensor:
    """For each row of their weight, the row of ours; their weight may be transposed as well."""
    numbers = torch.arange(rows)
    return fix[0][1](numbers[:, None]).flatten() if fix else numbers


@dataclass(frozen=True)
class AdapterFiles:
    """The content of an adapter's folder."""

    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    base: BaseModel


def save_adapter(model: Decoder, folder: Path, hf: HF, base: BaseModel, name: str = "default") -> None:
    """Write the adapters of a name and all modules that are trained whole as a PEFT folder."""
    write_adapter(folder, adapter_files(model, hf, base, name))


def adapter_files(model: Decoder, hf: HF, base: BaseModel, name: str = "default") -> AdapterFiles:
    """The adapters of a name and all modules that are trained whole, as PEFT names them.

    Fused projections of other families whose parts have different A are written with the sum of their ranks.
    """
    check_adapter(name, adapter_names(model))
    kind = family(describe(model.config, hf)["model_type"])
    tensors, ranks, alphas, found = dict[str, Tensor](), dict[str, int](), dict[str, float](), dict[str, Adapter]()
    targets = weights(model)
    for weight, _, adapter in adapters_of(model, name):
        found[weight] = adapter
    left = dict(found)
    for place in places(kind, model, targets):
        if not any(one in found for one in place.ours):
            continue
        for one in place.ours:
            left.pop(one, None)
        a, b, magnitude = joined(place, found, targets)
        scaling = next(found[one].scaling for one in place.ours if one in found)
        rslora = next(iter(found.values())).rslora
        ranks[place.module] = len(a)
        alphas[place.module] = scaling * (math.sqrt(len(a)) if rslora else len(a))
        embedding = isinstance(targets[place.ours[0]].module, nn.Embedding)
        leaves = OURS[2:4] if embedding else OURS[:2]
        tensors |= {f"{PREFIX}{place.module}.{leaf}": t for leaf, t in zip(leaves, (a, b))}
        if magnitude is not None:
            tensors[f"{PREFIX}{place.module}.{OURS[4]}"] = magnitude
    if left:
        raise UserError(f"PEFT has no names for adapters of {next(iter(left))} in this family: merge them instead")
    whole = dict(whole_modules(kind, model))
    tensors |= {PREFIX + one: t for one, t in whole.items()}
    config = peft_config(found, ranks, alphas, sorted({one.rpartition(".")[0] for one in whole}), base.folder)
    return AdapterFiles(tensors, config, replace(base, labels=head_labels(model)))


def joined(
    place: Place, found: Mapping[str, Adapter], targets: Mapping[str, Target]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A, B and the magnitude of a module, from the adapters of our weights that it joins."""
    if place.expert is not None:
        adapter = found[place.ours[0]]
        return adapter.a[place.expert], adapter.b[place.expert], None
    present = [found[one] for one in place.ours if one in found]
    scaling, shared = present[0].scaling, all(torch.equal(one.a, present[0].a) for one in present)
    a = present[0].a if shared else torch.cat([one.a for one in present])
    rows, magnitudes, start = [], [], 0
    for one in place.ours:
        outputs = targets[one].weight.size(0)
        b = a.new_zeros(outputs, len(a))
        if one in found:
            columns = slice(0, len(a)) if shared else slice(start, start := start + found[one].rank)
            b[:, columns] = found[one].b.detach() * (found[one].scaling / scaling)
        rows.append(b)
        if present[0].magnitude is not None:
            magnitudes.append(found[one].magnitude if one in found else targets[one].weight.to(a.dtype).norm(dim=1))
    magnitude = torch.cat([m.detach() for m in magnitudes])[place.order] if magnitudes else None  # type: ignore[union-attr]
    return a, torch.cat(rows)[place.order], magnitude


def whole_modules(kind: Family, model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """The parameters that are trained whole, under the family's names."""
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad and "_lora." not in n}
    for their, our, *fix in kind.names(model.config):
        ours = [our] if isinstance(our, str) else our
        if all(one in trained for one in ours) and isinstance(their, str):
            whole = torch.cat([trained.pop(one).detach() for one in ours])
            yield their, fix[0][1](whole) if fix else whole
    for name, parameter in trained.items():
        yield name, parameter.detach()


def peft_config(
    found: Mapping[str, Adapter], ranks: Mapping[str, int], alphas: Mapping[str, float], whole: list[str], base: str
) -> dict[str, Any]:
    """The content of adapter_config.json; ranks and alphas are by the names of their modules."""
    rank = Counter(ranks.values()).most_common(1)[0][0] if ranks else 8
    alpha = Counter(alphas.values()).most_common(1)[0][0] if alphas else 8
    first = next(iter(found.values()), None)
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if NAME in whole else "CAUSAL_LM",
        "inference_mode": True,
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": first.dropout.p if first else 0.0,
        "use_rslora": bool(first and first.rslora),
        "use_dora": bool(first and first.magnitude is not None),
        "fan_in_fan_out": False,
        "bias": "none",
        "target_modules": sorted(ranks),
        "modules_to_save": whole or None,
        "rank_pattern": {one: r for one, r in ranks.items() if r != rank},
        "alpha_pattern": {one: a for one, a in alphas.items() if a != alpha},
    }


def write_adapter(folder: Path, files: AdapterFiles) -> None:
    """Write the files of an adapter; all are flushed before any is put in place."""
    with ExitStack() as stack:
        beside = {name: stack.enter_context(written_whole(folder / name)) for name in ADAPTER_FILES}
        fill(beside[TENSORS], files.tensors, files.tensors.items())
        beside[CONFIG].write_text(json.dumps(files.config, indent=2) + "\n")
        beside[BASE].write_text(json.dumps(asdict(files.base), indent=2) + "\n")
        for new in beside.values():
            flush(new)


def load_adapter(model: Decoder, folder: Path, hf: HF, name: str = "default") -> None:
    """Add the adapters in a PEFT folder to a model, in place, and use them; everything else is frozen.

    A UserError names what does not fit the model, and options of PEFT that Onward does not have.
    """
    check_adapter_folder(folder)
    config = read_json(folder / CONFIG)
    refuse(config, folder)
    parts, whole = sorted_tensors(folder)
    kind = family(describe(model.config, hf)["model_type"])
    targets = weights(model)
    model.requires_grad_(False)
    stacks: dict[str, list[Adapter]] = {}
    for place in places(kind, model, targets):
        if (given := parts.pop(place.module, None)) is None:
            continue
        try:
            pieces = split(place, given, config, targets)
        except (KeyError, RuntimeError, ValueError) as error:
            raise UserError(f"{folder}: the adapter of {place.module} does not fit this model: {error}") from None
        for one, adapter in zip(place.ours, pieces):
            if place.expert is None:
                add_adapter(model, targets[one], name, adapter)
            else:
                stacks.setdefault(one, []).append(adapter)
    for one, several in stacks.items():
        stacked = several[0]
        stacked.a = nn.Parameter(torch.stack([adapter.a.detach() for adapter in several]))
        stacked.b = nn.Parameter(torch.stack([adapter.b.detach() for adapter in several]))
        add_adapter(model, targets[one], name, stacked)
    if parts:
        raise UserError(f"{folder} has an adapter of {min(parts)}, which this model does not have: load its own base")
    if (weight := whole.get(f"{NAME}.weight")) is not None:
        add_head(model, base_of(folder).labels or [str(i) for i in range(len(weight))])
    load_whole(model, kind, whole, folder)
    selection(model).name = name


def refuse(config: Mapping[str, Any], folder: Path) -> None:
    """Raise a UserError for options that change the output and that Onward does not have."""
    if config.get("peft_type") != "LORA":
        raise UserError(f"{folder} is a {config.get('peft_type')} adapter: Onward reads LORA")
    odd = {
        key: value
        for key, value in config.items()
        if not HARMLESS.fullmatch(key) and value not in (None, False, "none")
    }
    odd = {key: value for key, value in odd.items() if value not in ([], {}, "")} | (
        {"megatron_config": config["megatron_config"]} if config.get("megatron_config") else {}
    )
    for key, value in odd.items():
        raise UserError(f"{folder / CONFIG} has {key} {value!r:.60}, which Onward does not support")


def sorted_tensors(folder: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """The tensors of an adapter's file: those of adapters by module and kind, and those of whole modules by name."""
    parts: dict[str, dict[str, Tensor]] = {}
    whole = {}
    for key, tensor in read_tensors(folder / TENSORS).items():
        name = key.removeprefix(PREFIX).removesuffix(".default")
        leaf = next((one for one in (*OURS, f"{OURS[4]}.weight") if name.endswith(f".{one}")), None)
        if leaf:
            parts.setdefault(name.removesuffix(f".{leaf}"), {})[leaf.removesuffix(".weight")] = tensor
        elif not name.endswith(".base_layer.weight"):  # of the base, which PEFT writes where embeddings are adapted
            whole[name] = tensor
    return parts, whole


def split(place: Place, given: Mapping[str, Tensor], config: HF, targets: Mapping[str, Target]) -> list[Adapter]:
    """The adapters of our weights that a module joins, from its tensors."""
    embedding = isinstance(targets[place.ours[0]].module, nn.Embedding)
    a, b = (given[leaf.removesuffix(".weight")] for leaf in (OURS[2:4] if embedding else OURS[:2]))
    magnitude, rank = given.get(OURS[4]), len(a)
    alpha = next((v for key, v in (config.get("alpha_pattern") or {}).items() if matches(key, place.module)), None)
    alpha = float(config.get("lora_alpha", 8) if alpha is None else alpha)
    rslora = bool(config.get("use_rslora"))
    scaling = alpha / (math.sqrt(rank) if rslora else rank)
    if place.expert is None:
        back = place.order.argsort()
        b, magnitude = b[back], None if magnitude is None else magnitude[back]
    found, start = [], 0
    for one in place.ours:
        weight = targets[one].weight
        shape = weight if place.expert is None else weight[0]
        end = start + shape.size(0)
        adapter = Adapter(
            shape,
            rank,
            scaling,
            dropout=float(config.get("lora_dropout", 0)),
            rslora=rslora,
            dora=magnitude is not None,
        )
        pairs = [(adapter.a, a), (adapter.b, b[start:end])]
        if adapter.magnitude is not None and magnitude is not None:
            pairs.append((adapter.magnitude, magnitude[start:end]))
        for parameter, tensor in pairs:
            if parameter.shape != tensor.shape:
                raise ValueError(f"its shape is {tuple(tensor.shape)}, and the model asks for {tuple(parameter.shape)}")
            parameter.data.copy_(tensor)
        found.append(adapter)
        start = end
    return found


def matches(pattern: str, module: str) -> bool:
    """Whether a key of rank_pattern or alpha_pattern is for a module."""
    return re.fullmatch(rf"(.*\.)?({pattern})", module) is not None


def load_whole(model: Decoder, kind: Family, whole: dict[str, Tensor], folder: Path) -> None:
    """Put modules that were trained whole into a model, and train them further."""
    own = dict(model.named_parameters(remove_duplicate=False))
    rows = [(their, [our] if isinstance(our, str) else our, fix) for their, our, *fix in kind.names(model.config)]
    rows += [(name, [name], []) for name in own]
    for their, ours, fix in rows:
        if not isinstance(their, str) or their not in whole or not all(one in own for one in ours):
            continue
        tensor = whole.pop(their)
        tensor = fix[0][0](tensor) if fix else tensor
        if model.config.tied and ours[0] in ("embed.weight", "head.weight"):
            untie(model)
            own = dict(model.named_parameters())
        for one, part in zip(ours, tensor.split([own[one].size(0) for one in ours])):
            if part.shape != own[one].shape:
                raise UserError(f"{folder} has {their} of another shape than this model: load its own base")
            own[one].data.copy_(part)
            own[one].requires_grad_(True)
    if whole:
        raise UserError(f"{folder} has {min(whole)}, which this model has no place for: load its own base")
