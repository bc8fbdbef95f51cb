"""Sections of a page that show the model reading a text: attention, next tokens, and the loss of each token.

Shapes: H heads, T tokens, V vocabulary.
"""

import base64
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from onward.config.decoder import Experts, at, each
from onward.evaluation.score import logprobs
from onward.inspection.head_maps import attention_maps, head_scores, next_tokens
from onward.inspection.inputs import logits
from onward.model.decoder import Decoder
from onward.reports.pictures.layer_views import WEIGHT, experts
from onward.reports.pictures.markup import MARKS, embedded, readable, visible
from onward.reports.pictures.picture import Picture, legend_of
from onward.reports.pictures.reading import Reading
from onward.reports.pictures.views import lens
from onward.text.tokenizer import Tokenizer
from onward.tracing.sites import attend_modules

TOKENS, FEWEST = 48, 12  # largest number of tokens shown, smallest number in complete sentences
PARAGRAPH = 256  # the largest number of tokens whose losses are shown
LIKELIEST = 64  # number of tokens whose probabilities the sliders change one by one; all others count together
LENS, EXPERT_LAYERS = 20, 3  # largest number of tokens in the lens, and of layers whose experts are shown
TEMPERATURES = [i / 10 for i in range(1, 21)]  # values of the slider above 0
CELLS = 300_000  # largest number of attention weights on a page
SENTENCE_END = re.compile(r"(?<=[.!?…])[\"'”’»)\]]*(?=\s|$)|(?<=[。！？])[」』”’]*")
ABBREVIATION = re.compile(r"(?:\b[a-z]|\b(?:etc|cf|vs|al|mr|mrs|ms|dr|prof|st))\.$", re.IGNORECASE)  # e.g., J. S.
PARTS = (
    *("attention", "legend", "sinks", "words", "next", "distributions", "losses", "losses_about"),
    *("lens", "lens_about", "experts", "experts_about"),
)
SENTENCES = 50  # a passage is chosen from this many sentences at the beginning of a paragraph


