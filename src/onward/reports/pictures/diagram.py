"""Draws a diagram of a decoder: its modules from tokens to logits, with the shapes of weights and activations.

Shapes: B batch, T tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from torch import nn

from onward.config.decoder import (
    DecoderConfig,
    Experts,
    Gated,
    Parallel,
    Plain,
    PostNorm,
    SelfAttention,
    SharedNorm,
    at,
)
from onward.planning.descriptions import formula
from onward.planning.parameters import kinds, modules, parameters, size
from onward.reports.pictures.markup import visible
from onward.reports.pictures.picture import Panel, Picture
from onward.reports.pictures.plot import short

EXAMPLE = DecoderConfig(
    vocab_size=32_000, d_model=512, n_layers=8, n_heads=8, n_kv_heads=2, d_ff=1_408, context_length=2_048
)
KINDS = 3  # largest number of different blocks in a diagram
SPINE, BRANCH, BOX, ROW = 40.0, 84.0, 26.0, 38.0  # pixels: x of the two lines, height of a box and of a row
Place = Literal["stream", "enter", "branch", "add", "title"]  # enter: the first row of a branch; add: its end


@dataclass(frozen=True)
class DiagramRow:
    """Boxes side by side, each a module or an operation, on the residual stream or on a branch of it."""

    place: Place
    boxes: Sequence[tuple[str, str]]  # name, and weights or computation, of each box
    shape: str = ""


def block(config: DecoderConfig = EXAMPLE) -> Picture:
    """Draw a diagram of a decoder, from token ids to logits; by default of an example with 8 blocks."""
    rows = [*rows_of(config)]
    feed_forward = any("mlp" in dict(module.named_children()) for module, _ in modules(config))
    added = "its attention, which reads other tokens"
    added += ", and that of its feed-forward, which does not" * feed_forward
    body, width, height = drawn(rows)
    data = {"rows": [{"place": row.place, "boxes": [*map(list, row.boxes)], "shape": row.shape} for row in rows]}
    return Picture(
        f"A decoder of {short(parameters(config))} parameters",
        f"From token ids to logits. The line on the left is the residual stream: {config.d_model:,} numbers for each "
        f"of the T tokens of the B rows. Each block reads it, and adds to it the output of {added}. The logits "
        "at a token are scores of the token that comes next. Matrices are written as inputs → outputs, other weights "
        "by their number; the shape of each result is on the right.",
        [Panel("", width, height, body, lines(rows), data)],
    )


def rows_of(config: DecoderConfig) -> Iterator[DiagramRow]:
    *blocks, (rest, _) = modules(config)
    vectors, position = f"(B, T, {config.d_model:,})", at(config.position, 0)
    yield DiagramRow("stream", [("tokens", "ids")], "(B, T)")
    yield DiagramRow(
        "stream", [("embed", f"{config.vocab_size:,} → {config.d_embed:,}")], f"(B, T, {config.d_embed:,})"
    )
    if config.d_embed != config.d_model:
        yield DiagramRow("stream", [("embed_in", weights(rest.embed_in))], vectors)
    if config.embed_scale != 1.0:
        yield DiagramRow("stream", [("scale", f"× {config.embed_scale:.4g}")], vectors)
    if config.embed_norm:
        yield DiagramRow("stream", [("embed_norm", weights(rest.embed_norm))], vectors)
    if position.added:
        yield DiagramRow("stream", [("+ position", position.describe(config))], vectors)
    for layers, (module, count) in [*zip(kinds(config), blocks)][:KINDS]:
        part = at(config.block, layers[0])
        times = f"{count} blocks" if count > 1 else "1 block"
        which = f", {in_short(layers)}" if len(blocks) > 1 else ""
        factor = getattr(part, "residual_scale", 1.0)
        scaled = f", attn and mlp times {factor:g}" if factor != 1.0 else ""
        yield DiagramRow("title", [(f"{times} of {size(module):,} parameters{which}", formula(part) + scaled)])
        yield from block_rows(config, layers[0], module, vectors)
    if len(blocks) > KINDS:
        yield DiagramRow("title", [(f"and {len(blocks) - KINDS} more kinds of block", "")])
    yield DiagramRow("title", [("", "")])
    yield DiagramRow("stream", [("norm", weights(rest.norm))], vectors)
    if config.d_embed != config.d_model:
        yield DiagramRow("stream", [("embed_out", weights(rest.embed_out))], f"(B, T, {config.d_embed:,})")
    tied, logits = ", the weights of embed" if config.tied else "", f"logits (B, T, {config.vocab_size:,})"
    yield DiagramRow("stream", [("head", weights(rest.head) + tied)], logits)
    if config.logit_scale != 1.0:
        yield DiagramRow("stream", [("scale", f"× {config.logit_scale:.4g}")], logits)
    if config.logit_softcap:
        yield DiagramRow("stream", [("softcap", capped("z", config.logit_softcap))], logits)


def in_short(layers: Sequence[int]) -> str:
    """Layer numbers in words: layer 3; layers 0 to 5; layers 0, 2, ..., 24; layers 0, 1, 5, ..., 7."""
    first, last, step = layers[0], layers[-1], layers[1] - layers[0] if len(layers) > 1 else 1
    if [*layers] != [*range(first, last + 1, step)]:
        shown = layers if len(layers) < 5 else [*layers[:3], "...", last]
        return f"layers {', '.join(map(str, shown))}"
    if step == 1:
        return f"layers {first} to {last}" if last > first else f"layer {first}"
    return f"layers {first}, {first + step}, ..., {last}" if len(layers) > 2 else f"layers {first} and {last}"


def capped(score: str, cap: float) -> str:
    return f"{cap:g} tanh({score} / {cap:g})"


def block_rows(config: DecoderConfig, layer: int, module: nn.Module, vectors: str) -> Iterator[DiagramRow]:
    """`module` is the block at index `layer`, `vectors` the shape of the residual stream as text."""
    part, children = at(config.block, layer), dict(module.named_children())
    branches = dict[str, list[DiagramRow]]()
    if "attn" in children:
        branches["attn"] = [*attention_rows(config, layer, children["attn"])]
    if "mlp" in children:
        branches["mlp"] = [*feed_forward_rows(config, layer, children["mlp"])]
    parallel = isinstance(part, Parallel | SharedNorm)
    for name, steps in branches.items():
        norm, post = (children.get(f"{name}_{which}") for which in ("norm", "post_norm"))
        before = norm is not None and not isinstance(part, PostNorm)
        if before and norm is not None:
            steps.insert(0, DiagramRow("branch", [(f"{name}_norm", weights(norm))], vectors))
        if post is not None:
            steps.append(DiagramRow("branch", [(f"{name}_post_norm", weights(post))], vectors))
        if parallel and name == "mlp":
            source = "the output of attn_norm" if isinstance(part, SharedNorm) else "the x that attention reads"
            steps.insert(0, DiagramRow("branch", [("reads", source)], vectors))
        first, *others = steps
        yield DiagramRow("enter", first.boxes, first.shape)
        yield from others
        yield DiagramRow("add", [("+", "")], vectors)
        if norm is not None and not before:
            yield DiagramRow("stream", [(f"{name}_norm", weights(norm))], vectors)


def attention_rows(config: DecoderConfig, layer: int, attn: nn.Module) -> Iterator[DiagramRow]:
    part, position = at(config.attention, layer), at(config.position, layer)
    n_heads, n_kv_heads, d_head, d_value = part.heads(config)
    heads, keys = (f"(B, T, {count}, {d_head})" for count in (n_heads, n_kv_heads))
    both = f"k and v {keys}" if d_value == d_head else f"k {keys}, v (B, T, {n_kv_heads}, {d_value})"
    linear = {name: child for name, child in attn.named_children() if isinstance(child, nn.Linear)}
    out = linear.pop("out", None)
    boxes = [(name, weights(child)) for name, child in linear.items()]
    plain = isinstance(part, SelfAttention)
    yield DiagramRow("branch", boxes, f"q {heads}, {both}" if plain else "")
    normed = [(name, weights(child)) for name, child in attn.named_children() if name.endswith("norm")]
    both = f"q {heads}, k {keys}" if plain else ""
    if any(detail for _, detail in normed):
        yield DiagramRow("branch", [(name, detail) for name, detail in normed if detail], both)
    if position.kind != "none" and not position.added:
        rotates = position.kind != "alibi"
        what = "rotate q and k" if rotates else "bias of the scores"
        yield DiagramRow("branch", [(what, position.describe(config))], both * rotates)
    cap, score = getattr(part, "attn_softcap", None), "q · k × scale"
    more = f", window of {part.window:,}" * bool(part.window) + ", a sink in each head" * getattr(part, "sinks", False)
    attend = f"softmax({capped(score, cap) if cap else score}) v{more}"
    yield DiagramRow("branch", [("attend", attend)], f"weights (B, {n_heads}, T, T)")
    if out is not None:
        yield DiagramRow("branch", [("out", weights(out))], f"(B, T, {config.d_model:,})")


def feed_forward_rows(config: DecoderConfig, layer: int, mlp: nn.Module) -> Iterator[DiagramRow]:
    part, vectors = at(config.mlp, layer), f"(B, T, {config.d_model:,})"
    if isinstance(part, Experts):
        width = part.width(config)
        yield DiagramRow(
            "branch", [("router", f"{config.d_model:,} → {part.count}, keeps {part.top_k}")], f"(B, T, {part.count})"
        )
        experts = f"{part.count} of {config.d_model:,} → {width:,} → {config.d_model:,}"
        shared = [("shared", f"{config.d_model:,} → {part.d_shared:,} → {config.d_model:,}")] * bool(part.d_shared)
        yield DiagramRow("branch", [("experts", experts), *shared], vectors)
    elif isinstance(part, Plain | Gated):
        inner, units = [name for name in ("gate", "up") if hasattr(mlp, name)], f"(B, T, {part.width(config):,})"
        yield DiagramRow("branch", [(name, weights(getattr(mlp, name))) for name in inner], units)
        act = f"{part.act}(gate) × up" if "gate" in inner else f"{part.act}(up)"
        yield DiagramRow("branch", [(act, "")], units)
        yield DiagramRow("branch", [("down", weights(mlp.down))], vectors)
    else:
        yield DiagramRow("branch", [("mlp", part.describe(config))], vectors)


def weights(module: object) -> str:
    """`inputs → outputs` of a linear layer, else the number of parameters; "" without any."""
    if not isinstance(module, nn.Module) or not any(True for _ in module.parameters()):
        return ""
    if isinstance(module, nn.Linear):
        return f"{module.in_features:,} → {module.out_features:,}{' + bias' if module.bias is not None else ''}"
    return f"{size(module):,}"


def box_width(name: str, detail: str) -> float:
    """Width of a box in pixels, enough for any of the usual fonts."""
    return 7.6 * cell_len(name) + 7.2 * cell_len(detail) + 26


def drawn(rows: Sequence[DiagramRow]) -> tuple[str, float, float]:
    """SVG elements, their total width and height in pixels."""
    parts, y, entered, frame = [], 6.0, 0.0, 0.0
    right = 24 + max(
        BRANCH + sum(box_width(*box) + 10 for box in row.boxes) + 6.7 * cell_len(row.shape) + 20
        for row in rows
        if row.place != "add"
    )
    for row in rows:
        middle = y + BOX / 2
        if row.place == "title":
            if frame:
                parts.append(
                    f'<rect class="edge" x="8" y="{frame:g}" width="{right - 16:g}" height="{y - frame:g}" rx="10"/>'
                )
            (name, formula), frame = row.boxes[0], 0.0
            y += 10
            if name:
                frame = y
                parts.append(
                    f'<text class="name" x="{BRANCH:g}" y="{y + 20:g}">{visible(name)}'
                    f'<tspan class="soft" dx="12" font-weight="400">{visible(formula)}</tspan></text>'
                )
                y += 32
            continue
        if row.place == "add":
            parts.append(
                f'<path class="arrow" d="M{BRANCH + 20:g} {y - ROW + BOX:g}V{middle:g}H{SPINE + 11:g}m7 -4l-7 4l7 4"/>'
                f'<circle class="paper" cx="{SPINE:g}" cy="{middle:g}" r="10"/>'
                f'<circle class="edge" cx="{SPINE:g}" cy="{middle:g}" r="10"/>'
                f'<text class="name" x="{SPINE:g}" y="{middle + 4.5:g}" text-anchor="middle">+</text>'
            )
        else:
            if row.place == "enter":
                parts.append(f'<path class="arrow" d="M{SPINE:g} {middle:g}H{BRANCH - 2:g}m-7 -4l7 4l-7 4"/>')
            elif row.place == "branch":
                parts.append(f'<path class="arrow" d="M{BRANCH + 20:g} {entered:g}V{y:g}"/>')
            entered = y + BOX
            x = SPINE - 22 if row.place == "stream" else BRANCH
            for name, detail in row.boxes:
                width, style = box_width(name, detail), "stem" if row.place == "stream" else "box"
                parts.append(
                    f'<rect class="{style}" x="{x:g}" y="{y:g}" width="{width:.0f}" height="{BOX:g}" rx="6"/>'
                    f'<text x="{x + 9:g}" y="{y + 17:g}"><tspan class="name">{visible(name)}</tspan>'
                    f'<tspan class="soft" dx="7">{visible(detail)}</tspan></text>'
                )
                x += width + 10
        shape = visible(row.shape)
        parts.append(f'<text class="label" x="{right - 24:g}" y="{middle + 4:g}" text-anchor="end">{shape}</text>')
        y += ROW
    spine = f'<path class="arrow" d="M{SPINE:g} 10V{y - ROW + 2:g}"/>'
    return spine + "".join(parts), right, y


def lines(rows: Sequence[DiagramRow]) -> list[str]:
    starts = {"stream": "│ ", "enter": "├─► ", "branch": "│   ", "add": "+ ◄─┘", "title": ""}
    texts: list[str] = []
    for row in rows:
        boxes = "   ".join(" ".join(filter(None, box)) for box in row.boxes if row.place != "add")
        start = "" if row.place == "stream" and not texts else starts[row.place]
        texts.append(f"{start}{boxes}")
    width = min(64, max(map(cell_len, texts)))
    return [f"{text:<{width}}  {row.shape}".rstrip() or "│" for text, row in zip(texts, rows)]
