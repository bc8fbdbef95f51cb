"""Writes and reads adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

Tensors have the names of the base's family, see `adapted_weights.py`: base_model.model.MODULE.lora_A.weight (R, I) and
lora_B.weight (O, R); lora_embedding_A (R, V) and lora_embedding_B (D, R); lora_magnitude_vector (O,) with DoRA; for
trained tokens token_adapter.trainable_tokens_delta (N, D). Fully trained modules, and a classification or value head,
have base_model.model.MODULE.weight, and biases of adapted layers base_model.model.MODULE.base_layer.bias. base.json is
described in `bases.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onward.base.errors import UserError
from onward.base.files import read_json
from onward.checkpoint.huggingface.save import describe
from onward.checkpoint.lazy import load_outline
from onward.checkpoint.load import load_source, open_source
from onward.checkpoint.part_files import PartFiles, write_part
from onward.checkpoint.peft.adapted_weights import (
    EMBEDDING,
    LAYER,
    MAGNITUDE,
    adapted_weights,
    joined,
    split,
    stacked,
    tensor_names,
)
from onward.checkpoint.peft.bases import (
    BASE,
    CONFIG,
    BaseModel,
    base_folder,
    base_of,
    check_adapter_folder,
    check_base,
)
from onward.checkpoint.peft.config import CHANGED_BASE, lora_config, matches
from onward.checkpoint.source import ModelSource
from onward.checkpoint.weights import read_tensors
from onward.families import HF, Family, family
from onward.hub.folder import is_adapter
from onward.model.adapters import Adapter
from onward.model.decoder import Decoder
from onward.model.deferred import assign, values
from onward.transforms.heads import NAME, add_head, head_labels
from onward.transforms.lora import (
    adapter_names,
    add_adapter,
    add_token_rows,
    check_adapter,
    joined_adapters,
    resize_vocabulary,
    selection,
    token_rows,
    untie,
    weights,
)

TENSORS = "adapter_model.safetensors"
ADAPTER_FILES = TENSORS, BASE, CONFIG
VOCABULARY = "embed.weight", "head.weight"  # parameters with a row for each token
PREFIX = "base_model.model."
ROWS = "token_adapter.trainable_tokens_delta"


def load_with_adapters(
    folder: Path,
    adapter_folders: Sequence[Path] = (),
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    *,
    allow_nonfinite: bool = False,
    quantize: str | None = None,
    lazy: bool = False,
) -> tuple[Decoder, dict[str, Any], ModelSource]:
    """Load the decoder in `folder` with adapters, each named after its folder; the first is in use. If `folder` itself
    holds an adapter, its base model is loaded with it. Returns (decoder, config.json of the base model, source of the
    tokenizer).

    With `lazy` the weights of the decoder, but not the adapters, are deferred, as in `load_outline`, and `device`,
    `allow_nonfinite` and `quantize` are not used. The other arguments are those of `load_model`."""
    if is_adapter(folder):
        adapter_folders, folder = [folder, *adapter_folders], base_folder(folder)
    source = open_source(folder)
    if lazy:
        model, hf = load_outline(folder, dtype)
    else:
        model, hf = load_source(source, dtype, device, allow_nonfinite=allow_nonfinite, quantize=quantize)
    names = [adapter_folder.resolve().name for adapter_folder in adapter_folders]
    for name, adapter_folder in zip(names, adapter_folders):
        check_base(adapter_folder, folder)
        load_adapter(model, adapter_folder, hf, name)
    if names:
        selection(model).name = names[0]
    # the adapter's tokenizer may have another chat template
    trained = adapter_folders and (adapter_folders[0] / "tokenizer.json").exists()
    return model, hf, open_source(adapter_folders[0]) if trained else source


def save_adapter(model: Decoder, folder: Path, hf: HF, base: BaseModel, name: str = "default") -> None:
    """Write the adapter `name`, and all fully trained modules, as a PEFT folder."""
    write_part(folder, adapter_files(model, hf, base, name))


def adapter_files(
    model: Decoder, hf: HF, base: BaseModel, name: str = "default", gather: Callable[[Tensor], Tensor] = Tensor.detach
) -> PartFiles:
    """Collect the tensors of the adapter `name`, and of all fully trained modules, under PEFT's names. If the weights
    of a fused projection have adapters with different A, their ranks are added. `gather` returns the full tensor of a
    weight, if processes divide the model."""
    check_adapter(name, adapter_names(model))
    kind = family(describe(model.config, hf)["model_type"])
    targets = weights(model)
    adapters = joined_adapters(model, name)
    chosen = [
        target
        for target in adapted_weights(kind, model, targets)
        if target.expert is None and any(our in adapters for our in target.ours)
    ]
    if left := adapters.keys() - {our for target in chosen for our in target.ours}:
        raise UserError(
            f"Cannot save the adapter of {min(left)}, because PEFT has no name for it in this family: merge it instead"
        )
    tensors, ranks, alphas = dict[str, Tensor](), dict[str, int](), dict[str, float]()
    for module, target in tensor_names(chosen).items():
        kept = joined(target, adapters, targets, gather)
        ranks[target.key], alphas[target.key] = kept.rank, kept.alpha
        leaves = EMBEDDING if isinstance(targets[target.ours[0]].module, nn.Embedding) else LAYER
        tensors |= {f"{PREFIX}{module}.{leaf}": t for leaf, t in zip(leaves, (kept.a, kept.b))}
        if kept.magnitude is not None:
            tensors[f"{PREFIX}{module}.{MAGNITUDE}"] = kept.magnitude
    full = dict(full_parameters(kind, model, gather))
    biases = {
        their: full.pop(their) for their in [*full] if their.endswith(".bias") and f"{their[:-4]}weight" not in full
    }
    wrapped = {f"{target.module}.bias": f"{target.module}.base_layer.bias" for target in chosen}
    tensors |= {PREFIX + their: t for their, t in full.items()}
    tensors |= {PREFIX + wrapped.get(their, their): t for their, t in biases.items()}
    modules = {target.key for target in chosen if target.key == target.module}
    full_modules = sorted({their.rpartition(".")[0] for their in full})
    config = peft_config(adapters, ranks, alphas, modules, full_modules, base.folder)
    config["bias"] = "none" if not biases else "lora_only" if biases.keys() <= wrapped.keys() else "all"
    if (rows := token_rows(model, name)) is not None:
        tensors[f"{PREFIX}{embedding(kind, model)}.{ROWS}"] = rows.rows.detach()
        config["trainable_token_indices"] = rows.ids.tolist()
    layers = [one for name, one in adapters.items() if not isinstance(targets[name].module, nn.Embedding)]
    # the initial A and B become a second half of each rank, which subtracts their product: PEFT itself would subtract
    # it from the base of all adapters, and would compute A and B again, with other rounding
    subtracted = bool(layers) and all(adapter.start_a is not None for adapter in layers)
    base = replace(base, labels=head_labels(model), subtracted=subtracted)
    return PartFiles(TENSORS, tensors, {BASE: asdict(base), CONFIG: config})


def embedding(kind: Family, model: Decoder) -> str:
    """Dotted name of the embedding's module in the family's files."""
    names = (their for their, our, *_ in kind.names(model.config) if our == "embed.weight" and isinstance(their, str))
    return next(names, "embed.weight").removesuffix(".weight")


def full_parameters(kind: Family, model: Decoder, gather: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the family's files, tensor) for each fully trained parameter; if only a part of a fused tensor is
    trained, yield the whole fused tensor."""
    every = dict(model.named_parameters())
    trained = {n: p for n, p in every.items() if p.requires_grad and "_lora." not in n}
    for their, our, *fix in kind.names(model.config):
        ours = [our] if isinstance(our, str) else our
        if any(our in trained for our in ours) and isinstance(their, str):
            joint = torch.cat([gather(trained.pop(our, every[our])) for our in ours])
            yield their, fix[0][1](joint) if fix else joint
    for name, parameter in trained.items():
        yield name, parameter.detach()


