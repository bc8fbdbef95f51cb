"""Enlarge a trained model by padding its weights with zeros, so that it writes the same texts at a higher cost.

A small trained model thus runs as slowly as a large one, and drafts can be measured without a large trained model.
`widened` supports models with Llama's parts, such as stories260K, and their draft heads. Dimension: E d_head.
"""

from dataclasses import replace

import torch
from torch import Tensor

import onward
from onward.model.draft_head import DraftHead


def places(size: int, blocks: int, factor: int) -> Tensor:
    """The new indices of `size` entries in `blocks` equal parts: each part grows by `factor`, and its entries stay at
    its beginning."""
    part = torch.arange(size // blocks)
    return torch.cat([part + k * len(part) * factor for k in range(blocks)])


def rotated(size: int, d_head: int, factor: int) -> Tensor:
    """The new indices of query or key rows: rotary pair i of E / 2 has the frequency of pair i * `factor` of E *
    `factor` / 2."""
    pairs = torch.cat([torch.arange(d_head // 2) * factor + k * (d_head // 2) * factor for k in range(2)])
    return torch.cat([pairs + head * d_head * factor for head in range(size // d_head)])


def filled(new: Tensor, old: Tensor, *where: Tensor) -> None:
    """Fill `new` with zeros, and write `old` at the indices `where`, one tensor of indices for each dimension."""
    new.zero_()
    new[torch.meshgrid(*where, indexing="ij")] = old


@torch.no_grad()
def widened(lm: onward.LanguageModel, factor: int) -> onward.LanguageModel:
    """Return `lm` and its draft head widened by `factor`, such that the result generates the same text."""
    c, d = lm.config, lm.config.d_model
    assert isinstance(c.attention, onward.SelfAttention)
    assert isinstance(c.norm, onward.RMSNorm)
    attention, norm = replace(c.attention, scale=c.d_head**-0.5), replace(c.norm, eps=c.norm.eps / factor)
    sizes = {name: getattr(c, name) * factor for name in ("d_model", "d_head", "d_ff", "d_embed")}
    model = onward.Decoder(replace(c, attention=attention, norm=norm, **sizes))
    old = dict(lm.model.named_parameters())
    for name, new in model.named_parameters():
        rows, kind = torch.arange(len(old[name])), name.split(".")[-2]
        if new.dim() == 1:  # weight of a norm; padding its input with zeros divides the mean square by `factor`
            filled(new, old[name] * factor**-0.5, rows)
        elif kind in ("q", "k"):
            filled(new, old[name], rotated(len(rows), c.d_head, factor), torch.arange(d))
        else:
            columns = torch.arange(old[name].size(1))
            heads = len(rows) // c.d_head if kind == "v" else 1
            from_heads = len(columns) // c.d_head if kind == "out" else 1
            filled(new, old[name], places(len(rows), heads, factor), places(len(columns), from_heads, factor))
    head = None
    if isinstance(lm.draft_head, DraftHead):
        head = DraftHead(model.config.d_model, max(model.config.d_model, lm.draft_head.d_ff))
        small = dict(lm.draft_head.named_parameters())
        for name, new in head.named_parameters():
            rows = torch.arange(len(small[name]))
            if new.dim() == 1:
                filled(new, small[name] * factor**-0.5, rows)
            else:
                both = small[name].size(1) == 2 * d
                filled(new, small[name], rows, places(small[name].size(1), 2 if both else 1, factor))
        head.requires_grad_(False).eval()
    return onward.LanguageModel(model.requires_grad_(False).eval(), lm.tokenizer, draft_head=head)
