"""One token followed through a decoder, from its id to the next token, step by step with shapes and numbers.

Shapes: T tokens, D d_model, H heads, K key/value heads, E d_head, V vocabulary. Every number is a traced activation.
"""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import numpy as np
import torch
from torch import Tensor

from onward.errors import UserError
from onward.generation.distribution import next_token_distribution
from onward.generation.sampling import Sampling
from onward.inspection.attention import logits
from onward.model.config import Rotary, at
from onward.model.decoder import Decoder
from onward.planning.descriptions import sentence
from onward.reports.markup import MARKS, readable
from onward.reports.panels import bars, cells, unique
from onward.reports.picture import Panel, Scale
from onward.reports.story import Step, Story
from onward.text.tokenizer import Tokenizer
from onward.tracing.attention import attend_modules
from onward.tracing.names import activation_names
from onward.tracing.trace import Trace, trace

NUMBERS, HEADS = 10, 8  # largest number of numbers of a vector, and of heads, that are shown
TOKENS = 12  # largest number of tokens whose ids are shown
KEYS = 40  # largest number of keys that are shown
WHOLE = ("embed", "embed_norm", "position", "norm", "norm.scale", "logits")
OF_ALL_BLOCKS = ("in", "attn.weights", "attn.out", "mlp.out", "out")


