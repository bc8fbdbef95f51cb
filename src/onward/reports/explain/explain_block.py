"""Explains one block of a decoder step by step for one token.

Shapes: H heads, K key/value heads, E width of a query, F width of a value.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from onward.config.decoder import Rotary, at
from onward.planning.descriptions import formula
from onward.reports.explain.followed import NUMBERS, Followed, head_vectors, vector
from onward.reports.explain.story import StoryStep
from onward.reports.pictures.panels import bars
from onward.reports.pictures.picture import Panel
from onward.reports.pictures.scale import ColorScale
from onward.tracing.sites import attend_modules


def block(token: Followed, layer: int) -> Iterator[StoryStep]:
    """Show block `layer` in detail for the followed token: attention, then feed-forward."""
    c, name, count = token.config, f"blocks.{layer}", len(token.tokens)
    where = f"Block {layer} (of 0 to {c.n_layers - 1})"
    wide = f"(1, {count}, {c.d_model})"
    part = at(c.block, layer)
    equation = formula(part)
    if f"{name}.attn_norm" in token.t and part.kind != "post_norm":
        yield token.norm(at(c.norm, layer), f"{where}: norm", f"{name}.in", f"{name}.attn_norm", wide)
    yield from attention(token, layer, where) if token.has_weights(layer) else [no_weights(token, layer, where, wide)]
    out, before = token.at(f"{name}.attn.out"), token.at(f"{name}.in")
    n_heads = at(c.attention, layer).heads(c).n_heads
    mixed = (
        f"The outputs of the {n_heads} heads are put side by side, and one matrix mixes them into a vector as wide as "
        if token.has_weights(layer)
        else "The layer returns a vector as wide as "
    )
    yield StoryStep(
        f"{where}: back to the width of the stream",
        wide,
        "out(heads)",
        f"{mixed}the residual stream: the output of attention for {token.piece}. Its length is "
        f"{out.norm():.2f}; the stream's is {before.norm():.2f}. The block adds it to the stream: {equation}.",
        [vector("output of attention", out)]
        + ([vector("stream after the addition", token.at(f"{name}.mid"))] if f"{name}.mid" in token.t else []),
    )
    if f"{name}.mlp.out" in token.t:
        if f"{name}.mlp_norm" in token.t and part.kind != "post_norm":
            yield token.norm(at(c.norm, layer), f"{where}: norm", f"{name}.mid", f"{name}.mlp_norm", wide)
        yield from feed_forward(token, layer, where, wide)
    after = token.at(f"{name}.out")
    yield StoryStep(
        f"{where}: the change made by the block",
        wide,
        equation,
        f"The vector enters with length {before.norm():.2f} and leaves with length {after.norm():.2f}; the cosine of "
        f"the two is {torch.cosine_similarity(before, after, 0):.2f}. {token.guess(layer)}",
        [vector("into the block", before), vector("out of the block", after)],
    )


def block_in_short(token: Followed, layer: int) -> StoryStep:
    c, name = token.config, f"blocks.{layer}"
    before, attended = token.at(f"{name}.in"), token.at(f"{name}.attn.out")
    seen, panels = "", list[Panel]()
    if token.has_weights(layer):
        weights = token.weights(layer)
        head, key = divmod(int(weights.argmax()), weights.size(1))
        seen = f" Head {head} gives “{token.pieces[key]}” the weight {weights[head, key]:.2f}."
        panels.append(token.weights_panel(layer))
    added = ""
    if f"{name}.mlp.out" in token.t:
        added = f", its feed-forward a vector of length {token.at(f'{name}.mlp.out').norm():.2f}"
    return StoryStep(
        f"Block {layer} (of 0 to {c.n_layers - 1})",
        f"(1, {len(token.tokens)}, {c.d_model})",
        formula(at(c.block, layer)),
        f"Another block, in short. Its attention adds a vector of length {attended.norm():.2f} to "
        f"the stream of length {before.norm():.2f}{added}.{seen} {token.guess(layer)}",
        panels,
    )


def no_weights(token: Followed, layer: int, where: str, wide: str) -> StoryStep:
    """Describe the layer of a block whose tokens have no attention weights, such as a recurrent layer."""
    part = at(token.config.attention, layer)
    return StoryStep(
        f"{where}: {part.describe(token.config)}",
        wide,
        "",
        f"{formula(part)}. Its steps are not shown, because it has no weights of one token over the earlier ones; "
        f"onward inspect MODEL names 'blocks.{layer}.attn.*' lists its activations.",
        [],
    )


def attention(token: Followed, layer: int, where: str) -> Iterator[StoryStep]:
    """Explain the attention of a block; `where` is the block's name in the titles."""
    name, count = f"blocks.{layer}.attn", len(token.tokens)
    queries, keys, values = (token.t[f"{name}.{part}"][0].float().cpu() for part in "qkv")
    yield projections(token, layer, where, queries[token.p], keys[token.p], values[token.p])
    if f"{name}.q_rotated" in token.t:
        queries, keys = (token.t[f"{name}.{part}_rotated"][0].float().cpu() for part in "qk")
        yield rotation(token, layer, where, queries[token.p])
    weights = token.weights(layer)
    n_heads = len(weights)
    scores, biased = (
        token.t[f"{name}.{part}"][0, :, token.p, : token.p + 1].float().cpu() for part in ("scores", "masked_scores")
    )
    head, best = divmod(int(weights[:, 1:].argmax()), token.p) if token.p else (0, -1)
    best += 1
    dot = float(queries[token.p, head] @ keys[best, head * keys.size(1) // n_heads])
    scale = float(attend_modules(token.model)[layer].scale)
    score_scale = ColorScale(float(biased.abs().max()) or 1.0, signed=True, unit="score")
    biases = f" The positions add a bias, which makes this score {float(biased[head, best]):.3f}."
    yield StoryStep(
        f"{where}: scores",
        f"(1, {n_heads}, {count}, {count})",
        "scores = q · k × scale",
        f"The query of {token.piece} is compared with the key of every token up to it: {token.p + 1} scores for "
        "each head, each the sum of products of a query's and a key's numbers, times a constant. Later tokens "
        f"are masked, since the model must predict them. In head {head}, the product of the query and the key of "
        f"“{token.pieces[best]}” is {dot:.3f}; times {scale:.4g}, it is {dot * scale:.3f}."
        + biases
        * (not torch.allclose(scores, biased, atol=1e-4)),
        [token.of_heads("scores", biased, score_scale, "{row}: {column} scores {value}")],
    )
    likes = "; ".join(
        f"head {h} takes {weights[h].max():.0%} from “{token.pieces[int(weights[h].argmax())]}”"
        for h in range(min(n_heads, 4))
    ).replace("%", " %")
    collected = f"{name}.heads" in token.t
    rest = "; the rest goes to its sink" if attend_modules(token.model)[layer].sinks is not None else ""
    yield StoryStep(
        f"{where}: attention weights and the output of the heads",
        f"weights (1, {n_heads}, {count}, {count}), heads (1, {count}, {n_heads}, {values.size(-1)})",
        "weights = softmax(scores); heads = weights × v",
        "The softmax turns scores into weights: the exponential of each, divided by the sum of all. The weights of "
        f"a head sum to {weights[0].sum():.2f}{rest}. The output of a head is the sum of the values times these "
        f"weights: {likes}.",
        [token.weights_panel(layer)] + [head_vectors("output of each head", token.at(f"{name}.heads"))] * collected,
    )


def projections(token: Followed, layer: int, where: str, q: Tensor, k: Tensor, v: Tensor) -> StoryStep:
    """Explain the token's queries `q` (H, E), keys `k` (K, E) and values `v` (K, F)."""
    latent, count = f"blocks.{layer}.attn.latent", len(token.tokens)
    queries, keys, values = (f"(1, {count}, {len(x)}, {x.size(1)})" for x in (q, k, v))
    shape = f"q {queries}, " + (f"k and v {keys}" if keys == values else f"k {keys}, v {values}")
    panels = [head_vectors("queries", q), head_vectors("keys", k), head_vectors("values", v)]
    each = (
        f"for each of {len(q)} heads, a query (what is {token.piece} looking for?), a key (what does it offer to "
        "others?) and a value (what does it hand on?)"
    )
    if latent in token.t:
        kept = token.at(latent)
        return StoryStep(
            f"{where}: query, latent, key and value",
            shape,
            "q = Wq y; latent = Wl y; k, v = Wkv latent",
            f"Attention needs, {each}. Keys and values are computed from one latent of {len(kept)} numbers, which "
            "all heads share. The KV cache stores this latent and the rotated part of the key instead of keys and "
            "values.",
            [vector("latent", kept), *panels],
        )
    numbers = f"{q.size(1)}" if keys == values else f"{q.size(1)}, {k.size(1)} and {v.size(1)}"
    shared = f" {len(q) // len(k)} heads share a key and a value." * (len(k) < len(q))
    return StoryStep(
        f"{where}: query, key and value",
        shape,
        "q, k, v = Wq y, Wk y, Wv y",
        f"Three matrices compute, {each}, {numbers} numbers each.{shared}",
        panels,
    )


def rotation(token: Followed, layer: int, where: str, q: Tensor) -> StoryStep:
    """Explain the rotation of queries and keys; `q` (H, E) are the token's rotated queries."""
    c, part, position = token.config, at(token.config.attention, layer), at(token.config.position, layer)
    first = q.size(1) - part.rope_width(c)  # in latent attention, earlier elements are not rotated
    pairs = f"Pairs of the last {part.rope_width(c)} numbers" if first else "Pairs of numbers"
    turned = ""
    if isinstance(position, Rotary):
        half = first + position.rope_dim(part.rope_width(c)) // 2
        a, b = (f"({x[first]:.2f}, {x[half]:.2f})" for x in (token.at(f"blocks.{layer}.attn.q")[0], q[0]))
        turned = f" At position {token.p}, the first pair of the query of head 0 is rotated from {a} to {b}."
    return StoryStep(
        f"{where}: rotation by the position",
        f"(1, {len(token.tokens)}, {len(q)}, {q.size(1)})",
        "q, k = rotate(q, position), rotate(k, position)",
        f"{pairs} of every query and key are rotated by an angle that grows with the position, fast for the first pair "
        "and ever more slowly for later pairs, so that a score depends on the distance of two tokens. Lengths do not "
        f"change.{turned}",
        [head_vectors("rotated queries", q)],
    )


def feed_forward(token: Followed, layer: int, where: str, wide: str) -> Iterator[StoryStep]:
    c, name, count = token.config, f"blocks.{layer}.mlp", len(token.tokens)
    out = token.at(f"{name}.out")
    if f"{name}.router.choices" in token.t:
        choices, shares = token.at(f"{name}.router.choices").long().tolist(), token.at(f"{name}.shares")
        named = ", ".join(f"expert {i} with {shares[i]:.0%}" for i in choices).replace("%", " %")
        yield StoryStep(
            f"{where}: choice of experts",
            f"(1, {count}, {len(shares)})",
            "shares = router(y)",
            f"A router scores {len(shares)} feed-forwards, the experts, and {token.piece} goes to the best: {named}. "
            "The others compute nothing for it.",
            [bars("shares", {f"expert {i}": float(s) for i, s in enumerate(shares.tolist())}, unit="%")],
        )
    elif f"{name}.post" in token.t:
        units = token.at(f"{name}.post")
        order = units.abs().argsort(descending=True)[:NUMBERS].tolist()
        gated = f"{name}.up" in token.t
        act = getattr(at(c.mlp, layer), "act", "act")
        yield StoryStep(
            f"{where}: units of the feed-forward",
            f"(1, {count}, {len(units)})",
            f"units = {act}(gate y) × (up y)" if gated else f"units = {act}(up y)",
            f"Each token is processed by itself: {'two matrices compute' if gated else 'a matrix computes'} "
            f"{len(units):,} units of its vector, and {act} keeps some of them and suppresses others. Here "
            f"{int((units > 0).sum()):,} of {len(units):,} are above 0. The strongest are shown, negative ones in "
            "the second color; each stands for some pattern in the text that the model has learned to detect.",
            [bars("strongest units", {f"unit {i}": float(units[i]) for i in order})],
        )
    yield StoryStep(
        f"{where}: back to the width of the stream",
        wide,
        "down(units)",
        f"A second matrix turns the units into a vector that is added to the residual stream; its length is "
        f"{out.norm():.2f}.",
        [vector("output of the feed-forward", out)],
    )
