"""Pictures of concepts: masks, windows, positions, samplers and the KV cache. Their numbers are computed by the code of
the model.

Shapes: T tokens, S slots of the cache, H heads.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from onward.config.decoder import DecoderConfig, Rotary, SelfAttention, Sinusoidal
from onward.kernels.operations import rotate
from onward.model.alibi import alibi_slopes, linear_bias
from onward.model.cache import KVCache
from onward.model.context import rotary
from onward.model.mask import AttentionMask
from onward.model.positions import LearnedPositionModule, SinusoidalPositionModule
from onward.model.segments import Segments
from onward.reports.pictures.diagram import block
from onward.reports.pictures.panels import cells, curves
from onward.reports.pictures.picture import Panel, Picture
from onward.reports.pictures.scale import ColorScale
from onward.reports.pictures.strategies import compare

WORDS = ("The", "cat", "sat", "on", "the", "mat")
SEEN = ColorScale(1, keys=((1, "seen"), (0, "not seen")))
REACHED = ColorScale(1, keys=((1, "reached"), (0, "not reached")))
IN_SLOT = ColorScale(
    1, keys=((1, "written by the call, and seen"), (0.4, "seen by its last token"), (0, "hidden by the mask, or empty"))
)
NEXT = {"mat": 0.35, "floor": 0.25, "bed": 0.15, "roof": 0.10, "chair": 0.05, "table": 0.04, "ground": 0.03}
NEXT["other"] = 0.03
DIAL = 132.0  # width of a dial in pixels


def mask() -> Picture:
    """Draw which tokens each token may attend to under the causal mask, the bidirectional mask and the mask of
    documents packed into one row."""
    order = torch.arange(len(WORDS))[None]
    packed = torch.tensor([[0, 1, 2, 0, 1, 2]])
    everywhere = torch.full_like(order, len(WORDS) - 1)  # queries after all keys see every key
    masks = {
        "causal (a decoder)": AttentionMask(order, order),
        "bidirectional (an encoder)": AttentionMask(everywhere, order),
        "two packed documents": AttentionMask(packed, packed, segments=Segments.of(packed)),
    }
    reading = "{row} (query) on {column} (key): {value}"
    panels = [
        cells(title, mask.visible()[0].numpy(), WORDS, WORDS, scale=SEEN, reading=reading, room=170)
        for title, mask in masks.items()
    ]
    return Picture(
        "Attention masks",
        "Each row is a token that looks (the query), each column a token that it may look at (the key). A decoder "
        "learns to predict the next token, so no token may see a later one: the mask is a triangle. An encoder reads "
        "a finished text and may look both ways; as a language model it would see the answer. Where several documents "
        "share one row of a batch, a document begins where a position is not the previous one plus one, and no token "
        "sees an earlier document.",
        panels,
    )


def window() -> Picture:
    """Draw sliding-window attention: the tokens that each token attends to, and how far back a token reaches through
    stacked layers with this window."""
    count, width = 12, 4
    order = torch.arange(count)[None]
    seen = AttentionMask(order, order, width).visible()[0].float()
    names = [str(i) for i in range(count)]
    steps = {"no window": AttentionMask(order, order).visible()[0], f"window of {width}, one layer": seen}
    reach = seen
    for layers in ("two layers", "three layers"):
        reach = ((reach @ seen) > 0).float()
        steps[f"reach of {layers}"] = reach
    reading = "position {row} reaches position {column}: {value}"
    panels = [
        cells(title, mask.float().numpy(), names, names, scale=REACHED, reading=reading, room=180)
        for title, mask in steps.items()
    ]
    return Picture(
        "Sliding-window attention",
        f"With a window of {width}, a token sees itself and the {width - 1} tokens before it, so that a layer needs "
        f"memory and time for {width} keys only. Layers add up: a token of the second layer reads vectors that "
        f"have read {width - 1} tokens further back, so that L layers reach L x {width - 1} tokens back. Models such "
        "as Gemma 2 and GPT-OSS alternate layers with and without a window.",
        panels,
    )


def rope() -> Picture:
    """Draw rotary positions: the rotations, their speeds, and scores that depend only on the distance."""
    part, width, count = Rotary(), 16, 64
    positions = torch.arange(count, dtype=torch.float64)[None]
    cos, sin = rotary(part, width, positions, torch.full((1, 1, 1), count, dtype=torch.float64))
    ones = torch.cat([torch.ones(width // 2), torch.zeros(width // 2)]).double().expand(1, count, 1, width)
    turned = rotate(ones, cos, sin)[0, :, 0]  # (T, E): pair i is at i and at i + E / 2
    pairs = turned.unflatten(-1, (2, -1)).transpose(-1, -2).numpy()  # (T, pairs, 2)
    dials = [dial(f"pair {pair}", pairs[:9, pair]) for pair in (0, 1, 2)]
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, width, generator=generator, dtype=torch.float64)
    keys = rotate(k.expand(1, count, 1, width), cos, sin)[0, :, 0]
    queries = rotate(q.expand(1, count, 1, width), cos, sin)[0, :, 0]
    distances = range(25)
    scores = {f"query at {at}": [float(queries[at] @ keys[at - d]) for d in distances] for at in (60, 30)}
    return Picture(
        "Rotary positions (RoPE)",
        "The numbers of a query or key form pairs, and each pair is rotated by an angle proportional to its "
        "position: the first pair by 1 radian per token, the following ones ever more slowly, the last by 1 radian in "
        "thousands of tokens. Each dial shows one pair at positions 0 to 8. A score compares directions, so that the "
        "position itself cancels out: a query at 60 and the same query at 30 have the same scores with a key that is "
        "equally far back, so that one curve covers the other. Nothing is learned, and nothing is added to the "
        "vectors.",
        [
            *dials,
            cells(
                "cosine of the angle",
                cos[0, :32, 0].T.numpy(),
                [f"pair {i}" for i in range(width // 2)],
                [str(i) for i in range(32)],
                scale=ColorScale(1, signed=True, unit="cosine"),
                reading="{row} at position {column}: cosine {value}",
                room=420,
            ),
            curves("score of one query with one key", distances, scores, x_name="distance in tokens", size=(400, 230)),
        ],
    )


def dial(title: str, vectors: np.ndarray) -> Panel:
    """Unit vectors (N, 2) of positions 0 to N - 1 as hands of a dial."""
    center, radius = DIAL / 2, DIAL / 2 - 16
    parts = [f'<circle class="edge" cx="{center:g}" cy="{center:g}" r="{radius:g}"/>']
    for position, (x, y) in enumerate(vectors):
        tip = center + radius * x, center - radius * y
        strength = 1 - 0.75 * position / len(vectors)
        parts.append(
            f'<path class="stroke" opacity="{strength:.2f}" d="M{center:g} {center:g}L{tip[0]:.1f} {tip[1]:.1f}"/>'
        )
        if position in (0, 1, len(vectors) - 1):
            label = center + (radius + 9) * x, center - (radius + 9) * y + 4
            parts.append(
                f'<text class="label" x="{label[0]:.1f}" y="{label[1]:.1f}" text-anchor="middle">{position}</text>'
            )
    angles = [round(math.degrees(math.atan2(y, x)) % 360) for x, y in vectors]
    lines = [f"position {position}: {angle:3}°" for position, angle in enumerate(angles)]
    return Panel(title, DIAL, DIAL, "".join(parts), lines, {"degrees": angles})


def alibi_bias(heads: int, count: int) -> Tensor:
    """Biases (H, T, T) that ALiBi adds to the scores."""
    order, slopes = torch.arange(count)[None], alibi_slopes(heads)
    return AttentionMask(order, order, slopes=slopes, score_bias=linear_bias).score_bias(torch.float32)[0]


def alibi() -> Picture:
    """Draw ALiBi: the biases of three heads, and the resulting attention weight by distance."""
    heads, count = 8, 10
    bias = alibi_bias(heads, count)
    names, shown = [str(i) for i in range(count)], (0, 3, 7)
    values = bias.masked_fill(bias.isneginf(), math.nan).numpy()
    scale = ColorScale(float(np.nanmax(-values)), signed=True, unit="added to the score")
    panels = [
        cells(
            f"head {head} of 0 to {heads - 1}",
            values[head],
            names,
            names,
            scale=scale,
            reading="query {row}, key {column}: {value}",
            room=200,
        )
        for head in shown
    ]
    far = alibi_bias(heads, 65)[:, -1].flip(-1)  # by distance
    shares = {f"head {head}": far[head].softmax(-1).tolist() for head in shown}
    falls = curves(
        "weight of a key where all scores are equal", range(65), shares, x_name="distance in tokens", log=True
    )
    return Picture(
        "Attention with linear biases (ALiBi)",
        "A constant times the distance is subtracted from every score before the softmax: the further back a key, the "
        "lower its weight. Each head has its own constant, from 1/2 for the first of eight heads, which sees only its "
        "neighborhood, to 1/256 for the last, which sees far. Nothing is learned, and every distance has a bias, "
        "even one longer than any training text.",
        [*panels, falls],
    )


def positions() -> Picture:
    """Draw the numbers that five kinds of position encoding compute for each position, side by side: learned,
    sinusoidal, rotary, ALiBi and none."""
    count, width = 20, 32
    order = torch.arange(count)[None]
    sines = SinusoidalPositionModule(width, Sinusoidal())(order, torch.float32)[0]
    learned = LearnedPositionModule(count, width, offset=0)
    with torch.no_grad():
        for weight in learned.parameters():
            torch.nn.init.normal_(weight, std=0.02, generator=torch.Generator().manual_seed(0))
        rows = learned(order, torch.float32)[0]
    cos, _ = rotary(Rotary(), width, order.float(), torch.full((1, 1, 1), count))
    bias = alibi_bias(4, count)[1]
    mask = AttentionMask(order, order).visible()[0].float()
    names = [str(i) for i in range(count)]
    numbers = [str(i) for i in range(width)]
    at = "position {row}, number {column}: {value}"
    pair = "query at {row}, key at {column}: {value}"
    unit = ColorScale(1, signed=True, unit="sines and cosines")
    panels = [
        cells(
            "learned: added vectors",
            rows,
            names,
            numbers,
            reading=at,
            room=230,
            scale=ColorScale(0.06, signed=True, unit="numbers of learned vectors"),
        ),
        cells("sinusoidal: added vectors", sines, names, numbers, reading=at, room=230, scale=unit),
        cells(
            "rotary: cosines of the angles",
            cos[0, :, 0],
            names,
            numbers[: width // 2],
            reading="position {row}, pair {column}: cosine {value}",
            room=115,
            scale=unit,
        ),
        cells(
            "ALiBi: bias of head 1 of 0 to 3",
            bias.masked_fill(bias.isneginf(), math.nan),
            names,
            names,
            reading=pair,
            room=230,
            scale=ColorScale(float(-bias[-1, 0]), signed=True, unit="added to the score"),
        ),
        cells("none: only the causal mask", mask, names, names, reading=pair, room=230, scale=SEEN),
    ]
    return Picture(
        "How positions enter",
        "Attention alone does not depend on the order of its inputs. Learned positions (GPT-2) add one trained vector "
        "for each position, here as initialized, and have none beyond the context length; sinusoidal ones add fixed "
        "waves of many lengths. Rotary positions rotate queries and keys by an angle that grows with the position, "
        "ALiBi lowers scores with the distance; neither adds anything to the vectors. Without any, the causal mask "
        "alone conveys the order: the first token sees one token, the second two.",
        panels,
    )


def samplers(logits: Mapping[str, float] | None = None) -> Picture:
    """Draw a next-token distribution unchanged and after each sampling strategy, such as top-p. `logits` maps the text
    of each token to its logit; None: an example."""
    logits = logits or {word: math.log(p) for word, p in NEXT.items()}
    comparison = compare(torch.tensor([*logits.values()]), [*logits].__getitem__)
    _, second, third, *_ = comparison.tokens
    return Picture(
        "Sampling strategies",
        "Gray bars: one distribution of the next token. Colored bars: the same after each strategy, with its value. A "
        "temperature below 1 sharpens, one above 1 flattens, 0 chooses the likeliest. top_k keeps a number of tokens, "
        "top_p a share of the probability, min_p tokens with at least a fraction of the likeliest's, typical_p tokens "
        "about as surprising as the entropy; their probabilities are then scaled to sum to 1. Penalties act on "
        f"tokens that were generated before: {second}, {third} and again {second}, after which no_repeat_ngram_size 2 "
        f"forbids another {second} {third}.",
        comparison.panels(),
    )


def cache() -> Picture:
    """Draw which token's key and value each slot of a KV cache holds over consecutive calls, in a layer without a
    window and in one with a window of 3."""
    prompt, last, back, windows = 4, 7, 5, (0, 3)
    attention = tuple(SelfAttention(window=width) for width in windows)
    config = DecoderConfig(1, d_model=8, n_layers=2, n_heads=1, context_length=8, attention=attention)
    view = KVCache(config, rows=1, length=8, chunk=2).view()
    calls = [[0, 1], [2, 3], *([position] for position in range(prompt, last + 1)), [back], [back + 1]]
    names = [f"prompt {call[0]}, {call[-1]}" if len(call) > 1 else f"token {call[0]}" for call in calls]
    names[-2] = f"back to {back}"
    panels = []
    for width, layer in zip(windows, view.layers):
        strengths = np.zeros((len(calls), layer.slots))
        content, contents = ["–"] * layer.slots, []
        for row, call in enumerate(calls):
            indices = layer.slot_indices(torch.tensor([call]))
            for slot, position in zip(indices.write[1][0].tolist(), call):
                content[slot] = str(position)
            seen = AttentionMask(torch.tensor([call]), indices.key_positions, width).visible()[0, -1]
            strengths[row, seen.numpy()] = 0.4
            strengths[row, indices.write[1][0].numpy()] = 1
            contents.append([*content])
        title = f"window of {width}: {layer.slots} slots" if width else f"no window: {layer.slots} slots"
        slots = [f"slot {i}" for i in range(layer.slots)]
        reading = "{row}, {column} holds position {text}"
        panels.append(cells(title, strengths, names, slots, texts=contents, scale=IN_SLOT, reading=reading))
    return Picture(
        "The KV cache",
        "Keys and values of past tokens are kept, so that each call computes only its new tokens. Each row is a call "
        "(here a prompt in two chunks, then one token at a time), each column a slot: position p lies in slot p % "
        "slots. A cell shows the position in its slot after the call. A layer with a window overwrites positions that "
        "no later token can see. To go back, the model is called with an earlier position: later slots keep their "
        "entries, and the mask hides them.",
        panels,
    )


IDEAS: dict[str, Callable[[], Picture]] = {
    "mask": mask,
    "rope": rope,
    "alibi": alibi,
    "window": window,
    "positions": positions,
    "samplers": samplers,
    "cache": cache,
    "block": block,
}