class Narrator:
    """Tells the steps for the token at `position` of a text, block `layer` in detail."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer, tokens: Sequence[int], position: int, layer: int) -> None:
        self.model, self.config, self.tokenizer = model, model.config, tokenizer
        self.tokens, self.p, self.layer = list(tokens), position, layer
        self.pieces = [readable(tokenizer.piece(token), MARKS) for token in tokens]
        known = activation_names(model)
        wanted = [*WHOLE, *(f"blocks.*.{name}" for name in OF_ALL_BLOCKS), f"blocks.{layer}.*"]
        patterns = [pattern for pattern in wanted if any(fnmatchcase(name, pattern) for name in known)]
        with trace(model, *patterns) as t:
            logits(model, self.tokens)
        self.t: Trace = t

    @property
    def piece(self) -> str:
        """The followed token in quotes."""
        return f"“{self.pieces[self.p]}”"

    def at(self, name: str) -> Tensor:
        """An activation at the followed token, in fp32."""
        return self.t[name][0, self.p].float().cpu()

    def weights(self, layer: int) -> Tensor:
        """The attention weights of the followed token, (H, p + 1)."""
        return self.t[f"blocks.{layer}.attn.weights"][0, :, self.p, : self.p + 1].float().cpu()

    def steps(self) -> Iterator[Step]:
        """All steps."""
        yield from self.beginning()
        for layer in range(self.config.n_layers):
            yield from self.block(layer) if layer == self.layer else [self.block_in_short(layer)]
        yield from self.end()

    def beginning(self) -> Iterator[Step]:
        """From text to the first vector."""
        c, first = self.config, max(0, self.p - TOKENS + 1)
        shown = range(first, min(len(self.tokens), first + TOKENS))
        mark = np.array([[float(i == self.p) for i in shown]] * 2)
        table = [[self.pieces[i] for i in shown], [str(self.tokens[i]) for i in shown]]
        names = [str(i) for i in shown]
        yield Step(
            "From text to tokens",
            f"(1, {len(self.tokens)})",
            "ids = tokenizer.encode(text)",
            f"The tokenizer splits the text into {len(self.tokens)} tokens. Each has an id, a number from 0 to "
            f"{c.vocab_size - 1:,}. From here on only numbers are left. We follow token {self.p}, {self.piece}, whose "
            f"id is {self.tokens[self.p]}.",
            [cells("", mark, ["token", "id"], names, texts=table, longest=8, reading="position {column}: {text}")],
        )
        x = self.at("embed")
        yield Step(
            "From id to vector",
            f"(1, {len(self.tokens)}, {c.d_embed})",
            f"x = embed[{self.tokens[self.p]}]",
            f"The embedding is a table with a row of {c.d_embed} numbers for each of the {c.vocab_size:,} tokens. The "
            "id chooses a row. These numbers were learned; tokens that are used alike have similar rows.",
            [self.vector("embedding", x)],
        )
        entered = self.at("blocks.0.in")
        if "position" not in self.t and not torch.equal(entered, x):
            yield Step(
                "Into the residual stream",
                f"(1, {len(self.tokens)}, {c.d_model})",
                "",
                "Before the first block this model scales, norms or projects the embeddings.",
                [self.vector("into the first block", entered)],
            )
        if "position" in self.t:
            moved = self.t["position"][0, self.p].float().cpu()
            yield Step(
                "Where the token is",
                f"(1, {len(self.tokens)}, {c.d_model})",
                f"x = x + position[{self.p}]",
                f"A vector of the position {self.p} is added, so that the same token is another vector at another "
                f"place. The first number becomes {self.sum_of(self.at('blocks.0.in')[0] - moved[0], moved[0])}.",
                [self.vector("position", moved), self.vector("sum", self.at("blocks.0.in"))],
            )

    def block(self, layer: int) -> Iterator[Step]:
        """One block in detail."""
        c, name, count = self.config, f"blocks.{layer}", len(self.tokens)
        where = f"Block {layer + 1} of {c.n_layers}"
        wide = f"(1, {count}, {c.d_model})"
        part = at(c.block, layer)
        formula = sentence(type(part))
        if f"{name}.attn_norm" in self.t and part.kind != "post_norm":
            yield self.norm(f"{where}: norm", f"{name}.in", f"{name}.attn_norm", wide)
        yield from self.attention(layer, where, wide)
        out, before = self.at(f"{name}.attn.out"), self.at(f"{name}.in")
        yield Step(
            f"{where}: back to the width of the stream",
            wide,
            "out(heads)",
            f"The outputs of the {c.n_heads} heads are put side by side, and one matrix mixes them into a vector as "
            f"wide as the residual stream. This is what attention has to say about {self.piece}; its length is "
            f"{out.norm():.2f}, that of the stream {before.norm():.2f}. The block adds it: {formula}.",
            [self.vector("output of attention", out)]
            + ([self.vector("stream after the addition", self.at(f"{name}.mid"))] if f"{name}.mid" in self.t else []),
        )
        if f"{name}.mlp.out" in self.t:
            if f"{name}.mlp_norm" in self.t and part.kind != "post_norm":
                yield self.norm(f"{where}: norm", f"{name}.mid", f"{name}.mlp_norm", wide)
            yield from self.feed_forward(layer, where, wide)
        after = self.at(f"{name}.out")
        yield Step(
            f"{where}: what the block has changed",
            wide,
            formula,
            f"The vector went in with length {before.norm():.2f} and comes out with {after.norm():.2f}; the cosine of "
            f"both is {torch.cosine_similarity(before, after, 0):.2f}. {self.guess(layer)}",
            [self.vector("into the block", before), self.vector("out of the block", after)],
        )

    def attention(self, layer: int, where: str, wide: str) -> Iterator[Step]:
        """Queries, keys and values, rotation, scores and weights."""
        c, name, count = self.config, f"blocks.{layer}.attn", len(self.tokens)
        heads = f"(1, {count}, {c.n_heads}, {c.d_head})"
        if f"{name}.k" in self.t:
            q, k, v = (self.at(f"{name}.{one}") for one in "qkv")
            shared = f" {c.n_heads // c.n_kv_heads} heads share a key and a value." * (c.n_kv_heads < c.n_heads)
            yield Step(
                f"{where}: query, key and value",
                f"q {heads}, k and v (1, {count}, {c.n_kv_heads}, {c.d_head})",
                "q, k, v = Wq y, Wk y, Wv y",
                f"Three matrices make, for each of {c.n_heads} heads, a query (what is {self.piece} looking for?), a "
                f"key (what does it offer to others?) and a value (what does it hand on?), {c.d_head} numbers "
                f"each.{shared}",
                [self.heads("queries", q), self.heads("keys", k), self.heads("values", v)],
            )
        rotated = f"{name}.q_rotated" in self.t and f"{name}.k_rotated" in self.t
        if rotated:
            yield Step(
                f"{where}: rotation by the position",
                heads,
                "q, k = rotate(q, position), rotate(k, position)",
                "Pairs of numbers of every query and key are turned by an angle that grows with the position, the "
                "first pair fast, later pairs ever more slowly, so that a score depends on how far apart two tokens "
                f"are. Lengths do not change.{self.turned(layer)}",
                [self.heads("queries, turned", self.at(f"{name}.q_rotated"))],
            )
        weights = self.weights(layer)
        scores, biased = (
            self.t[f"{name}.{one}"][0, :, self.p, : self.p + 1].float().cpu() for one in ("scores", "masked_scores")
        )
        head, best = divmod(int(weights[:, 1:].argmax()), self.p) if self.p else (0, -1)
        best += 1
        text = (
            f"The query of {self.piece} is compared with the key of every token up to it: {self.p + 1} scores for "
            "each head, each the sum of products of a query's and a key's numbers, times a constant. Later tokens "
            "are masked: they are what the model has to predict."
        )
        if rotated:
            q, k = self.at(f"{name}.q_rotated")[head], self.t[f"{name}.k_rotated"][0, best].float().cpu()
            dot = float(q @ k[head * c.n_kv_heads // c.n_heads])
            scale = float(attend_modules(self.model)[layer].scale)
            text += (
                f" In head {head + 1}, the query and the key of “{self.pieces[best]}” give {dot:.3f}, times "
                f"{scale:.4g} is {dot * scale:.3f}."
            )
        if not torch.allclose(scores, biased, atol=1e-4):
            text += f" The positions add a bias, so that this score becomes {float(biased[head, best]):.3f}."
        shown = slice(max(0, self.p + 1 - KEYS), self.p + 1)
        columns, rows = self.pieces[shown], [f"head {h + 1}" for h in range(min(c.n_heads, 2 * HEADS))]
        yield Step(
            f"{where}: scores",
            f"(1, {c.n_heads}, {count}, {count})",
            "scores = q · k × scale",
            text,
            [
                cells(
                    "scores",
                    biased[: len(rows), shown].numpy(),
                    rows,
                    columns,
                    reading="{row}: {column} scores {value}",
                )
            ],
        )
        likes = "; ".join(
            f"head {h + 1} takes {weights[h].max():.0%} of “{self.pieces[int(weights[h].argmax())]}”"
            for h in range(min(c.n_heads, 4))
        ).replace("%", " %")
        yield Step(
            f"{where}: weights, and what they collect",
            f"weights (1, {c.n_heads}, {count}, {count}), heads {heads}",
            "weights = softmax(scores); heads = weights × v",
            "The softmax makes shares of the scores: the exponential of each, divided by the sum of all. The shares "
            f"of a head sum to {weights[0].sum():.2f}. They are the recipe by which a head mixes the values: {likes}.",
            [
                cells(
                    "attention weights",
                    weights[: len(rows), shown].numpy(),
                    rows,
                    columns,
                    scale=Scale(1, root=True, unit="weight"),
                    reading="{row} looks at {column} with {value}",
                ),
                *(
                    [self.heads("what each head collected", self.at(f"{name}.heads"))]
                    if f"{name}.heads" in self.t
                    else []
                ),
            ],
        )

    def turned(self, layer: int) -> str:
        """What the rotation does to the first pair of the first query."""
        position, attention = at(self.config.position, layer), at(self.config.attention, layer)
        if not isinstance(position, Rotary):
            return ""
        half = position.rope_dim(attention.rope_width(self.config)) // 2
        before, after = (self.at(f"blocks.{layer}.attn.{name}")[0] for name in ("q", "q_rotated"))
        a, b = (f"({x[0]:.2f}, {x[half]:.2f})" for x in (before, after))
        return f" At position {self.p}, the first pair of the query of head 1 turns from {a} to {b}."

    def feed_forward(self, layer: int, where: str, wide: str) -> Iterator[Step]:
        """The feed-forward of a block."""
        c, name, count = self.config, f"blocks.{layer}.mlp", len(self.tokens)
        out = self.at(f"{name}.out")
        if f"{name}.router.choices" in self.t:
            choices, shares = self.at(f"{name}.router.choices").long().tolist(), self.at(f"{name}.shares")
            told = ", ".join(f"expert {i + 1} with {shares[i]:.0%}" for i in choices).replace("%", " %")
            yield Step(
                f"{where}: which experts",
                f"(1, {count}, {len(shares)})",
                "shares = router(y)",
                f"A router scores {len(shares)} feed-forwards, the experts, and {self.piece} goes to the best: {told}. "
                "The others compute nothing for it.",
                [bars("shares", {f"expert {i + 1}": float(s) for i, s in enumerate(shares.tolist())}, unit="%")],
            )
        elif f"{name}.post" in self.t:
            units = self.at(f"{name}.post")
            order = units.abs().argsort(descending=True)[:NUMBERS].tolist()
            gated = f"{name}.up" in self.t
            act = getattr(at(c.mlp, layer), "act", "act")
            yield Step(
                f"{where}: units of the feed-forward",
                f"(1, {count}, {len(units)})",
                f"units = {act}(gate y) × (up y)" if gated else f"units = {act}(up y)",
                f"Each token by itself now: a matrix makes {len(units):,} units of its vector, and {act} keeps some "
                f"of them and suppresses others. Here {int((units > 0).sum()):,} of {len(units):,} are above 0. The "
                "strongest are shown; each stands for some pattern in the text that the model has learned to detect.",
                [bars("strongest units", {f"unit {i}": float(units[i]) for i in order})],
            )
        yield Step(
            f"{where}: back to the width of the stream",
            wide,
            "down(units)",
            f"A second matrix turns the units into a vector that is added to the residual stream; its length is "
            f"{out.norm():.2f}.",
            [self.vector("output of the feed-forward", out)],
        )

    def block_in_short(self, layer: int) -> Step:
        """One block in one step."""
        c, name = self.config, f"blocks.{layer}"
        before, attended = self.at(f"{name}.in"), self.at(f"{name}.attn.out")
        weights = self.weights(layer)
        head, key = divmod(int(weights.argmax()), weights.size(1))
        added = f", its feed-forward one of {self.at(f'{name}.mlp.out').norm():.2f}" * (f"{name}.mlp.out" in self.t)
        shown = slice(max(0, self.p + 1 - KEYS), self.p + 1)
        rows = [f"head {h + 1}" for h in range(min(c.n_heads, 2 * HEADS))]
        panel = cells(
            "attention weights",
            weights[: len(rows), shown].numpy(),
            rows,
            self.pieces[shown],
            scale=Scale(1, root=True, unit="weight"),
            reading="{row} looks at {column} with {value}",
        )
        return Step(
            f"Block {layer + 1} of {c.n_layers}",
            f"(1, {len(self.tokens)}, {c.d_model})",
            sentence(type(at(c.block, layer))),
            f"The same again, with weights of its own. Its attention adds a vector of length {attended.norm():.2f} to "
            f"the stream of length {before.norm():.2f}{added}. Head {head + 1} looks at “{self.pieces[key]}” with "
            f"{weights[head, key]:.2f}. {self.guess(layer)}",
            [panel],
        )

    def end(self) -> Iterator[Step]:
        """From the last vector to the next token."""
        c, count, text = self.config, len(self.tokens), "".join(self.pieces[: self.p + 1]).replace("·", " ")
        if "norm" in self.t:
            yield self.norm("The last norm", f"blocks.{c.n_layers - 1}.out", "norm", f"(1, {count}, {c.d_model})")
        z = self.at("logits")
        order = z.argsort(descending=True)[:NUMBERS].tolist()
        names = [readable(self.tokenizer.piece(token), MARKS) for token in order]
        yield Step(
            "From vector to logits",
            f"(1, {count}, {c.vocab_size})",
            "logits = head(x)",
            f"The head has a row of numbers for each of the {c.vocab_size:,} tokens of the vocabulary. The product of "
            f"the vector with a row is the logit of that token: {z[order[0]]:.2f} for “{names[0]}”, the largest, and "
            f"{z.mean():.2f} on average.",
            [bars("largest logits", unique(names, [float(z[i]) for i in order]))],
        )
        p = z.softmax(-1)
        sure = float(torch.special.entr(p).sum())
        following = self.tokens[self.p + 1] if self.p + 1 < count else None
        next_one = ""
        if following is not None:
            share, loss = f"{p[following]:.1%}".replace("%", " %"), -float(p[following].log())
            next_one = (
                f" In this text “{self.pieces[self.p + 1]}” comes next, which has {share}: a loss of {loss:.2f} nats."
            )
        yield Step(
            "From logits to probabilities",
            f"(1, {count}, {c.vocab_size})",
            "p = softmax(logits)",
            f"The exponential of each logit, divided by the sum of all, is the probability that this token comes next. "
            f"The entropy is {sure:.2f} nats; a uniform guess has {np.log(c.vocab_size):.2f}.{next_one}",
            [bars("likeliest next tokens", unique(names, [float(p[i]) for i in order]), unit="%")],
        )
        drawn = next_token_distribution(z[None], Sampling(temperature=0.8, top_p=0.95))[0]
        kept = int((drawn > 0).sum())
        yield Step(
            "From probabilities to the next token",
            "(1,)",
            "token = draw(p)",
            f"Greedy decoding takes the likeliest, “{names[0]}”. Sampling draws: a temperature of 0.8 sharpens the "
            f"probabilities, and with top-p 0.95, {kept:,} of {c.vocab_size:,} tokens remain.",
            [bars("temperature 0.8, top-p 0.95", unique(names, [float(drawn[i]) for i in order]), unit="%")],
        )
        yield Step(
            "And again",
            f"(1, {self.p + 2})",
            "text = text + token",
            f"The token is appended: {text.strip()}{names[0].replace('·', ' ')}. The longer text goes the same way "
            "for the token after it. Keys and values of earlier tokens do not change, so they are kept in the KV "
            "cache, and only the new token passes through the blocks.",
        )

    def norm(self, title: str, before: str, after: str, wide: str) -> Step:
        """A norm."""
        y, scale = self.at(after), f"{after}.scale"
        told = f" Here it divides by {float(self.at(scale)):.3f}." if scale in self.t else ""
        panels = [self.vector("before", self.at(before))] if before in self.t else []
        return Step(
            title,
            wide,
            "y = norm(x)",
            "The vector is brought to a standard size, so that its numbers stay in the range that the next matrix "
            f"was trained for: divided by a number made of all its {len(y)} numbers, then multiplied by learned "
            f"weights.{told}",
            [*panels, self.vector("after", y)],
        )

    def guess(self, layer: int) -> str:
        """What the residual stream after a block would predict."""
        with torch.inference_mode():
            x = self.t[f"blocks.{layer}.out"][:, self.p : self.p + 1]
            p = self.model.logits(self.model.norm(x))[0, 0].float().softmax(-1)
        name = readable(self.tokenizer.piece(int(p.argmax())), MARKS)
        return f"If the model ended here, it would say “{name}” with {p.max():.1%}.".replace("%", " %")

    @staticmethod
    def sum_of(a: Tensor, b: Tensor) -> str:
        """A sum with its result."""
        return f"{a:.3f} {'+' if b >= 0 else '−'} {abs(b):.3f} = {a + b:.3f}"

    @staticmethod
    def vector(title: str, x: Tensor) -> Panel:
        """The first numbers of a vector."""
        shown = x[:NUMBERS]
        more = f" (first {NUMBERS} of {len(x):,} numbers)" if len(x) > NUMBERS else ""
        return cells(
            title + more,
            shown[None].numpy(),
            columns=[str(i) for i in range(len(shown))],
            texts=[[f"{v:.2f}" for v in shown.tolist()]],
            scale=Scale(float(x.abs().max()) or 1.0, signed=True),
            reading="number {column}: {value}",
        )

    @staticmethod
    def heads(title: str, x: Tensor) -> Panel:
        """The first numbers of the vectors of heads (H, E)."""
        shown = x[:HEADS, :NUMBERS]
        more = f" (first {NUMBERS} of {x.size(1)} numbers)" if x.size(1) > NUMBERS else ""
        return cells(
            title + more,
            shown.numpy(),
            [f"head {h + 1}" for h in range(len(shown))],
            [str(i) for i in range(shown.size(1))],
            scale=Scale(float(x.abs().max()) or 1.0, signed=True),
            reading="{row}, number {column}: {value}",
            room=240,
        )


def explain(model: Decoder, tokenizer: Tokenizer, text: str, position: int = -1, layer: int = 0) -> Story:
    """The way of the token at `position` of a text (from the end where negative) through a model, with block `layer`
    (from 0) in detail. A UserError for an empty or too long text, and for a position or a layer that does not exist."""
    c, tokens = model.config, tokenizer.begin(tokenizer.encode(text))
    if not tokens:
        raise UserError("the text has no tokens: give at least one")
    if len(tokens) > c.context_length:
        raise UserError(f"the text is {len(tokens)} tokens and the model's context {c.context_length}: shorten it")
    if not -len(tokens) <= position < len(tokens):
        raise UserError(f"position {position} is not in the text, which has tokens 0 to {len(tokens) - 1}")
    if not -c.n_layers <= layer < c.n_layers:
        raise UserError(f"layer {layer} does not exist: the model has layers 0 to {c.n_layers - 1}")
    narrator = Narrator(model, tokenizer, tokens, position % len(tokens), layer % c.n_layers)
    title = f"How {narrator.piece} becomes the next token"
    return Story(title, [*narrator.steps()])
