"""The token that `onward explain` follows through a decoder, with its activations and panels that show them.

Shapes: T tokens, H heads, E d_head. The numbers come from traced activations.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from onward.config.part_types import Norm
from onward.inspection.head_maps import logits
from onward.model.decoder import Decoder
from onward.planning.descriptions import formula
from onward.reports.explain.story import StoryStep
from onward.reports.pictures.markup import MARKS, readable
from onward.reports.pictures.panels import cells
from onward.reports.pictures.picture import Panel
from onward.reports.pictures.scale import ColorScale
from onward.text.tokenizer import Tokenizer
from onward.tracing.names import activation_names
from onward.tracing.trace import Trace, trace

NUMBERS, HEADS = 10, 8  # largest number of elements of a vector, and of heads with vectors, that are shown
KEYS = 40  # largest number of keys that are shown
OUTSIDE_BLOCKS = ("embed", "embed_norm", "position", "norm", "norm.scale", "logits")
OF_ALL_BLOCKS = ("in", "attn.weights", "attn.out", "mlp.out", "out")


class Followed:
    """The token at index `position`, with the main activations of all blocks and every activation of block `layer`."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer, tokens: Sequence[int], position: int, layer: int) -> None:
        self.model, self.config, self.tokenizer = model, model.config, tokenizer
        self.tokens, self.p, self.layer = list(tokens), position, layer
        self.pieces = [readable(tokenizer.piece(token), MARKS) for token in tokens]
        known = activation_names(model)
        wanted = [*OUTSIDE_BLOCKS, *(f"blocks.*.{name}" for name in OF_ALL_BLOCKS), f"blocks.{layer}.*"]
        patterns = [pattern for pattern in wanted if any(fnmatchcase(name, pattern) for name in known)]
        with trace(model, *patterns) as t:
            logits(model, self.tokens)
        self.t: Trace = t

    @property
    def piece(self) -> str:
        return f"“{self.pieces[self.p]}”"

    def at(self, name: str) -> Tensor:
        """The activation at the followed token, in fp32."""
        return self.t[name][0, self.p].float().cpu()

    def has_weights(self, layer: int) -> bool:
        """Whether a layer has attention weights; a recurrent layer, among others, has none."""
        return f"blocks.{layer}.attn.weights" in self.t

    def weights(self, layer: int) -> Tensor:
        """Attention weights (H, p + 1) of the token at position p over itself and the tokens before."""
        return self.t[f"blocks.{layer}.attn.weights"][0, :, self.p, : self.p + 1].float().cpu()

    def guess(self, layer: int) -> str:
        """Say which next token the model would predict if it ended after block `layer` (the logit lens)."""
        with torch.inference_mode():
            x = self.t[f"blocks.{layer}.out"][:, self.p : self.p + 1]
            p = self.model.logits(self.model.norm(x))[0, 0].float().softmax(-1)
        name = readable(self.tokenizer.piece(int(p.argmax())), MARKS)
        return f"If the model ended here, it would predict “{name}” with {p.max():.1%}.".replace("%", " %")

    def norm(self, part: Norm, title: str, before: str, after: str, wide: str) -> StoryStep:
        """Explain the norm `part`: `before` and `after` name its input and output activations, `wide` is their
        shape."""
        y, scale, module = self.at(after), f"{after}.scale", self.model.get_submodule(after)
        divided = formula(part)
        weighted = ", then multiplied by learned weights" * any(True for _ in module.parameters())
        applied = f" Here it divides by {float(self.at(scale)):.3f}." if scale in self.t else ""
        panels = [vector("before", self.at(before))] if before in self.t else []
        return StoryStep(
            title,
            wide,
            "y = norm(x)",
            "The vector is brought to a standard size, so that its numbers stay in the range that the next matrix "
            f"was trained for: {divided[:1].lower()}{divided[1:]}{weighted}.{applied}",
            [*panels, vector("after", y)],
        )

    def of_heads(self, title: str, x: Tensor, scale: ColorScale | None = None, reading: str = "") -> Panel:
        """A row for each of the first heads, a column for each of the last KEYS tokens up to the followed one; x (H, p
        + 1)."""
        shown = slice(max(0, self.p + 1 - KEYS), self.p + 1)
        rows = [f"head {h}" for h in range(min(len(x), 2 * HEADS))]
        values = x[: len(rows), shown].numpy()
        return cells(title, values, rows, self.pieces[shown], scale=scale, reading=reading)

    def weights_panel(self, layer: int) -> Panel:
        scale = ColorScale(1, root=True, unit="weight")
        return self.of_heads("attention weights", self.weights(layer), scale, "{row} looks at {column} with {value}")


def vector(title: str, x: Tensor) -> Panel:
    """The first NUMBERS elements of a vector."""
    shown = x[:NUMBERS]
    more = f" (first {NUMBERS} of {len(x):,} numbers)" if len(x) > NUMBERS else ""
    return cells(
        title + more,
        shown[None].numpy(),
        columns=[str(i) for i in range(len(shown))],
        texts=[[f"{v:.2f}" for v in shown.tolist()]],
        scale=ColorScale(float(x.abs().max()) or 1.0, signed=True),
        reading="number {column}: {value}",
    )


def head_vectors(title: str, x: Tensor) -> Panel:
    """The first elements of each head's vector, x (H, E)."""
    shown = x[:HEADS, :NUMBERS]
    more = f" (first {NUMBERS} of {x.size(1)} numbers)" if x.size(1) > NUMBERS else ""
    return cells(
        title + more,
        shown.numpy(),
        [f"head {h}" for h in range(len(shown))],
        [str(i) for i in range(shown.size(1))],
        scale=ColorScale(float(x.abs().max()) or 1.0, signed=True, unit=title),
        reading="{row}, number {column}: {value}",
        room=240,
    )
