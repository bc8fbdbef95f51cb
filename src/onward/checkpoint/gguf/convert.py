"""Converts a model to a GGUF file: finds the architecture of llama.cpp that computes the same function, and its keys
and tensors."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from onward.base import fields
from onward.base.errors import UserError
from onward.base.fields import counted
from onward.checkpoint.gguf.architectures import ARCHITECTURES, Architecture
from onward.checkpoint.gguf.header import Header, TensorInfo
from onward.checkpoint.gguf.importance import by_their_names, importance
from onward.checkpoint.gguf.keys import Keys
from onward.checkpoint.gguf.kquants import mixed
from onward.checkpoint.gguf.rope import divisors, rope_keys
from onward.checkpoint.gguf.vocabulary import general_name, tokenizer_keys
from onward.checkpoint.gguf.writer import TensorOutline, type_of, write_gguf
from onward.checkpoint.weights import DTYPE_NAMES
from onward.config.decoder import (
    AttentionOnly,
    DecoderConfig,
    Experts,
    Gated,
    LatentAttention,
    LayerNorm,
    RMSNorm,
    Rotary,
    SelfAttention,
    at,
)
from onward.config.scaling import Llama3Scaling, LongRoPEScaling, YaRNScaling
from onward.model.adapters import adapter_names
from onward.model.decoder import Decoder
from onward.text.tokenizer import Tokenizer
from onward.transforms.quantize import is_quantized

FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32} | {
    "Q4_K_M": 15,
    "Q5_K_M": 17,
    "Q6_K": 18,
}  # general.file_type
PARTS = "position", "attention", "mlp", "norm", "block", "embed_norm", "final_norm"
LAYER = re.compile(r"blk\.(\d+)\.")
UNUSED = Gated()  # placeholder in blocks without a feed-forward
TOLERANCE = 1e-6  # GGUF keeps numbers in fp32
ACCEPTABLE = {  # differences that a user may accept, by name
    "epsilon": re.compile(r"attention\.norm_eps \([\d.e-]+ here, [\d.e-]+ there\)"),  # of the latents' norms, in GLM-5
    "gelu": re.compile(r"mlp\.act \(gelu here, gelu_tanh there\)"),  # changes log-probabilities by about 1e-3
    "ramp": re.compile(r"position\.scaling\.truncate \(no here, yes there\)"),  # YaRN's ramp, rounded to whole pairs
    "phimoe": re.compile(r"(norm|mlp\.router) \((layer_norm|sparse_mixer) here, \w+ there\)"),  # in Phi-3.5-MoE
    "step": re.compile(r"attention\.step_min \([\d.e-]+ here, 0 there\)"),  # the minimum step of Mamba-2
    "window": re.compile(r"attention\.window \([\d,]+ here, 0 there\)"),  # no effect on texts shorter than the window
}
Accept = Literal["epsilon", "gelu", "phimoe", "ramp", "step", "window"]


@dataclass(frozen=True)
class Plan:
    """The contents of a GGUF file to be written, except the values of the tensors."""

    architecture: Architecture
    config: DecoderConfig
    keys: Mapping[str, Any]
    constants: Mapping[str, Tensor]  # non-parameter tensors: factors of rotary frequencies
    outlines: Mapping[str, TensorOutline]  # outlines of all tensors, in file order
    differences: tuple[str, ...] = ()  # accepted differences from llama.cpp's computation

    @property
    def nbytes(self) -> int:
        return sum(outline.nbytes for outline in self.outlines.values())


def plan(
    model: Decoder,
    tokenizer: Tokenizer | None,
    dtype: str = "",
    name: str = "model",
    family: str = "",
    accept: Collection[Accept] = (),
) -> Plan:
    """Plan the GGUF file of a model. `dtype` is a name in FILE_TYPES, such as Q8_0, by default the dtype of the model's
    weights; `name` is the model's name in the file; `family` is the model_type whose architecture is tried first;
    `accept` names differences in ACCEPTABLE that llama.cpp's computation may have.

    Raises a UserError if no architecture of llama.cpp computes the same as the model, or if llama.cpp does not support
    its tokenizer.
    """
    if is_quantized(model):
        raise UserError("this model has quantized layers, which cannot be written as GGUF: convert the original model")
    if names := adapter_names(model):
        raise UserError(f"this model has the adapter {names[0]}: merge it first with onward merge or merge_lora")
    dtype = dtype or DTYPE_NAMES[model.embed.weight.dtype]
    if dtype not in FILE_TYPES:
        raise UserError(f"Cannot write a GGUF file in {dtype}: name another dtype, such as f32")
    meta = {name: tensor.to("meta") for name, tensor in model.named_parameters()}
    matched = matching(model.config, meta, name, family, accept)
    head = "output.weight" if "output.weight" in matched.outlines else "token_embd.weight"

    def kind_of(name: str) -> str:
        if dtype == "Q4_0":
            return "Q8_0" if name == head else dtype  # an 8-bit head halves the divergence from the original model
        layer = LAYER.match(name)
        return mixed(name, dtype, int(layer[1]) if layer else 0, model.config.n_layers, name == head)

    kinds = {name: kind_of(name) if dtype == "Q4_0" or "_K" in dtype else dtype for name in matched.outlines}
    outlines = {
        name: replace(own, type=type_of(name, own.shape, kinds[name])) for name, own in matched.outlines.items()
    }
    keys = {**matched.keys, "general.file_type": FILE_TYPES[dtype], "general.quantization_version": 2}
    keys |= matched.architecture.number_keys(model.config, dict(model.named_parameters()))
    keys["general.size_label"] = size_label(outlines)
    if tokenizer:
        keys["general.name"] = general_name(name, tokenizer)
    keys |= tokenizer_keys(tokenizer, model.config.vocab_size) if tokenizer else {"tokenizer.ggml.model": "none"}
    return replace(matched, keys=keys, outlines=outlines)


def matching(
    c: DecoderConfig, ours: Mapping[str, Tensor], name: str, family: str, accept: Collection[Accept] = ()
) -> Plan:
    """The plan, in fp32, for the first architecture that computes the same as the decoder, except for accepted
    differences. The architecture of `family` is tried first; `name` is the model's name in the file."""
    candidates = sorted(ARCHITECTURES.values(), key=lambda kind: family not in kind.families)
    tried: list[tuple[int, int, str, list[str]]] = []
    for number, kind in enumerate(candidates):
        try:
            candidate = outlined(kind, c, ours, name)
            # the keys are read again, so that whatever llama.cpp fixes without a key appears as a difference
            header = Header(Path(name), candidate.keys, infos(candidate), candidate.constants)
            theirs = kind.config(Keys(header))
        except UserError as error:
            tried.append((1000, number, kind.name, [str(error)]))
            continue
        tied = {"required": c.tied, "absent": True}.get(kind.head, theirs.tied)
        differ = differences(comparable(kind.folded(c)), comparable(replace(theirs, tied=tied)))
        differ += kind.differences
        differ += [f"{name} (no such tensor there)" for name in candidate.outlines if name in ours]
        if not [line for line in differ if not accepted(line) & {*accept}]:
            return replace(candidate, differences=tuple(differ))
        # a different part is a larger difference than a different field
        of_kinds = sum(line.split()[0] in PARTS for line in differ)
        tried.append((len(differ) + 3 * of_kinds, number, kind.name, differ))
    _, _, nearest, differ = min(tried)
    known = [*map(accepted, differ)]
    ways = "".join(f" --accept {name}" for name in sorted(set[str]().union(*known))) if all(known) else ""
    raise UserError(
        f"no architecture of llama.cpp computes the same as this model; {nearest} differs in "
        f"{' and '.join(differ[:3])}: keep the model as a folder"
        f"{f', or accept the difference with{ways}' if ways else ''}"
    )