def peft_config(
    adapters: Mapping[str, Adapter],
    ranks: Mapping[str, int],
    alphas: Mapping[str, float],
    modules: Set[str],
    full: list[str],
    base: str,
) -> dict[str, Any]:
    """The content of adapter_config.json; `ranks` and `alphas` are keyed by the names of adapted modules and
    parameters; `modules` names the modules among them."""
    parameters = sorted(ranks.keys() - modules)
    rank = Counter(ranks.values()).most_common(1)[0][0] if ranks else 8
    alpha = Counter(alphas.values()).most_common(1)[0][0] if alphas else 8
    first = next(iter(adapters.values()), None)
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if NAME in full else "CAUSAL_LM",
        "inference_mode": True,
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": first.dropout.p if first and not parameters else 0.0,
        "use_rslora": bool(first and first.rslora),
        "use_dora": bool(first and first.magnitude is not None),
        "fan_in_fan_out": False,
        "target_modules": sorted(modules),
        "target_parameters": parameters or None,
        "modules_to_save": full or None,
        "rank_pattern": {key: r for key, r in ranks.items() if r != rank},
        "alpha_pattern": {key: a for key, a in alphas.items() if a != alpha},
    }


def load_adapter(model: Decoder, folder: Path, hf: HF, name: str = "default") -> None:
    """Add the adapter in a PEFT folder to a model, in place, and use it; parameters that it does not train are
    frozen."""
    check_adapter_folder(folder)
    config = lora_config(read_json(folder / CONFIG), folder / CONFIG)
    subtracted = base_of(folder).subtracted
    parts, full, bases = sorted_tensors(folder)
    rows = {name: full.pop(name) for name in [*full] if name.endswith(f".{ROWS}")}
    kind = family(describe(model.config, hf)["model_type"])
    targets = weights(model)
    check_alone(model, full, folder)
    if config.init_lora_weights not in CHANGED_BASE:
        check_base_layers(model, kind, bases, folder)
    model.requires_grad_(False)
    targeted = config.target_parameters or ()
    adapted = adapted_weights(kind, model, targets)
    present = [
        place for place in adapted if not place.stack or any(matches(pattern, place.key) for pattern in targeted)
    ]
    experts: dict[str, dict[int, Adapter]] = {}
    for module, place in tensor_names(present).items():
        if (given := parts.pop(module, None)) is None:
            continue
        try:
            pieces = split(place, given, config, targets, subtracted)
        except (KeyError, RuntimeError, ValueError) as error:
            raise UserError(f"{folder}: the adapter of {place.key} does not fit this model: {error}") from None
        for our, adapter in zip(place.ours, pieces):
            if place.expert is None:
                add_adapter(model, targets[our], name, adapter)
            else:
                experts.setdefault(our, {})[place.expert] = adapter
    for our, by_expert in experts.items():
        try:
            adapter = stacked(targets[our].weight, by_expert)
        except ValueError as error:
            raise UserError(f"{folder}: the adapters of the experts in {our} do not fit this model: {error}") from None
        add_adapter(model, targets[our], name, adapter)
    if rows:
        load_rows(model, rows, config.trainable_token_indices, embedding(kind, model), name, folder)
    if parts:
        raise UserError(
            f"{folder} has an adapter of {min(parts)}, which is not a layer or stack of experts of this model: load "
            "its own base"
        )
    if (weight := full.get(f"{NAME}.weight")) is not None:
        add_head(model, base_of(folder).labels or [str(i) for i in range(len(weight))])
    load_full(model, kind, full, folder)
    selection(model).name = name


