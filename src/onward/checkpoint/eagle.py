"""Loads EAGLE-3 drafts (Li et al. 2025, arXiv:2503.01840), as their authors, SGLang, and vLLM's library speculators
write them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onward.base import fields
from onward.base.errors import UserError
from onward.base.files import read_json
from onward.checkpoint.huggingface.folder import check_depth
from onward.checkpoint.names import to_ours
from onward.checkpoint.weights import StoredTensor, refuse_pickles, stored_tensors
from onward.config.decoder import DecoderConfig
from onward.families import Row, llama, read
from onward.families._keys import HARMLESS, ROPE, is_nothing
from onward.families._wrappers import of_text
from onward.model.decoder import Decoder
from onward.model.eagle import EagleDecoder, SideBySide
from onward.model.state_embedding import StateEmbedding

KIND, LAYER, NESTED = "speculators_model_type", "transformer_layer_config", "eagle_config"
LAYERS = "eagle_aux_hidden_state_layer_ids"
SWITCHES = "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"
OWN = {  # other keys, and the only value that Onward supports; None: every value, since the key has no effect
    **dict.fromkeys((KIND, LAYER, NESTED, "draft_vocab_size", "target_hidden_size", "num_aux_hidden_states")),
    **dict.fromkeys(("speculators_config", "speculators_version", "embed_requires_grad", "has_no_defaults_at_init")),
    **dict.fromkeys(("parallel_draft_heads_num_layers", "num_eagle_features", "target_model_type")),
    **dict.fromkeys(("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"), True),
    "next_layer_regular": True,  # only the first layer reads embeddings
    **dict.fromkeys(("use_mtp_layernorm", "parallel_drafting", "bias"), False),
    **dict.fromkeys(("parallel_draft_step", "logit_scale"), 1),
}
OLDER = {  # parts of tensor names, and their newer names
    "midlayer.": "layers.0.",
    **{f"aux_norm_{level}": f"fc_norm.{i}" for i, level in enumerate(("low", "mid", "high"))},
}
REPEATED = re.compile(r"t2d|verifier_(norm|lm_head)\.weight")  # tensors that follow from d2t or from the model's files


class Names:
    """The names of tensors in an EAGLE-3 draft: those of a Llama, and its own."""

    BASE, IGNORED = "model.", ""

    @staticmethod
    def names(config: DecoderConfig) -> Iterator[Row]:
        yield from llama.names(config)
        yield "model.norm.weight", "embed_out.weight"
        yield "model.layers.0.hidden_norm.weight", "blocks.0.hidden_norm.weight"
        yield "model.fc.weight", "features.fc.weight"
        yield "model.input_norm.weight", "features.norm.weight"
        for i in range(config.n_layers + 16):
            yield f"model.fc_norm.{i}.weight", f"features.norms.{i}.weight"


def is_eagle(folder: Path) -> bool:
    """Return whether a folder holds an EAGLE-3 draft. Raises a UserError for drafts of other programs that are not
    EAGLE-3."""
    if not (folder / "config.json").exists():
        return False
    hf = read_json(folder / "config.json")
    kinds = [str(hf[KIND])] if hf.get(KIND) else [str(name) for name in hf.get("architectures") or ()]
    if any("eagle3" in kind.lower() for kind in kinds) or ("draft_vocab_size" in hf and not hf.get(KIND)):
        return True
    if others := [kind for kind in kinds if "eagle" in kind.lower() or hf.get(KIND)]:
        raise UserError(
            f"Cannot read the draft {folder}, because it is of the kind {others[0]} and not EAGLE-3: make one for your "
            "model with onward finetune MODEL DATA --method draft"
        )
    return False


def load_eagle(folder: Path, model: Decoder) -> EagleDecoder:
    """Load the EAGLE-3 draft in a folder, in the dtype and on the device of `model`. Raises a UserError if its sizes
    do not fit the model, and for a form of the draft that Onward does not compute."""
    refuse_pickles(folder)
    try:
        return load(read_json(folder / "config.json"), stored_tensors(folder), model)
    except UserError as error:
        raise error if str(folder) in str(error) else UserError(f"{folder}: {error}") from None


def load(hf: Mapping[str, Any], tensors: Mapping[str, StoredTensor], model: Decoder) -> EagleDecoder:
    stored = {newer(name): tensor for name, tensor in tensors.items() if not REPEATED.fullmatch(name)}
    config, switches = read_config(hf, model.config, stored)
    layers = feature_layers(hf, model.config.n_layers)
    ids = token_ids(stored.pop("d2t", None), config.vocab_size)
    width, fc = len(layers) * model.config.d_model, stored.get("fc.weight")
    if fc and fc.shape and fc.shape[-1] != width:
        raise UserError(
            f"the draft reads hidden states of {fc.shape[-1]} numbers, but those of the blocks {layers} have {width}: "
            "use a draft made for this model"
        )
    with torch.device("meta"):
        draft = EagleDecoder(config, model.config.d_model, layers, len(ids), **switches)
    wanted = dict(draft.named_parameters())
    own_embedding, own_head = (f"{name}.weight" in stored for name in ("embed_tokens", "lm_head"))
    tied = bool(hf.get("tie_word_embeddings")) and own_embedding
    if not own_embedding:
        del wanted["embed.weight"]
    if not own_head:
        del wanted["head.weight"]
    if not (own_embedding and (own_head or tied)) and model.config.d_embed != config.d_model:
        raise UserError(
            f"the draft uses the model's embedding or output layer, but its width is {config.d_model} and theirs "
            f"{model.config.d_embed}: use a draft made for this model"
        )
    ours, _ = to_ours(Names, config, stored, wanted, dtype=model.dtype, device=model.device)
    draft.load_state_dict(ours, strict=False, assign=True)
    draft.head.tokens = ids.to(model.device)
    if tied and not own_head:
        draft.head.weight = draft.embed.weight
    elif not own_head:
        draft.head = model.head
    embed = draft.embed if own_embedding else model.embed
    draft.embed = StateEmbedding(embed, SideBySide())  # type: ignore[assignment]
    return draft.requires_grad_(False).eval()


def newer(name: str) -> str:
    """Return the newest name of a stored tensor."""
    for part, other in OLDER.items():
        name = name.replace(part, other)
    return name


def read_config(
    hf: Mapping[str, Any], target: DecoderConfig, stored: Mapping[str, StoredTensor]
) -> tuple[DecoderConfig, dict[str, bool]]:
    """Return the config of the draft's layers, for a model with the config `target`, and the draft's switches by name.
    Raises a UserError for keys that would change the draft in a way that Onward does not support."""
    nested = dict(fields.convert(dict[str, Any] | None, hf.get(NESTED), NESTED) or {})
    apart = KIND in hf
    layer = dict(fields.convert(dict[str, Any], hf.get(LAYER), LAYER)) if apart else dict(hf)
    own = dict(hf) | nested if apart else nested | {key: hf[key] for key in OWN.keys() & hf.keys()}
    for key, value in own.items():
        known = key in OWN or key in SWITCHES or key == LAYERS
        if OWN.get(key) is not None and value is not None and value != OWN[key]:
            raise UserError(f"config.json has {key} {value!r}: Onward supports only {OWN[key]!r}")
        if not known and not is_nothing(value) and not HARMLESS.fullmatch(key):
            raise UserError(f"config.json has the key {key}, which Onward does not know: use another draft")
    if apart and "norm_before_residual" not in hf:  # vLLM and speculators have different defaults
        raise UserError("config.json has no norm_before_residual: add it, as true or false")
    values = dict(hf) | nested
    values["fc_norm"] = values.get("fc_norm") or hf.get("use_aux_norm")
    switches = {name: bool(fields.convert(bool | None, values.get(name), name)) for name in SWITCHES}
    left = {key: value for key, value in layer.items() if key not in (*OWN, *SWITCHES, LAYERS, "use_aux_norm")}
    if not apart and any("Llama" in str(name) for name in hf.get("architectures") or ()):
        left["model_type"] = "llama"  # often that of the model, which no program reads
    if left.get("model_type") == "llama" and is_nothing(left.get("layer_types")):
        left = {key: value for key, value in left.items() if "window" not in key}  # no layer reads these keys
    for key in ROPE:
        if isinstance(rope := left.get(key), Mapping):
            left[key] = of_text(rope)
    depth = left.get("num_hidden_layers")
    check_depth(depth if isinstance(depth, int) else 0, stored)
    kind, config = read({**left, "tie_word_embeddings": False})
    if kind.names is not llama.names:
        raise UserError(f"config.json has model_type {left['model_type']!r}: use an EAGLE-3 draft of Llama's form")
    return replace(config, vocab_size=target.vocab_size, context_length=target.context_length), switches


def feature_layers(hf: Mapping[str, Any], n_layers: int) -> list[int]:
    """Return the numbers of the blocks whose inputs are the draft's features, for a model with `n_layers` blocks."""
    given, nested = hf.get(LAYERS), (hf.get(NESTED) or {}).get(LAYERS)
    numbers = fields.convert(tuple[int, ...] | None, given or nested or None, LAYERS)
    layers = [2, n_layers // 2, n_layers - 3] if numbers is None else list(numbers)
    if numbers is not None and not given:
        layers = [layer + 1 for layer in layers]  # SGLang, which reads the nested key, counts outputs of blocks
    if min(layers) < 0 or max(layers) > n_layers or len({*layers}) < len(layers):
        raise UserError(
            f"the draft reads hidden states of the blocks {layers}, but the model has {n_layers}: use a draft made for "
            "this model"
        )
    return layers


def token_ids(offsets: StoredTensor | None, vocab_size: int) -> Tensor:
    """Return the ids of the tokens that the draft can propose, all `vocab_size` without `offsets`: the distance of each
    id from its index."""
    if offsets is None:
        return torch.arange(vocab_size)
    count = offsets.shape[0] if len(offsets.shape) == 1 and offsets.dtype in ("I32", "I64") else 0
    ids = torch.arange(count) + offsets.rows(0, count).long() if count else torch.empty(0)
    if not count or ids.min() < 0 or ids.max() >= vocab_size or len(ids.unique()) < count:
        raise UserError(f"d2t names tokens twice, or beyond the {vocab_size} of the model: use a draft made for it")
    return ids