def accepted(difference: str) -> set[str]:
    """The name in ACCEPTABLE for a line of `differences`, as a set; empty if the difference cannot be accepted."""
    return {name for name, known in ACCEPTABLE.items() if known.fullmatch(difference)}


def outlined(kind: Architecture, c: DecoderConfig, ours: Mapping[str, Tensor], name: str) -> Plan:
    """The plan with all tensors in fp32, without a check that llama.cpp computes the same."""
    constants = kind.constants(c)
    try:
        tensors = {**constants, **dict(kind.tensors(c, parameters(kind, c, ours)))}
    except KeyError as error:
        raise UserError(f"{kind.name} fuses {error} with other tensors, and the model has no such tensor") from None
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    outlines = {name: TensorOutline(shape, type_of(name, shape, "F32")) for name, shape in shapes.items()}
    return Plan(kind, c, keys_of(kind, c, name), constants, outlines)


def parameters(kind: Architecture, c: DecoderConfig, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters that the file holds: the decoder's, and a copy of the embedding if the architecture requires a
    separate head."""
    copied = {"head.weight": ours["embed.weight"]} if c.tied and kind.head == "required" else {}
    return {**ours, **copied}


def infos(plan: Plan) -> dict[str, TensorInfo]:
    """The plan's tensors as if read from a header, so that the plan can be checked like a file."""
    return {name: TensorInfo(Path(), 0, outline.type, outline.shape) for name, outline in plan.outlines.items()}


def size_label(outlines: Mapping[str, TensorOutline]) -> str:
    """The number of parameters as the reference converter writes it, such as 7.2B; for a mixture of experts, the number
    of experts and the number of parameters with one expert, such as 8x7.2B."""
    experts = [own.shape[0] for name, own in outlines.items() if is_expert(name, own)]
    shares = (math.prod(own.shape) // (own.shape[0] if is_expert(name, own) else 1) for name, own in outlines.items())
    total = sum(shares)
    unit, letter = next((pair for pair in ((1e12, "T"), (1e9, "B"), (1e6, "M")) if total > pair[0]), (1e3, "K"))
    digits = 2 - min(2, len(str(round(total / unit)).lstrip("0")))
    count = f"{sum(experts) // len(experts)}x" if experts else ""
    return f"{count}{total / unit:.{digits}f}{letter}"


def is_expert(name: str, outline: TensorOutline) -> bool:
    """Whether a tensor holds the matrices (E, ...) of E experts."""
    return "_exps." in name and len(outline.shape) > 2


def keys_of(kind: Architecture, c: DecoderConfig, name: str) -> dict[str, Any]:
    """The metadata keys of the file, except those of its tokenizer and its type."""
    norm = at(c.norm, 0)
    own: dict[str, Any] = {
        "context_length": c.context_length,
        "embedding_length": c.d_model,
        "block_count": c.n_layers,
        "feed_forward_length": dense_width(c),
        "attention.head_count": c.n_heads,
        "attention.head_count_kv": c.n_kv_heads,
        "attention.key_length": c.d_head,
        "attention.value_length": c.d_head,
        "vocab_size": c.vocab_size,
    }
    if isinstance(norm, RMSNorm):
        own["attention.layer_norm_rms_epsilon"] = norm.eps
    elif isinstance(norm, LayerNorm):
        own["attention.layer_norm_epsilon"] = norm.eps
    own |= rope_keys(c) | kind.keys(c)
    general = {"general.architecture": kind.name, "general.type": "model", "general.name": name}
    return general | {f"{kind.name}.{key}": value for key, value in own.items()}


def dense_width(c: DecoderConfig) -> int:
    """The width of the feed-forwards without experts if they are all equally wide; d_ff if there are none, or if their
    widths differ."""
    dense = [part for layer in range(c.n_layers) if not isinstance(part := at(c.mlp, layer), Experts)]
    widths = {part.width(c) for part in dense if hasattr(part, "width")}
    return widths.pop() if len(widths) == 1 else c.d_ff


def comparable(c: DecoderConfig) -> DecoderConfig:
    """The configuration without options that do not change outputs within the context, such as dropout, a window as
    long as the context, a scale equal to the default, and the backend of experts."""

    def scale(value: float | None, width: int) -> float | None:
        return None if value and abs(value * width**0.5 - 1) < TOLERANCE else value

    def attention(part: Any) -> Any:
        match part:
            case LatentAttention():
                return replace(part, scale=scale(part.scale, part.d_nope + part.d_rope))
            case SelfAttention():
                window = 0 if part.window >= c.context_length else part.window
                own = scale(part.scale, part.heads(c).d_head)
                return replace(part, scale=own, window=window, chunked=part.chunked and window > 0)
        return part

    def feed_forward(part: Any) -> Any:
        if isinstance(part, Experts):  # the sum of the routing weights is hardly ever below the minimum
            router = replace(part.router, min_sum=1e-20) if part.router.min_sum < 1e-4 else part.router
            part = replace(part, backend="auto", router=router)
        return replace(part, d_ff=part.width(c)) if hasattr(part, "width") else part

    def position(part: Any, width: int) -> Any:
        scaling = getattr(part, "scaling", None)
        if isinstance(part, Rotary):
            part = replace(part, fraction=part.rope_dim(width) / width)
        if isinstance(scaling, Llama3Scaling):
            factors = tuple(divisors(scaling, part.theta, part.rope_dim(width)).tolist())
            return replace(part, scaling=LongRoPEScaling(factors, factors, 1))
        if isinstance(scaling, YaRNScaling):
            return replace(part, scaling=replace(scaling, attention_factor=scaling.magnitude))
        if isinstance(scaling, LongRoPEScaling) and scaling.short == scaling.long:
            return replace(part, scaling=replace(scaling, original=1))
        return part

    layers = range(c.n_layers)
    return replace(
        c,
        dropout=0.0,
        d_ff=1,  # each feed-forward has its own width
        position=tuple(position(at(c.position, i), at(c.attention, i).rope_width(c)) for i in layers),
        attention=tuple(attention(at(c.attention, i)) for i in layers),
        mlp=tuple(UNUSED if isinstance(at(c.block, i), AttentionOnly) else feed_forward(at(c.mlp, i)) for i in layers),
        final_norm=None if c.final_norm == at(c.norm, c.n_layers - 1) else c.final_norm,
    )


def differences(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """The fields in which two configurations differ, in words; parts are compared layer by layer, and equal lines are
    listed once."""
    if path == "":
        ours, theirs = fields.plain(ours), fields.plain(theirs)
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        if ours.get("kind") != theirs.get("kind"):
            return [f"{path} ({ours.get('kind')} here, {theirs.get('kind')} there)"]
        pairs = [(f"{path}.{name}".lstrip("."), ours[name], theirs[name]) for name in ours]
    elif isinstance(ours, list) or isinstance(theirs, list):
        own, other = (value if isinstance(value, list) else [value] for value in (ours, theirs))
        pairs = [(path, own[i % len(own)], other[i % len(other)]) for i in range(math.lcm(len(own), len(other)))]
    else:
        numbers = type(ours) in (int, float) and type(theirs) in (int, float)
        if ours == theirs or (numbers and math.isclose(ours, theirs, rel_tol=TOLERANCE)):
            return []
        return [f"{path} ({fields.text(ours) or 'none'} here, {fields.text(theirs) or 'none'} there)"]
    return list(dict.fromkeys(line for name, own, other in pairs for line in differences(own, other, name)))


def losses(model: Decoder, tokenizer: Tokenizer | None, plan: Plan) -> list[str]:
    """Sentences on the information that the file loses, such as rounded weights."""
    source = DTYPE_NAMES[model.embed.weight.dtype]
    rounded = Counter(own.type.name for own in plan.outlines.values() if own.type.name not in (source, "F32"))
    lost = [f"{counted(number, 'tensor')} rounded from {source} to {kind}" for kind, number in rounded.items()]
    lost += [f"llama.cpp differs in: {line}" for line in plan.differences]
    lost += [f"dropout of {model.config.dropout}, for training further"] if model.config.dropout else []
    return lost + ([] if tokenizer else ["there is no tokenizer: programs can pass token ids only"])


def check_importance(dtype: str, importance: str) -> None:
    """Raise a UserError if a text of importance is given that no type of the file uses."""
    if importance and "_K" not in dtype.upper():
        raise UserError(
            f"importance is used only by q4_k_m, q5_k_m and q6_k, and not by {dtype or 'the dtype of the model'}: "
            "choose one of them as dtype, or leave importance out"
        )


def write_model(
    model: Decoder,
    plan: Plan,
    path: Path,
    progress: Callable[[int], object] = lambda done: None,
    tokens: Sequence[int] = (),
) -> None:
    """Write the planned file. With `tokens`, errors of K types are weighted by the importance of columns on these
    tokens."""
    ours = parameters(plan.architecture, plan.config, dict(model.named_parameters()))
    columns = by_their_names(plan.architecture, model, importance(model, tokens)) if tokens else {}
    write_gguf(path, plan.keys, plan.outlines, numbers(plan, ours), progress, columns)


def numbers(plan: Plan, ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for the planned file, one by one."""
    yield from plan.constants.items()
    for name, tensor in plan.architecture.tensors(plan.config, ours):
        shift = plan.architecture.shift_of(name)
        yield name, tensor.float() + shift if shift else tensor
