"""What a decoder looks at and what it expects next, seen from outside.

Shapes: H heads, T tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from onward.model.attention import Attend
from onward.model.cache import View
from onward.model.decoder import Decoder, without_dropout


def attends(model: Decoder) -> list[Attend]:
    """Where each layer attends."""
    return [block.attn.attend for block in model.blocks]  # type: ignore[union-attr, misc]


@contextmanager
def attention_watched(model: Decoder) -> Iterator[list[Tensor]]:
    """A list that fills with the attention weights (B, H, T, T) of each layer when the model is called without a cache.

    They are recomputed beside the kernel that runs, from its inputs, so that looking changes no bit of the output.
    Compiled blocks run as they are written meanwhile, since compiled code passes hooks by.
    """
    maps: list[Tensor] = []

    @torch.no_grad()
    def look(attend: Attend, inputs: tuple[Tensor, Tensor, Tensor, View], _: Tensor) -> None:
        q, k, _, view = inputs
        maps.append(attend.weights(q, k, view))

    hooks = [attend.register_forward_hook(look) for attend in attends(model)]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield maps
    finally:
        for hook in hooks:
            hook.remove()


def attention_maps(model: Decoder, tokens: Sequence[int]) -> list[Tensor]:
    """Which share each token reads from each other, for one sequence: (H, T, T) of every layer, dropout left out.

    Row q, column k: how much token q reads from token k. Rows sum to 1 (to less where there are sinks), and what lies
    above the diagonal is exactly 0: nothing is read from the future.
    """
    with attention_watched(model) as maps:
        logits(model, tokens)
    return [weights[0] for weights in maps]


def next_tokens(model: Decoder, tokens: Sequence[int], top: int = 10) -> list[list[tuple[int, float]]]:
    """For every place of a sequence the `top` likeliest next tokens as (id, probability), likeliest first.

    Place t has seen tokens 0 to t, so the last item tells how the sequence may go on.
    """
    probabilities = logits(model, tokens).softmax(-1, dtype=torch.float32)
    likeliest = probabilities.topk(min(top, probabilities.size(-1)))
    return [list(zip(ids, shares)) for ids, shares in zip(likeliest.indices.tolist(), likeliest.values.tolist())]


@torch.inference_mode()
def logits(model: Decoder, tokens: Sequence[int]) -> Tensor:
    """The logits (T, V) of one sequence."""
    with without_dropout(model):
        return model(torch.tensor([list(tokens)], device=model.embed.weight.device))[0]