def load_rows(
    model: Decoder,
    rows: Mapping[str, Tensor],
    tokens: Sequence[int] | Mapping[str, Sequence[int]] | None,
    module: str,
    name: str,
    folder: Path,
) -> None:
    """Add the trained token embeddings of an adapter; `tokens` are their ids, possibly for each module."""
    given = [*tokens.values()] if isinstance(tokens, Mapping) else [tokens or ()]
    tensor = rows.get(f"{module}.{ROWS}")
    if tensor is None or len(rows) > 1 or any(other != given[0] for other in given):
        raise UserError(
            f"Cannot load {folder}, because it has trainable_token_indices of {min(rows)} and Onward reads only those "
            f"of {module}: merge it with PEFT"
        )
    ids = torch.tensor(given[0])
    if tensor.shape != (len(ids), model.embed.weight.size(1)) or int(ids.max()) >= model.config.vocab_size:
        raise UserError(f"{folder} has trainable_token_indices that do not fit this model: load its own base")
    order = ids.argsort()
    device = None if model.embed.weight.is_meta else model.device
    add_token_rows(model, name, ids[order].to(device), tensor[order].to(device))


def sorted_tensors(folder: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor], dict[str, Tensor]]:
    """Return ({module: {kind, such as lora_A: tensor}}, tensors of fully trained modules, weights of the base, which
    PEFT includes if embeddings are adapted)."""
    parts: dict[str, dict[str, Tensor]] = {}
    full, bases = {}, {}
    leaves = (*LAYER, *EMBEDDING, MAGNITUDE, f"{MAGNITUDE}.weight")
    for key, tensor in read_tensors(folder / TENSORS).items():
        name = key.removeprefix(PREFIX).removesuffix(".default")
        leaf = next((end for end in leaves if name.endswith(f".{end}")), None)
        if leaf:
            parts.setdefault(name.removesuffix(f".{leaf}"), {})[leaf.removesuffix(".weight")] = tensor
        elif name.endswith((".modules_to_save.bias", ".original_module.bias")):
            continue  # with bias "all" PEFT stores the biases of fully trained modules twice
        elif name.endswith(".base_layer.bias"):
            full[name.replace(".base_layer.", ".")] = tensor
        elif name.endswith(".base_layer.weight"):
            bases[name.replace(".base_layer.", ".")] = tensor
        else:
            full[name] = tensor
    return parts, full, bases


