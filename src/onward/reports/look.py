"""The parts of a page that show the model at work on a text: attention weights, and probabilities of the next token.

Shapes: H heads, T tokens.
"""

import base64
import math
import re
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from torch import Tensor

from onward.evaluation.score import logprobs
from onward.inspection.attention import attend_modules, attention_maps, head_scores, next_tokens
from onward.model.decoder import Decoder
from onward.reports.markup import MARKS, embedded, readable, visible
from onward.text.tokenizer import Tokenizer

TOKENS, FEWEST = 48, 12  # the largest and the smallest number of tokens to show
CELLS = 300_000  # largest number of attention weights on a page
SENTENCE_END = re.compile(r"(?<=[.!?…])[\"'”’»)\]]*(?=\s|$)|(?<=[。！？])[」』”’]*")
ABBREVIATION = re.compile(r"(?:\b[a-z]|\b(?:etc|cf|vs|al|mr|mrs|ms|dr|prof|st))\.$", re.IGNORECASE)  # e.g., J. S.
SENTENCES = 50  # of a paragraph, from which the passage is chosen


def look(model: Decoder, tokenizer: Tokenizer | None, text: str) -> dict[str, str]:
    """The attention maps and the next-token tables for the first sentences of a text; "" without a tokenizer and
    for fewer than two tokens."""
    nothing, c = dict.fromkeys(("attention", "sinks", "words", "next"), ""), model.config
    if tokenizer is None:
        return nothing
    most = min(TOKENS, c.context_length, max(2, math.isqrt(CELLS // (c.n_layers * c.n_heads))))
    tokens = tokenizer.begin(tokenizer.encode(passage(tokenizer, text, most)))
    shown = tokens[:most]
    if len(shown) < 2:
        return nothing
    tokens = tokens[: most + 1]
    probabilities = [0.0, *np.exp(logprobs(model, np.array([tokens]))[0])]  # of each token, given those before it
    pieces, maps = [tokenizer.piece(token) for token in tokens], attention_maps(model, shown)
    scores = head_scores(maps).cpu()
    layer, head = divmod(int(scores.mean(-1).argmax()), c.n_heads)
    attention = {
        "pieces": [readable(piece, MARKS) for piece in pieces[:most]],
        "heads": c.n_heads,
        "layers": [packed(weights) for weights in maps],
        "open": [layer, head, int(scores[layer, head].argmax())],
    }
    articles = []
    for i, candidates in enumerate(next_tokens(model, shown)):
        before = "".join(pieces[max(0, i - 7) : i + 1])
        rows = [(tokenizer.piece(token), p, [token] == tokens[i + 1 : i + 2]) for token, p in candidates]
        if i + 1 < len(tokens) and not any(true for *_, true in rows):
            rows.append((pieces[i + 1], probabilities[i + 1], True))
        articles.append(next_article(before, rows))
    sinks = any(attend.sinks is not None for attend in attend_modules(model))
    return {
        "attention": embedded(attention),
        "sinks": " (to less here, where a sink takes the rest)" if sinks else "",
        "words": "".join(
            f'<button type="button" class="token" style="--p:{100 * p:.0f}%">{visible(piece, MARKS)}</button>'
            for piece, p in zip(pieces[:most], probabilities)
        ),
        "next": "".join(articles),
    }


def passage(tokenizer: Tokenizer, text: str, most: int) -> str:
    """The first whole sentences of one paragraph that together have FEWEST to `most` tokens.

    A text of at most `most` tokens is taken as it is. Where no sentences fit, the text is cut at white space.
    """
    count = lambda part: len(tokenizer.begin(tokenizer.encode(part)))
    text = text[: 64 * TOKENS]
    if count(text) <= most:
        return text
    for paragraph in re.split(r"\n\s*\n", text):
        ends = list(islice(sentence_ends(paragraph), SENTENCES))
        for i, start in enumerate([0, *ends]):
            fitting = ""
            for end in ends[i:]:
                if count(paragraph[start:end].strip()) > most:
                    break
                fitting = paragraph[start:end].strip()
            if count(fitting) >= min(FEWEST, most):
                return fitting
    spaces = [space.start() for space in re.finditer(r"(?<=\S)\s", text)]
    return next((text[:end] for end in reversed(spaces) if count(text[:end]) <= most), text)


def sentence_ends(text: str) -> Iterator[int]:
    """Where sentences end: not after an abbreviation, except at the end of the text, and not inside parentheses."""
    for found in SENTENCE_END.finditer(text):
        end = found.end()
        abbreviated = end < len(text) and ABBREVIATION.search(text[max(0, found.start() - 6) : found.start()])
        inside = re.search(r"\([^()]*$", text[:end]) and re.match(r"[^()]*[()]", text[end:])
        if not abbreviated and not inside:
            yield end


def packed(weights: Tensor) -> str:
    """Attention weights (H, T, T) as one byte each, 255 for a weight of 1, in base64."""
    return base64.b64encode((weights.float() * 255).round().byte().cpu().numpy().tobytes()).decode()


def next_article(before: str, rows: Sequence[tuple[str, float, bool]]) -> str:
    """The likeliest next tokens after a text: (text, probability, whether it is the next token of the text)."""
    items = ""
    for piece, p, true in rows:
        share = f"{p:.1%}".replace("%", " %") if p >= 0.001 else f"1 in {1 / max(p, 1e-9):,.0f}"
        items += (
            f'<li{" class=true" if true else ""}><span class="token">{visible(piece, MARKS)}</span>'
            f'<span><i style="width:{p:.1%}"></i></span><span>{share}</span></li>'
        )
    return f"<article><h3>after “<bdi>{visible(before.strip())}</bdi>”</h3><ol>{items}</ol></article>"