def look(model: Decoder, tokenizer: Tokenizer | None, text: str) -> tuple[dict[str, str], list[Picture]]:
    """Sections of a run's page that show the model reading the first sentences of a text, and their pictures, whose
    numbers the page's script needs. The sections are "" without a tokenizer and for fewer than two tokens."""
    nothing, c = dict.fromkeys(PARTS, ""), model.config
    if tokenizer is None:
        return nothing, []
    n_heads = max(attention.heads(c).n_heads for attention in each(c.attention))
    most = min(TOKENS, c.context_length, max(2, math.isqrt(CELLS // (c.n_layers * n_heads))))
    tokens = tokenizer.begin(tokenizer.encode(passage(tokenizer, text, most)))
    shown = tokens[:most]
    if len(shown) < 2:
        return nothing, []
    tokens = tokens[: most + 1]
    probabilities = [0.0, *np.exp(logprobs(model, np.array([tokens]))[0])]  # of each token, given the earlier tokens
    pieces = [tokenizer.piece(token) for token in tokens]
    articles = []
    for i, candidates in enumerate(next_tokens(model, shown)):
        before = "".join(pieces[max(0, i - 7) : i + 1])
        rows = [(tokenizer.piece(token), p, [token] == tokens[i + 1 : i + 2]) for token, p in candidates]
        if i + 1 < len(tokens) and not any(true for *_, true in rows):
            rows.append((pieces[i + 1], probabilities[i + 1], True))
        articles.append(next_article(before, rows))
    sinks = any(attend.sinks is not None for attend in attend_modules(model).values())
    reading = Reading(model, tokenizer, text, ids=shown[:LENS])
    pictures = [lens(reading)]
    if any(isinstance(at(c.mlp, layer), Experts) for layer in range(c.n_layers)):
        of_tokens = experts(replace(reading, ids=shown))
        every = math.ceil(len(of_tokens.panels) / EXPERT_LAYERS)
        pictures.append(replace(of_tokens, panels=of_tokens.panels[::every]))
    drawn = [(picture.svg(alone=False), visible(picture.caption)) for picture in pictures] + [("", "")]
    parts = {
        "attention": attention(model, shown, pieces),
        "legend": legend_of(WEIGHT),
        "sinks": " (to less here, where a sink takes the rest)" if sinks else "",
        "words": "".join(
            f'<button type="button" class="token" style="--p:{100 * p:.0f}%">{visible(piece, MARKS)}</button>'
            for piece, p in zip(pieces[:most], probabilities)
        ),
        "next": "".join(articles),
        "distributions": embedded(
            distributions(logits(model, shown), tokens[1:], tokenizer) | {"prompts": prompts(tokenizer, shown)}
        ),
        **losses(model, tokenizer, text),
        "lens": drawn[0][0],
        "lens_about": drawn[0][1],
        "experts": drawn[1][0],
        "experts_about": drawn[1][1],
    }
    return parts, pictures


def attention(model: Decoder, tokens: Sequence[int], pieces: Sequence[str]) -> str:
    """JSON from which a page draws the attention weights between tokens, and the layer, head and query that it shows
    first; "" if no layer has attention weights."""
    maps = pad_sequence(attention_maps(model, tokens), True)
    n_heads = maps.size(1)
    if not n_heads:
        return ""
    scores = head_scores([*maps]).cpu()
    layer, head = divmod(int(scores.mean(-1).argmax()), n_heads)
    return embedded(
        {
            "pieces": [readable(piece, MARKS) for piece in pieces[: len(tokens)]],
            "heads": n_heads,
            "layers": [packed(weights) for weights in maps],
            "open": [layer, head, int(scores[layer, head].argmax())],
        }
    )


def distributions(
    logits: Tensor, following: Sequence[int], tokenizer: Tokenizer, likeliest: int = LIKELIEST
) -> dict[str, Any]:
    """JSON from which a page samples at each position, from logits (T, V): log-probabilities of the likeliest tokens,
    log-sum-exp of the others at each temperature, and the index of the token that follows."""
    log_p = logits.float().log_softmax(-1)
    top = log_p.topk(min(likeliest, log_p.size(-1)))
    rest = log_p.scatter(-1, top.indices, -math.inf)
    others = torch.stack([(rest / temperature).logsumexp(-1) for temperature in TEMPERATURES], -1)
    pieces: dict[int, int] = {}  # token id -> its index in the list of pieces
    rows: list[dict[str, Any]] = []
    for i, (ids, values, log_rest) in enumerate(zip(top.indices.tolist(), top.values.tolist(), others.tolist())):
        after = following[i] if i < len(following) else None
        rows.append(
            {
                "pieces": [pieces.setdefault(token, len(pieces)) for token in ids],
                "logprobs": [round(value, 4) for value in values],
                "others": [round(value, 4) if math.isfinite(value) else None for value in log_rest],
                "following": ids.index(after) if after in ids else None,
            }
        )
    names = [readable(tokenizer.piece(token), MARKS) for token in pieces]
    return {"temperatures": TEMPERATURES, "pieces": names, "rows": rows}


def prompts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """For each token, the text up to it, without a beginning-of-text token."""
    first = int(tokens[:1] == [tokenizer.bos_id])
    return [tokenizer.decode(tokens[first : i + 1]) for i in range(len(tokens))]


def losses(model: Decoder, tokenizer: Tokenizer, text: str) -> dict[str, str]:
    """Tokens of a paragraph, shaded by their losses, and a sentence about them."""
    most = min(PARAGRAPH, model.config.context_length)
    tokens = tokenizer.begin(tokenizer.encode(passage(tokenizer, text, most)))[:most]
    nats = -logprobs(model, np.array([tokens]))[0]
    uniform = math.log(model.config.vocab_size)
    spans = [f'<span class="token">{visible(tokenizer.piece(tokens[0]), MARKS)}</span>']
    for token, loss in zip(tokens[1:], nats.tolist()):
        spans.append(
            f'<span class="token" style="--p:{min(100.0, 100 * loss / uniform):.0f}%" title="{loss:.2f} nats, '
            f'probability {math.exp(-loss):.2%}">{visible(tokenizer.piece(token), MARKS)}</span>'
        )
    hardest = visible(tokenizer.piece(tokens[1 + int(nats.argmax())]), MARKS)
    return {
        "losses": "".join(spans),
        "losses_about": f"The mean over these {len(nats)} tokens is {nats.mean():.3f} nats; the largest loss is "
        f"{nats.max():.2f}, of “<bdi>{hardest}</bdi>”. A uniform guess has {uniform:.2f}: "
        "losses from there on have the strongest shade.",
    }


def passage(tokenizer: Tokenizer, text: str, most: int) -> str:
    """The text if it has at most `most` tokens, else complete sentences of the first paragraph of which enough fit; if
    none fit, the text cut at white space."""
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
    """Index after each sentence. An abbreviation ends a sentence only at the end of the text; a full stop in
    parentheses never does."""
    for match in SENTENCE_END.finditer(text):
        end = match.end()
        abbreviated = end < len(text) and ABBREVIATION.search(text[max(0, match.start() - 6) : match.start()])
        inside = re.search(r"\([^()]*$", text[:end]) and re.match(r"[^()]*[()]", text[end:])
        if not abbreviated and not inside:
            yield end


def packed(weights: Tensor) -> str:
    """Weights (H, T, T) as base64 of one byte each, 255 for 1."""
    return base64.b64encode((weights.float() * 255).round().byte().cpu().numpy().tobytes()).decode()


def next_article(before: str, rows: Sequence[tuple[str, float, bool]]) -> str:
    """The tokens that may follow the text `before`, as HTML; `rows` are (token, probability, whether it is the actual
    next token)."""
    items = ""
    for piece, p, true in rows:
        share = f"{p:.1%}".replace("%", " %") if p >= 0.001 else f"1 in {1 / max(p, 1e-9):,.0f}"
        items += (
            f'<li{" class=true" if true else ""}><span class="token">{visible(piece, MARKS)}</span>'
            f'<span><i style="width:{p:.1%}"></i></span><span>{share}</span></li>'
        )
    return f"<article><h3>after “<bdi>{visible(before.strip())}</bdi>”</h3><ol>{items}</ol></article>"
