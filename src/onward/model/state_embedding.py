"""The embedding of a decoder that continues the hidden states of another.

Shapes: B rows, T tokens of each, D d_model.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class StateEmbedding(nn.Module):
    """The embedding of a decoder that drafts for another: it joins the embedding of each token with a hidden state of
    the token before. `embed` is the embedding of token ids, and `join` a module that turns vectors of tokens and hidden
    states, both (B, T, D), into the inputs (B, T, D) of the first block."""

    def __init__(self, embed: nn.Module, join: nn.Module) -> None:
        super().__init__()
        self.embed, self.join = embed, join
        self.states: dict[tuple[int, ...], Tensor] = {}  # hidden states of the next call, (B, T, D), by (B, T)

    @property
    def weight(self) -> Tensor:
        return self.embed.weight  # type: ignore[return-value]  # a Tensor in nn.Embedding

    @torch.no_grad()
    @torch.inference_mode(False)  # so that the memory can be written to in every mode
    def note(self, states: Tensor) -> None:
        """Store the hidden states (B, T, D) for the next call; calls with the same shape reuse the same memory."""
        self.states.setdefault(states.shape[:2], torch.empty_like(states, memory_format=torch.contiguous_format)).copy_(
            states
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.join(self.embed(tokens), self.states[tokens.shape])