def changes_base(folder: Path) -> bool:
    """Return whether the adapter in a folder comes with fully trained tensors, which replace those of its base."""
    return any(not name.endswith(f".{ROWS}") for name in sorted_tensors(folder)[1])


def check_alone(model: Decoder, full: Mapping[str, Tensor], folder: Path) -> None:
    """Refuse a second adapter if one of the two comes with fully trained tensors, which change the base of the
    other."""
    others = [name for name, p in model.named_parameters() if p.requires_grad and "_lora." not in name]
    if adapter_names(model) and (full or others):
        what = str(folder) if full else "the loaded adapter"
        raise UserError(
            f"Cannot load two adapters, because {what} has {min(full or others)}, fully trained, which changes the "
            "base of both: load one"
        )


def check_base_layers(model: Decoder, kind: Family, bases: dict[str, Tensor], folder: Path) -> None:
    """Check that the weights of the base in an adapter's file equal the model's, up to rounding."""
    for their, our, part in by_our_names(model, kind, bases, folder):
        weight = values(model.get_parameter(our)).detach().float()
        if not torch.allclose(part.float(), weight, rtol=1e-2, atol=1e-2 * weight.abs().mean().item()):
            raise UserError(f"{folder} was made for a base with another {their}: load it with its own base")


def by_our_names(
    model: Decoder, kind: Family, tensors: dict[str, Tensor], folder: Path
) -> Iterator[tuple[str, str, Tensor]]:
    """Pop the model's parameters from `tensors`, and yield (family's name, Decoder's name, tensor)."""
    own = dict(model.named_parameters(remove_duplicate=False))
    rows = [(their, [our] if isinstance(our, str) else our, fix) for their, our, *fix in kind.names(model.config)]
    rows += [(name, [name], []) for name in own]
    for their, ours, fix in rows:
        if isinstance(their, str) and their in tensors and all(our in own for our in ours):
            tensor, sizes = tensors.pop(their), [own[our].size(0) for our in ours]
            try:
                parts = (fix[0][0](tensor) if fix else tensor).split(sizes)
            except RuntimeError:
                parts = ()
            if [part.shape for part in parts] != [own[our].shape for our in ours]:
                raise UserError(f"{folder} has {their} of another shape than this model: load its own base")
            for our, part in zip(ours, parts):
                yield their, our, part


def load_full(model: Decoder, kind: Family, full: dict[str, Tensor], folder: Path) -> None:
    """Copy fully trained modules into a model and make them trainable. A larger embedding and head enlarge the
    vocabulary."""
    names = {our: their for their, our, *_ in kind.names(replace(model.config, tied=False)) if isinstance(our, str)}
    sizes = {len(full[name]) for our in VOCABULARY if (name := names.get(our, our)) in full}
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    both = all(names.get(our, our) in full and our in own for our in VOCABULARY)
    if both and len(sizes) == 1 and (size := sizes.pop()) > model.config.vocab_size:
        resize_vocabulary(model, size)
    for _, our, part in by_our_names(model, kind, full, folder):
        if model.config.tied and our in VOCABULARY:
            untie(model)
        parameter = model.get_parameter(our)
        assign(parameter, part)
        parameter.requires_grad_(True)
    if full:
        raise UserError(f"{folder} has {min(full)}, which this model does not have: load its own base")
