"""Follows one token through a decoder, from its id to the next token, step by step with shapes and numbers."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from onward.base.arguments import checked
from onward.config.decoder import at
from onward.generation.distribution import next_token_distribution
from onward.generation.sampling import Sampling
from onward.inspection.inputs import as_row, check_layer, check_position
from onward.model.decoder import Decoder
from onward.reports.explain.explain_block import block, block_in_short
from onward.reports.explain.followed import NUMBERS, Followed, vector
from onward.reports.explain.story import Story, StoryStep
from onward.reports.pictures.markup import MARKS, readable
from onward.reports.pictures.panels import bars, cells, unique
from onward.reports.pictures.scale import ColorScale
from onward.text.tokenizer import Tokenizer

TOKENS = 12  # largest number of tokens whose ids are shown


@checked
def explain(model: Decoder, tokenizer: Tokenizer, text: str, position: int = -1, layer: int = 0) -> Story:
    """Explain step by step, as `onward explain` does, how a model predicts the next token: follow the token at
    `position` of a text (negative: from the end) through all blocks; block `layer` (from 0) is shown in detail. Raises
    a UserError if the text is empty or too long, or if the position or the layer does not exist."""
    tokens = tokenizer.begin(tokenizer.encode(text))
    as_row(model, tokens)  # neither empty nor too long
    token = Followed(model, tokenizer, tokens, check_position(position, tokens), check_layer(layer, model))
    return Story(f"How {token.piece} becomes the next token", [*steps(token)])


def steps(token: Followed) -> Iterator[StoryStep]:
    yield from beginning(token)
    for layer in range(token.config.n_layers):
        yield from block(token, layer) if layer == token.layer else [block_in_short(token, layer)]
    yield from end(token)


def beginning(token: Followed) -> Iterator[StoryStep]:
    c, first = token.config, max(0, token.p - TOKENS + 1)
    shown = range(first, min(len(token.tokens), first + TOKENS))
    mark = np.array([[float(i == token.p) for i in shown]] * 2)
    table = [[token.pieces[i] for i in shown], [str(token.tokens[i]) for i in shown]]
    names = [str(i) for i in shown]
    yield StoryStep(
        "From text to tokens",
        f"(1, {len(token.tokens)})",
        "ids = tokenizer.encode(text)",
        f"The tokenizer splits the text into {len(token.tokens)} tokens. Each has an id, a number from 0 to "
        f"{c.vocab_size - 1:,}. From here on only numbers are left. We follow token {token.p}, {token.piece}, whose "
        f"id is {token.tokens[token.p]}.",
        [
            cells(
                "",
                mark,
                ["token", "id"],
                names,
                texts=table,
                longest=8,
                reading="position {column}: {text}",
                scale=ColorScale(1),
            )
        ],
    )
    x = token.at("embed")
    yield StoryStep(
        "From id to vector",
        f"(1, {len(token.tokens)}, {c.d_embed})",
        f"x = embed[{token.tokens[token.p]}]",
        f"The embedding is a table with a row of {c.d_embed} numbers for each of the {c.vocab_size:,} tokens. The "
        "id chooses a row. These numbers were learned; tokens with a similar use have similar rows.",
        [vector("embedding", x)],
    )
    entered = token.at("blocks.0.in")
    if "position" not in token.t and not torch.equal(entered, x):
        yield StoryStep(
            "Into the residual stream",
            f"(1, {len(token.tokens)}, {c.d_model})",
            "",
            "Before the first block this model scales, normalizes or projects the embeddings.",
            [vector("into the first block", entered)],
        )
    if "position" in token.t:
        moved = token.t["position"][0, token.p].float().cpu()
        yield StoryStep(
            "Adding the position",
            f"(1, {len(token.tokens)}, {c.d_model})",
            f"x = x + position[{token.p}]",
            f"The vector of position {token.p} is added, so that the same token has a different vector at each "
            f"position. The first number becomes {sum_of(token.at('blocks.0.in')[0] - moved[0], moved[0])}.",
            [vector("position", moved), vector("sum", token.at("blocks.0.in"))],
        )


def end(token: Followed) -> Iterator[StoryStep]:
    c, count, text = token.config, len(token.tokens), "".join(token.pieces[: token.p + 1]).replace("·", " ")
    if "norm" in token.t:
        last = c.n_layers - 1
        norm = c.final_norm or at(c.norm, last)
        yield token.norm(norm, "The last norm", f"blocks.{last}.out", "norm", f"(1, {count}, {c.d_model})")
    z = token.at("logits")
    order = z.argsort(descending=True)[:NUMBERS].tolist()
    names = [readable(token.tokenizer.piece(i), MARKS) for i in order]
    yield StoryStep(
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
    following = token.tokens[token.p + 1] if token.p + 1 < count else None
    next_one = ""
    if following is not None:
        share, loss = f"{p[following]:.1%}".replace("%", " %"), -float(p[following].log())
        known = token.pieces[token.p + 1]
        next_one = f" In this text “{known}” comes next; its probability is {share}, a loss of {loss:.2f} nats."
    yield StoryStep(
        "From logits to probabilities",
        f"(1, {count}, {c.vocab_size})",
        "p = softmax(logits)",
        f"The exponential of each logit, divided by the sum of all, is the probability that this token comes next. "
        f"The entropy is {sure:.2f} nats; a uniform guess has {np.log(c.vocab_size):.2f}.{next_one}",
        [bars("likeliest next tokens", unique(names, [float(p[i]) for i in order]), unit="%")],
    )
    drawn = next_token_distribution(z[None], Sampling(temperature=0.8, top_p=0.95))[0]
    kept = int((drawn > 0).sum())
    yield StoryStep(
        "From probabilities to the next token",
        "(1,)",
        "token = draw(p)",
        f"Greedy decoding takes the likeliest, “{names[0]}”. Sampling draws: a temperature of 0.8 sharpens the "
        f"probabilities, and with top-p 0.95, {kept:,} of {c.vocab_size:,} tokens remain.",
        [bars("temperature 0.8, top-p 0.95", unique(names, [float(drawn[i]) for i in order]), unit="%")],
    )
    yield StoryStep(
        "The next step",
        f"(1, {token.p + 2})",
        "text = text + token",
        f"The token is appended: “{text}{names[0].replace('·', ' ')}”. The longer text is processed in the "
        "same way to choose the token after it. Keys and values of earlier tokens do not change, so they are kept "
        "in the KV cache, and only the new token passes through the blocks.",
    )


def sum_of(a: Tensor, b: Tensor) -> str:
    """An addition as text, such as 0.120 + 0.300 = 0.420."""
    return f"{a:.3f} {'+' if b >= 0 else '−'} {abs(b):.3f} = {a + b:.3f}"
