"""Checks of attention, from its recorded operations: positions, the scale of scores, and the heads' keys and values.

A text of one repeated token has the same content at every position, so that any difference inside it comes from
positions.

Shapes: N texts, H heads, T tokens, E size of a head.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from types import CodeType

import torch
from torch import Tensor, nn

from onward.inspection.doctor.finding import Check, Outcome, Status, largest
from onward.inspection.doctor.operations import RecordedAttention, length_of_texts, loud, operations
from onward.inspection.doctor.subject import POSITION_NAMES, TOLERANCE, Subject
from onward.model.extended import LateNormSelfAttentionModule

TEXTS = 6
GAIN = {"repeated": 1.5, "random": 0.5}  # keep scores small: softmax and soft caps are then nearly linear
FIT = 0.05  # relative tolerance of a fitted factor
ALIKE = 1e-4  # relative to the largest number: vectors that differ by less count as equal
FASTEST = 1.05  # largest usual rotation of a pair of dimensions, in radians per token
SEEN = 1e-20  # keys with a smaller weight count as masked
POSITIONS = r"(?<![a-z])pos(?!t)|position|wpe|rope|rotary|inv_freq|freqs_cis|alibi|slopes"
NO_ATTENTION = "no attention (a product of weights (T, T) and values) was recognized in this model"

Layer = Sequence[RecordedAttention]  # the recordings of one attention, one per text


def layers(s: Subject, kind: str) -> list[Layer]:
    """Recordings of each attention on N texts, with weights scaled by `loud`; cached for other checks; empty if no text
    length is usable or a recorded value is not finite. With `kind` "repeated", each text repeats one token; with
    "random", tokens are random."""
    if kind not in s.memo:
        T, generator = length_of_texts(s), torch.Generator().manual_seed(3)
        ids = torch.randperm(s.vocab_size, generator=generator)[: TEXTS if T else 0, None].expand(-1, T)
        if kind == "random":
            ids = torch.randint(s.vocab_size, ids.shape, generator=generator)
        with loud(s, GAIN[kind]):
            texts = [operations(s, row[None].to(s.device)).attentions for row in ids.contiguous()]
        finite = all(bool(x.isfinite().all()) for text in texts for a in text for x in (a.queries, a.keys, a.values))
        s.memo[kind] = [*zip(*texts)] if finite else []
    return s.memo[kind]


def stacked(layer: Layer, name: str) -> Tensor:
    """The recorded tensor `name` of one attention on N texts, stacked to (N, H, T, ...)."""
    return torch.stack([getattr(a, name) for a in layer])


def variation(x: Tensor, dim: int) -> float:
    """Largest difference from the first element along `dim`, relative to the largest value."""
    return largest(x - x.narrow(dim, 0, 1)) / max(1e-12, largest(x))


def rows_of(outputs: Sequence[Tensor], T: int) -> Tensor | None:
    """Concatenate outputs of projections for each of T tokens, (T, ...); None without outputs, or if an output has no
    dimension of size T."""
    turned = [x.movedim(x.shape.index(T), 0).flatten(1).double() for x in outputs if T in x.shape]
    return torch.cat(turned, 1) if outputs and len(turned) == len(outputs) else None


def positions(s: Subject) -> Outcome:
    """Check that scores depend on positions, and that queries and keys use positions in the same way."""
    swapped = s.tokens.clone()
    swapped[:, :-1] = swapped[:, :-1].flip(1)
    measured = f"permuting earlier tokens changes the last logits by {largest((s(swapped) - s.logits)[:, -1]):.1e}"
    measured += shifted(s)
    traced_layers = layers(s, "repeated")
    blind = bool(traced_layers)
    for layer in traced_layers:
        where, T = f"first in {layer[0].module}", layer[0].weights.size(-1)
        rows = [rows_of(a.sources["queries"] + a.sources["keys"], T) for a in layer]
        if any(row is None for row in rows):
            return "noted", f"{measured}; the projections of {layer[0].module or 'the attention'} were not recognized"
        given = torch.stack([row for row in rows if row is not None])
        if variation(given, 1) > max(ALIKE, TOLERANCE.get(s.dtype, 0.0)):
            if layer is traced_layers[0] and (same := repeated_rows(given)):
                return "failed", f"{measured}; positions {same} add the same vector to a token", where
            return "noted", f"{measured}: positions are absolute" if layer is traced_layers[0] else measured
        attention = dict(s.model.named_modules()).get(layer[0].module.rpartition(".")[0])
        if isinstance(attention, LateNormSelfAttentionModule):  # scores of this part depend on more than distances
            return "noted", f"{measured}: queries and keys are normalized after their rotation"
        wrong, sees = position_mistake(s, layer)
        if wrong:
            return "failed", f"{measured}; {wrong}", where
        blind = blind and not sees
    if not traced_layers:
        return "noted", f"{measured}; {NO_ATTENTION}"
    if blind and (name := name_about_positions(s.model)):
        return (
            "failed",
            f"{measured}; positions change no attention score, although the model has {name}",
            "the attention scores",
        )
    return "noted", f"{measured}: " + ("the model uses no positions" if blind else "positions are relative")


def shifted(s: Subject) -> str:
    """Phrase about how the logits change if all given positions are shifted; "" if the model takes no positions."""
    half, name = s.tokens.size(1) // 2, s.parameter(*POSITION_NAMES)
    if not name or not half:
        return ""
    indices, by = torch.arange(half, device=s.device).expand(len(s.tokens), half), s.tokens.size(1) - half
    plain, moved = (s(s.tokens[:, :half], **{name: indices + add}) for add in (0, by))
    return f", and shifting all positions by {by} changes logits by {largest(plain - moved):.1e}"


def position_mistake(s: Subject, layer: Layer) -> tuple[str, bool]:
    """Return the mistake in how an attention layer uses positions ("": none), and whether positions change a score.
    On texts that each repeat one token, only positions can make queries or keys differ."""
    q, k, v, w = (stacked(layer, name) for name in ("queries", "keys", "values", "weights"))
    allowed = max(1e-3, 2 * TOLERANCE.get(s.dtype, 0.0))
    if variation(v, 2) > allowed:
        return (
            f"values of equal tokens differ between positions by {variation(v, 2):.1%}: the values are rotated as well",
            True,
        )
    moves = [name for name, x in (("queries", q), ("keys", k)) if variation(x, 2) > allowed]
    if not moves:
        return bias_mistake(w)
    if all(variation(x - x[:1], 2) <= allowed * 2 for x in (q, k)):
        return "", True  # a vector of the position is added to queries and keys
    if all(variation(x / x.norm(dim=-1, keepdim=True), 2) <= allowed for x in (q, k)):
        return "", True  # only the lengths of vectors change, as with a factor of queries
    if len(moves) == 1:
        return f"only {moves[0]} change with the position; both queries and keys must", True
    scores = q @ k.mT
    spread, size = along_diagonals(scores), q.norm(dim=-1)
    if spread > allowed and variation((size / size[..., :1]).flatten(0, 1), 0) <= allowed:
        spread = along_diagonals(scores / (size / size[..., :1])[..., None])  # scores may grow with position
    if spread > allowed:
        what = f"scores of the same tokens at the same distance differ by {spread:.1%} between positions"
        return f"{what}: queries and keys are not rotated by the same angles", True
    if same := repeated_rows(q.transpose(1, 2).flatten(2)):
        return f"queries at positions {same} are rotated by the same angles", True
    return rotation_mistake(q), True


def along_diagonals(scores: Tensor) -> float:
    """Largest deviation of scores (N, H, T, T) from the mean score at the same distance, relative to the largest
    score."""
    T = scores.size(-1)
    diagonals = [scores.diagonal(d, -2, -1) for d in range(1 - T, T)]
    return max(largest(x - x.mean(-1, keepdim=True)) for x in diagonals) / largest(scores)


def bias_mistake(weights: Tensor) -> tuple[str, bool]:
    """The mistake in a distance bias such as ALiBi, and whether there is such a bias, from the weights (N, H, T, T) of
    texts whose queries and keys are equal at all positions."""
    last = weights[0, :, -1]  # (H, T)
    seen = (last > SEEN).all(0)
    logs = last[:, seen].log().flip(-1)  # by distance
    if logs.size(-1) < 3 or largest(logs - logs[:, :1]) < 1e-3:
        return "", False
    steps = logs.diff(dim=-1)
    if largest(steps - steps.mean(-1, keepdim=True)) > 1e-2 * largest(steps):
        return "", True  # not linear in the distance, such as learned biases
    slopes = steps.mean(-1)
    if bool((slopes > 1e-3 * largest(slopes)).any()):
        return "scores grow with distance: the bias has the wrong sign", True
    if len(slopes) > 1 and largest(slopes - slopes[0]) < 1e-3 * largest(slopes):
        return "all heads have the same distance bias", True
    return "", True


def repeated_rows(x: Tensor) -> str:
    """Two positions at which x (N, T, ...) has equal vectors, as text; "" if there are none. Equal vectors at the last
    positions do not count: a convolution with zeros before the text makes them equal."""
    flat = x.transpose(0, 1).flatten(1)
    equal = torch.cdist(flat, flat, p=math.inf) <= ALIKE * largest(flat)
    T = len(flat)
    tail = next(i for i in range(T) if bool(equal[i:, i:].all()))
    pairs = [(i, j) for i in range(T) for j in range(i + 1, T) if equal[i, j] and not (i >= tail and 0 < tail < T - 1)]
    return f"{pairs[0][0]} and {pairs[0][1]}" if pairs else ""


def rotation_mistake(queries: Tensor) -> str:
    """The mistake in the angles by which queries (N, H, T, E) of a repeated token rotate from position to position; ""
    if there is none, or if no single rotation explains them."""
    before, after = (x.flatten(0, -2) for x in (queries[:, :, :-1], queries[:, :, 1:]))
    if len(before) < 2 * queries.size(-1):
        return ""
    solved = torch.linalg.lstsq(before, after)
    if largest(before @ solved.solution - after) > 1e-3 * largest(after):
        return ""
    values = torch.linalg.eigvals(solved.solution)
    angles = values.angle().abs()
    angles = angles[angles > 1e-4].sort().values[::2]
    if len(angles) > 1 and largest(angles - angles[0]) < 1e-4:
        return f"all {len(angles)} pairs of dimensions rotate by the same {float(angles[0]):.3g} radians per token"
    if len(angles) and float(angles.max()) > FASTEST:
        fastest = f"a pair of dimensions rotates by {float(angles.max()):.3g} radians per token, and at most 1 is usual"
        return f"{fastest}: a frequency is inverted"
    return ""


def name_about_positions(model: nn.Module) -> str:
    """The first name of a parameter, buffer or module, or in a forward method, that suggests positions, such as
    "rope"."""
    named = [name for name, _ in [*model.named_parameters(), *model.named_buffers(), *model.named_modules()]]
    named += [type(module).__name__ for module in model.modules()]
    used = chain.from_iterable(names_in(getattr(type(m).forward, "__code__", None)) for m in model.modules())
    return next((n for n in [*named, *used] if re.search(POSITIONS, n, re.I) and n != "position_ids"), "")


def names_in(code: CodeType | None) -> Iterator[str]:
    if code:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                yield from names_in(constant)


def heads(s: Subject) -> Outcome:
    """Check that scores have the usual scale, that query heads use the keys and values of their group, and that heads
    differ."""
    traced_layers = layers(s, "random")
    if not traced_layers:
        return "not applicable", NO_ATTENTION
    measured = []
    for layer in traced_layers:
        status, what = of_layer(s, layer)
        if status == "failed":
            return "failed", what, layer[0].module
        measured.append((status, what))
    for layer, following in pairwise(traced_layers):  # each head may be a module of its own
        if all(torch.equal(stacked(layer, name), stacked(following, name)) for name in ("queries", "keys", "values")):
            return "failed", "two heads have the same queries, keys and values: they act as one head", layer[0].module
    return next(((status, what) for status, what in measured if status == "noted"), measured[0])


def of_layer(s: Subject, layer: Layer) -> tuple[Status, str]:
    q, k, v, w = (stacked(layer, name) for name in ("queries", "keys", "values", "weights"))
    H, E = q.size(1), q.size(-1)
    if layer[0].softmax_of_softmax:
        return "failed", "attention weights are the softmax of a softmax, so all stay near their mean"
    if not bool(w.diagonal(0, -2, -1).any()):
        return "failed", "no token attends to itself: every query has weight 0 for its own key"
    groups = {name: first_equal_heads(x) for name, x in (("queries", q), ("keys", k), ("values", v))}
    count = max(groups["keys"]) + 1
    if H > 1 and not any(max(group) for group in groups.values()):
        return "failed", f"all {H} heads have the same queries, keys and values: they act as one head"
    usual = [h * count // H for h in range(H)]
    for name in "keys", "values":
        if groups[name] != usual and (s.fresh or groups["keys"] != groups["values"]):
            return "failed", f"query heads use the {name} of key/value heads {groups[name]}; expected {usual}"
    factor = factor_of(layer, q, k, w)
    if isinstance(factor, str):
        return "noted", f"query heads use the keys and values of their groups, {usual}; {factor}"
    right = E**-0.5
    what = f"attention scores are scaled by {factor:.4g} (1/√{E} is {right:.4g})"
    known = [right, *(number**power for number in s.declares("scal|multipl") if number for power in (1, -0.5, -1))]
    if any(abs(factor / number - 1) < FIT for number in known):
        return "ok", f"{what}, and query heads use the keys and values of their groups, {usual}"
    wrong = {
        "the scale is missing": 1.0,
        "the scale uses d_model instead of the head size": layer[0].width ** -0.5,
        "the scale lacks the square root": 1 / E,
        "scores are multiplied by the square root instead of divided": E**0.5,
        "the scale uses the number of heads instead of the head size": H**-0.5,
        "the scale uses the text length instead of the head size": q.size(2) ** -0.5,
    }
    named = next((name for name, number in wrong.items() if abs(factor / number - 1) < FIT), "")
    return ("failed", f"{what}: {named}") if named and s.fresh else ("noted", what)


def first_equal_heads(x: Tensor) -> list[int]:
    """Numbers of the heads of x (N, H, T, E), in order of appearance: heads with equal vectors have the same number."""
    firsts: list[Tensor] = []
    numbers = []
    for head in x.unbind(1):
        same = next((i for i, first in enumerate(firsts) if torch.equal(first, head)), len(firsts))
        firsts += [head] if same == len(firsts) else []
        numbers.append(same)
    return numbers


def factor_of(layer: Layer, q: Tensor, k: Tensor, w: Tensor) -> float | str:
    """Factor, such as 1 / sqrt(E), from products of queries and keys (N, H, T, E) to scores, or the reason why it is
    unknown. log w is the score minus a constant per row. Subtracting the means over texts and over keys from both sides
    removes this constant and all terms that depend on positions alone."""
    if not all(a.sources["queries"] and a.sources["keys"] for a in layer):
        return "the scale is not checked: the query and key projections were not recognized"
    if any(float(x.std() / x.mean()) < 1e-3 for x in (q.norm(dim=-1), k.norm(dim=-1)) if x.numel() > 1):
        return "the scale is not checked: queries and keys are normalized"
    products, xy, xx, yy = q @ k.mT, 0.0, 0.0, 0.0
    for i in range(2, q.size(2)):
        seen = (w[:, :, i] > SEEN).all(0).all(0)
        x, y = products[:, :, i][..., seen], w[:, :, i][..., seen].log()
        x, y = (z - z.mean(-1, keepdim=True) for z in (x, y))
        x, y = (z - z.mean(0, keepdim=True) for z in (x, y))
        xy, xx, yy = xy + float((x * y).sum()), xx + float((x * x).sum()), yy + float((y * y).sum())
    if not xx or not yy or 1 - xy * xy / (xx * yy) > FIT**2 * 4:
        return "the scale is not checked: scores are not proportional to products of queries and keys"
    factor = xy / xx
    for name, x in ("queries", q), ("keys", k):
        projected = torch.cat([output.double().flatten() for a in layer for output in a.sources[name]])
        factor *= float(x.square().mean().sqrt() / projected.square().mean().sqrt())
    return factor


ATTENDING = {
    "positions": Check(
        "",
        "permutes earlier tokens; compares scores within texts of one repeated token, where only positions can differ",
        "the model cannot see the order of tokens, or reads the same words differently at another position",
        "give token i position i; rotate queries and keys by the same angles, and do not rotate values",
        positions,
        cheap=True,
    ),
    "heads": Check(
        "softmax attention; to judge the scale, a fresh model",
        "compares log attention weights with products of queries and keys; looks for heads with equal keys or values",
        "attention is too sharp or too flat to train, or a head pairs one group's keys with another's values",
        "divide scores by the square root of the head size; repeat key/value heads by repeat_interleave(n, dim=1)",
        heads,
        cheap=True,
    ),
}
