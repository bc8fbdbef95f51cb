"""Loads the layer for multi-token prediction of a published model, as a decoder that drafts for it.

Shapes: B rows, T tokens per row, D d_model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from onward.base.errors import UserError
from onward.checkpoint.load import open_source
from onward.checkpoint.names import to_ours
from onward.config.decoder import DecoderConfig, at
from onward.families import Names
from onward.families._prediction import PredictionLayer
from onward.model.build import build_norm
from onward.model.decoder import Decoder
from onward.model.layers import Linear
from onward.model.state_embedding import StateEmbedding

OURS = {"embedding": "embed.join.embedding", "hidden": "embed.join.hidden", "projection": "embed.join.projection"}


class Projection(nn.Module):
    """Joins embeddings and hidden states (B, T, D): normalizes both, concatenates them with the embedding first, and
    projects them to the inputs (B, T, D) of the block."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embedding, self.hidden = (build_norm(at(config.norm, 0), config) for _ in range(2))
        self.projection = Linear(2 * config.d_model, config.d_model, bias=False)

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        return self.projection(torch.cat([self.embedding(embedded), self.hidden(hidden)], -1))


def load_prediction(path: Path, model: Decoder) -> Decoder:
    """Load the first layer for multi-token prediction in the files of a model, `path`, in the dtype of the loaded
    `model`: a decoder of one block with the model's embedding and head, for a HiddenDraft. Raises a UserError if the
    files have none or store it as integers, or if Onward does not know the family's names for it."""
    outline = open_source(path).outline()
    layer: PredictionLayer | None = getattr(outline.names, "PREDICTION", None)
    if layer is None:
        kind = outline.hf.get("model_type", "this format")
        raise UserError(
            f"Cannot draft by mtp, because Onward reads no layer for multi-token prediction of {kind}: leave it out"
        )
    config = one_layer(model.config)
    with torch.device("meta"):
        draft = Decoder(config)
        draft.embed = StateEmbedding(draft.embed, Projection(config))  # type: ignore[assignment]
    shared = "embed.embed.", "head."
    wanted = {name: p for name, p in draft.named_parameters() if not name.startswith(shared)}
    names = new_names(layer, outline.names, config, model.config.n_layers)
    stored = {names(name): tensor for name, tensor in outline.stored.items() if names(name)}
    if not any(name.startswith(OURS["projection"]) for name in stored):
        raise UserError(f"Cannot draft by mtp, because {path} has no layer for multi-token prediction: leave it out")
    ours, quantized = to_ours(outline.names, config, stored, wanted, dtype=model.dtype, device=model.device)
    if quantized:
        raise UserError(
            f"Cannot draft by mtp, because {path} stores its layer for multi-token prediction as integers: leave it out"
        )
    draft.load_state_dict(ours, strict=False, assign=True)
    draft.embed.embed, draft.head = model.embed, model.head  # type: ignore[assignment]
    return draft.eval()


def one_layer(c: DecoderConfig) -> DecoderConfig:
    """Return the config of a decoder with one layer, like the last layer that is not recurrent, without scaling
    or norm of the embeddings."""
    last = max(layer for layer in range(c.n_layers) if not at(c.attention, layer).states(c))
    parts = {name: at(getattr(c, name), last) for name in ("position", "attention", "mlp", "norm", "block")}
    return replace(c, n_layers=1, tied=False, embed_scale=1.0, embed_norm=None, **parts)


def new_names(layer: PredictionLayer, family: Names, config: DecoderConfig, n: int) -> Callable[[str], str]:
    """Return a function that maps the name of a stored tensor to its name in a model with `config`, which consists of
    this layer only; to "" for tensors of other layers, and for copies of the embedding and the head. `n` is the index
    of this layer in the files."""
    norm = next(str(their) for their, our, *_ in family.names(config) if our == "norm.weight")
    own = {f"{getattr(layer, name).format(n=n)}.weight": f"{our}.weight" for name, our in OURS.items()}
    own[f"{layer.norm.format(n=n)}.weight"] = norm
    block = f"{layer.block.format(n=n)}."
    copies = tuple(f"{block}{name}." for name in ("embed_tokens", "shared_head.head"))

    def new(name: str) -> str:
        name = name if name in own or name.startswith(block) else family.BASE + name
        if name in own or not name.startswith(block) or name.startswith(copies):
            return own.get(name, "")
        return f"{family.BASE}layers.0.{name.removeprefix(block)}"

    return new
