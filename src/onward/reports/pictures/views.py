"""What `onward inspect` draws of a model that reads a text: attention, next tokens, lens, roles of heads and the like.

Shapes: L layers, H heads, T tokens, X experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from onward.config.decoder import at
from onward.errors import UserError
from onward.fields import counted
from onward.generation.sampling import Sampling
from onward.inspection.attention import attention_maps, head_scores
from onward.inspection.heads import MIN_SCORE, head_roles
from onward.inspection.inputs import as_row, check_index, check_layer, logits
from onward.inspection.lens import TunedLens, logit_lens
from onward.inspection.patching import activation_patching, logit_difference
from onward.inspection.tokens import STEPS, loss_by_position, sampling_steps, token_statistics
from onward.model.decoder import Decoder, without_dropout
from onward.reports.pictures.markup import MARKS, readable
from onward.reports.pictures.panels import bars, cells, curves, text_width, unique, words
from onward.reports.pictures.picture import Panel, Picture, fitted
from onward.reports.pictures.scale import Scale
from onward.text.tokenizer import Tokenizer
from onward.tracing.names import activation_names
from onward.tracing.sites import attend_modules
from onward.tracing.trace import trace

WEIGHT = Scale(1, root=True, unit="attention weight")
CHANCE = Scale(1, unit="probability")
SCORE = Scale(1, unit="score", faint=True)
LENS_TEXT, LENS_WIDTH = 8, 800.0  # characters of a token in the lens, pixels of a row of it
UNCHANGED = Sampling(temperature=1.0)
UNITS = 16  # units that are shown
ENDING = 5  # tokens of a text that a title quotes
SHOWN_ROLES = "previous", "induction", "duplicate", "first"


@dataclass(frozen=True)
class Reading:
    """A model, a text, and what the views need to know beside."""

    model: Decoder
    tokenizer: Tokenizer
    text: str
    layer: int | None = None  # of attention and neurons; None: the one with the most to see
    head: int | None = None  # attention: the only one to draw; None: all
    corrupted: str = ""  # patch: the other text, of as many tokens
    right: str = ""  # patch: the next token after the text; "": the likeliest
    wrong: str = ""  # patch: that after the corrupted text; "": the likeliest
    sampling: Sampling = field(default_factory=Sampling)  # next: its steps
    ids: Sequence[int] = ()  # the tokens in place of those of the text
    tuned: TunedLens | None = None  # lens: what translates the residual streams first

    def encode(self, text: str) -> list[int]:
        """The tokens of a text as the model reads it."""
        return self.tokenizer.begin(self.tokenizer.encode(text))

    @cached_property
    def tokens(self) -> list[int]:
        """The tokens of the text; a UserError for none, and for more than the context."""
        tokens = list(self.ids) or self.encode(self.text)
        as_row(self.model, tokens)
        return tokens

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """The texts of tokens, with white space made visible."""
        return [readable(self.tokenizer.piece(token), MARKS) for token in tokens]

    def next_token(self, given: str, tokens: Sequence[int]) -> int:
        """The id of a token that is given as text, or the likeliest token after `tokens`."""
        if not given:
            return int(logits(self.model, tokens)[-1].argmax())
        ids = self.tokenizer.encode(given)
        if len(ids) != 1:
            raise UserError(f"{given!r} is {len(ids)} tokens: give a text of one token")
        return ids[0]


def attention(reading: Reading) -> Picture:
    """The attention maps of all heads of a layer."""
    maps = attention_maps(reading.model, reading.tokens)
    if reading.layer is None:
        layer = int(head_scores(maps).mean((1, 2)).argmax())
    else:
        layer = check_layer(reading.layer, reading.model)
    weights = maps[layer].float().cpu().numpy()
    heads, count = weights.shape[:2]
    shown = range(heads) if reading.head is None else [check_index(reading.head, heads, "head")]
    hidden = np.triu(np.ones((count, count), bool), 1)
    pieces = reading.pieces(reading.tokens)
    room = 170.0 if count <= 12 else 210.0 if count <= 32 else 370.0  # four, three or two heads in a row
    return Picture(
        f"Attention of layer {layer}",
        "Each row is a token that looks, each column a token that it looks at; the stronger a cell, the larger the "
        "attention weight, whose square root is the strength of the color. The weights of a row sum to 1"
        + " together with that of the head's sink, which is not drawn"
        * (attend_modules(reading.model)[layer].sinks is not None)
        + ". A token sees no later one, so that the upper triangle is empty.",
        [
            cells(
                f"head {head}",
                np.where(hidden, np.nan, weights[head]),
                pieces,
                pieces,
                scale=WEIGHT,
                room=room,
                reading="{row} looks at {column} with {value}",
            )
            for head in shown
        ],
    )


def next_token(reading: Reading) -> Picture:
    """The likeliest next tokens, and the effect of each step of sampling."""
    found = sampling_steps(reading.model, reading.tokens, reading.sampling)
    names = [f"{piece}" for piece in reading.pieces(found.candidates)]
    rest = reading.model.config.vocab_size > len(names)
    panels = []
    for step, row, others, kept in zip(
        found.steps, found.probabilities.tolist(), found.rest.tolist(), found.kept.tolist()
    ):
        values = unique(names, row) | ({"all others": others} if rest else {})
        title = "the model" if step == "model" else f"{applied(reading.sampling, step)}: {counted(kept, 'token')}"
        panels.append(bars(title, values, unit="%", top=1.0))
    cut = "…" * (len(reading.tokens) > ENDING)
    return Picture(
        f"The token after “{cut}{''.join(reading.pieces(reading.tokens[-ENDING:]))}”",
        "The likeliest next tokens with their probabilities"
        + ", and what each step of sampling, with its value, makes of them, in the order in which generate applies "
        "them, with the number of tokens that it leaves" * (len(panels) > 1) + ".",
        panels,
    )


def applied(sampling: Sampling, step: str) -> str:
    """The options of a step of sampling that change anything, with the values of those that are numbers."""
    values = {name: getattr(sampling, name) for name in STEPS[step]}
    changed = {name: value for name, value in values.items() if value != getattr(UNCHANGED, name)}
    return ", ".join(f"{name} {v:g}" if isinstance(v, int | float) else name for name, v in changed.items())


def lens(reading: Reading) -> Picture:
    """The next token that each layer would predict at each position."""
    found = logit_lens(reading.model, reading.tokens, top=1, tuned=reading.tuned)
    order = range(len(found.names) - 1, -1, -1)
    names = [f"block {layer - 1}" if layer else "embedding" for layer in order]
    pieces, probabilities = reading.pieces(reading.tokens), found.probabilities[..., 0].numpy()
    texts = [reading.pieces(found.ids[layer, :, 0].tolist()) for layer in order]
    width = text_width([[fitted(text, LENS_TEXT) for text in row] for row in texts])
    columns, panels = int(LENS_WIDTH / width), []
    for start in range(0, len(pieces), columns):
        part = slice(start, start + columns)
        panels.append(
            cells(
                f"tokens {start} to {min(start + columns, len(pieces)) - 1}" if len(pieces) > columns else "",
                probabilities[::-1, part],
                names,
                pieces[part],
                texts=[row[part] for row in texts],
                longest=LENS_TEXT,
                scale=CHANCE,
                reading="after {column}, {row} says {text} with {value}",
            )
        )
    translated = "" if reading.tuned is None else " translated by a trained map (Belrose et al. 2023),"
    return Picture(
        "Logit lens" if reading.tuned is None else "Tuned lens",
        f"The residual stream before the first block (embedding) and after each block,{translated} read by the model's "
        "own final norm and head as if the model ended there: the likeliest next token, shaded by its probability. "
        "Read from bottom to top: the top row is the prediction of the model. The columns are the tokens of the text; "
        "a cell is about the token after its column.",
        panels,
    )


def heads(reading: Reading) -> Picture:
    """The role of each head, and the scores of four of them."""
    found = head_roles(reading.model, reading.tokens if reading.text else None)
    roles = found.map()
    best = torch.stack([*found.scores.values()]).amax(0).clamp(min=0).numpy()
    layers, count = best.shape
    rows, columns = [f"layer {i}" for i in range(layers)], [f"{h}" for h in range(count)]
    short = 9 if count <= 12 else 4
    panels = [
        cells(
            "the role of each head",
            best,
            rows,
            columns,
            texts=[[role[:short] for role in line] for line in roles],
            scale=SCORE,
            reading="{row}, head {column}: {text} {value}",
        )
    ]
    for role in SHOWN_ROLES:
        scores = found.scores[role].clamp(min=0).numpy()
        panels.append(
            cells(
                role,
                scores,
                rows,
                columns,
                scale=SCORE,
                room=240,
                reading="{row}, head {column}: {value}",
            )
        )
    return Picture(
        "Roles of heads",
        "On random tokens repeated once: a previous-token head looks at the token before, an induction head at the "
        "token that followed the same token the first time, a duplicate-token head at that same token, a first-token "
        "head at the beginning, where a head looks that has nothing to do. Scores are mean attention weights. The "
        f"first panel names the role with the greatest score, from {MIN_SCORE} on, and is shaded by it. More roles: "
        "self is the token itself, back 2 and back 3 are two and three tokens before"
        + (", and rare the rare tokens of the text, above what uniform attention would give them" * bool(reading.text))
        + ".",
        panels,
    )


def tokens(reading: Reading) -> Picture:
    """The loss, rank and entropy of each token of a text."""
    found = token_statistics(reading.model, reading.tokens)
    losses, pieces = -found.logprobs, reading.pieces(reading.tokens)
    notes = ["the first token is given"]
    for loss, rank, entropy in zip(losses[1:].tolist(), found.ranks[1:].tolist(), found.entropies[1:].tolist()):
        notes.append(f"loss {loss:.2f}, rank {rank:,}, entropy {entropy:.2f}")
    uniform = float(np.log(reading.model.config.vocab_size))
    ranks = ["", *(f"{rank:,}" for rank in found.ranks[1:].tolist())]
    scale = Scale(uniform, unit="nats of loss")
    panels = [words("each token by its loss, over its rank", pieces, losses.numpy(), notes, scale, below=ranks)]
    if len(pieces) > 2:
        series = {"loss": losses[1:].tolist(), "entropy": found.entropies[1:].tolist()}
        panels.append(curves("nats", range(1, len(pieces)), series, x_name="position", size=(760, 220)))
    caption = (
        "The loss of a token is the negative logarithm of the probability that the model gave it: faint tokens were "
        "expected, strong ones a surprise. The first token is given and has no loss. The number under a token is its "
        "rank, 1 where it was the likeliest token. "
    )
    if len(pieces) > 2:
        caption += "The curves are the loss, and the entropy: how uncertain the model was before the token. "
    if len(pieces) > 1:
        caption += f"The mean loss is {float(losses[1:].mean()):.3f} nats, that of a uniform guess {uniform:.2f}."
    return Picture("What the model thinks of each token", caption.strip(), panels)


def patch(reading: Reading) -> Picture:
    """Which activations of the text, put into the run of the corrupted text, restore its answer."""
    if not reading.corrupted:
        raise UserError('patch compares two texts: give the other one with --corrupted "..."')
    clean, corrupted = reading.tokens, reading.encode(reading.corrupted)
    right, wrong = reading.next_token(reading.right, clean), reading.next_token(reading.wrong, corrupted)
    if right == wrong:
        raise UserError("both texts are continued by the same token: choose other texts, or give --right and --wrong")
    metric = logit_difference(right, wrong)
    streams = activation_patching(reading.model, clean, corrupted, metric, "in").effects.numpy()
    of_heads = activation_patching(reading.model, clean, corrupted, metric, "attn.heads").effects.numpy()
    pieces = [
        one if one == other else f"{one}/{other}"
        for one, other in zip(reading.pieces(clean), reading.pieces(corrupted), strict=True)
    ]
    layers = [f"layer {i}" for i in range(len(streams))]
    scale = Scale(1, signed=True, unit="0: nothing changes; 1: the answer of the text is restored")
    answers = reading.pieces([right, wrong])
    return Picture(
        "Activation patching",
        f"The model reads the corrupted text, with one activation taken from its run of the other text. Where this "
        f"restores the difference of the logits of “{answers[0]}” and “{answers[1]}”, the activation carries what "
        "distinguishes the texts.",
        [
            cells(
                "residual stream before each block",
                streams,
                layers,
                pieces,
                scale=scale,
                room=600,
                reading="{row} at {column}: {value}",
            ),
            cells(
                "each head's output",
                of_heads,
                layers,
                [str(h) for h in range(of_heads.shape[1])],
                scale=scale,
                room=260,
                reading="{row}, head {column}: {value}",
            ),
        ],
    )


def positions(reading: Reading) -> Picture:
    """The loss by position, beyond the trained length where the positions allow it."""
    model, c = reading.model, reading.model.config
    found, most = reading.encode(reading.text), 2 * c.context_length
    length = min(len(found) - 1, most, c.context_length if at(c.position, 0).limit(c) <= c.context_length else most)
    if length < 2:
        raise UserError("the loss by position needs a text of three tokens at least")
    count = (len(found) - 1) // length
    windows = torch.tensor(found[: count * length + 1]).unfold(0, length + 1, length)
    loss = loss_by_position(model, windows.split(16))
    group = max(1, length // 64)
    means = loss.loss[: length // group * group].view(-1, group).mean(1).tolist()
    marks = {"context length": c.context_length} if length > c.context_length else {}
    trained = loss.loss[: c.context_length]
    halves = trained[: len(trained) // 2].mean(), trained[len(trained) // 2 :].mean()
    measured = "{:.2f} nats over the first half of the positions{}, {:.2f} over the second".format(
        halves[0], " within the context length" * bool(marks), halves[1]
    )
    if marks:
        measured += f", and {loss.loss[c.context_length :].mean():.2f} beyond it, where no window of training reached"
    return Picture(
        "Loss by position",
        f"The mean loss at each position of {counted(count, 'window')} of {length:,} tokens"
        + (f", each point over {group} positions" if group > 1 else "")
        + f": {measured}. Later tokens have more text before them, which usually helps; few windows give a rough "
        "curve.",
        [
            curves(
                "nats per token",
                range(1, length // group * group + 1, group),
                {"loss": means},
                x_name="position",
                marks=marks,
            )
        ],
    )


def neurons(reading: Reading) -> Picture:
    """The most active units of a feed-forward, token by token."""
    model = reading.model
    layer = check_layer(model.config.n_layers // 2 if reading.layer is None else reading.layer, model)
    name = f"blocks.{layer}.mlp.post"
    known = activation_names(model)
    if name not in known or f"blocks.{layer}.mlp.shares" in known:
        raise UserError(f"layer {layer} has no plain feed-forward: choose another --layer, or the view experts")
    with torch.no_grad(), without_dropout(model), trace(model, name) as t:
        model.hidden(as_row(model, reading.tokens))
    units = t[name][0].float().cpu()
    strongest = units[1:].abs().amax(0) if len(units) > 1 else units.abs().amax(0)
    chosen = strongest.argsort(descending=True)[:UNITS].tolist()
    active = (units > 0).float()
    return Picture(
        f"Units of the feed-forward of layer {layer}",
        f"The {len(chosen)} units of {units.size(1):,} that are strongest at some token"
        + " after the first" * (len(units) > 1)
        + f", as the second matrix reads them. On average {active.mean():.0%} of all units are above 0 at a token, and "
        f"{int((active.sum(0) == 0).sum()):,} are so at none.".replace("%", " %"),
        [
            cells(
                "",
                units[:, chosen].T.numpy(),
                [f"unit {i}" for i in chosen],
                reading.pieces(reading.tokens),
                scale=Scale(float(units[:, chosen].abs().max()), signed=True, unit="activation"),
                room=760,
                reading="{row} at {column}: {value}",
            )
        ],
    )


def experts(reading: Reading) -> Picture:
    """The experts of each token, layer by layer."""
    model = reading.model
    names = [name for name in activation_names(model) if name.endswith("mlp.shares")]
    if not names:
        raise UserError("this model has no experts: choose another view")
    with torch.no_grad(), without_dropout(model), trace(model, *names) as t:
        model.hidden(as_row(model, reading.tokens))
    return Picture(
        "The experts of each token",
        "A router sends each token to a few of the feed-forwards of a layer, the experts. A row is an expert, a "
        "column a token, and a cell the factor of the expert's output in what the feed-forward adds to the token.",
        [expert_panel(name, t[name][0].float().cpu().T.numpy(), reading.pieces(reading.tokens)) for name in names],
    )


def expert_panel(name: str, shares: np.ndarray, pieces: Sequence[str]) -> Panel:
    """The shares (X, T) of the experts of one layer."""
    return cells(
        f"layer {name.split('.')[1]}",
        shares,
        [f"expert {i}" for i in range(len(shares))],
        pieces,
        scale=Scale(1, unit="factor of an expert's output"),
        room=760,
        reading="{column} uses {row} with {value}",
    )


VIEWS: dict[str, Callable[[Reading], Picture]] = {
    "attention": attention,
    "next": next_token,
    "lens": lens,
    "heads": heads,
    "tokens": tokens,
    "patch": patch,
    "positions": positions,
    "neurons": neurons,
    "experts": experts,
}
