"""Pictures of a text as a model reads it: next tokens, logit lens, losses, activation patching."""

from collections.abc import Callable

import numpy as np

from onward.base.errors import UserError
from onward.base.fields import counted
from onward.generation.sampling import Sampling
from onward.inspection.lens import TunedLens, logit_lens
from onward.inspection.patching import activation_patching, logit_difference
from onward.inspection.tokens import STEPS, sampling_steps, text_loss_by_position, token_statistics
from onward.reports.pictures.layer_views import attention, attention_arrows, experts, heads, neurons
from onward.reports.pictures.panels import bars, cells, curves, text_width, unique, words
from onward.reports.pictures.picture import Picture, fitted
from onward.reports.pictures.reading import Reading
from onward.reports.pictures.scale import ColorScale

CHANCE = ColorScale(1, unit="probability")
LENS_TEXT, LENS_WIDTH = 8, 800.0  # in the lens: characters of a token, pixels of a row
USUAL, UNCHANGED = Sampling(), Sampling(temperature=1.0)
ENDING = 5  # number of last tokens of a text that a title quotes


def next_token(reading: Reading, *, sampling: Sampling = USUAL) -> Picture:
    """Draw the model's likeliest next tokens after the text of `reading`, and the effect of each sampling step, such as
    top-p, on their probabilities."""
    effects = sampling_steps(reading.model, reading.tokens, sampling)
    names = [f"{piece}" for piece in reading.pieces(effects.candidates)]
    rest = reading.model.config.vocab_size > len(names)
    panels = []
    for step, row, others, kept in zip(
        effects.steps, effects.probabilities.tolist(), effects.rest.tolist(), effects.kept.tolist()
    ):
        values = unique(names, row) | ({"all others": others} if rest else {})
        title = "the model" if step == "model" else f"{applied(sampling, step)}: {counted(kept, 'token')}"
        panels.append(bars(title, values, unit="%", top=1.0))
    cut = "…" * (len(reading.tokens) > ENDING)
    return Picture(
        f"The token after “{cut}{''.join(reading.pieces(reading.tokens[-ENDING:]))}”",
        "The likeliest next tokens with their probabilities"
        + ". Further panels: the probabilities after each step of sampling, in the order in which generate applies the "
        "steps, with the value of each step and the number of tokens left" * (len(panels) > 1) + ".",
        panels,
    )


def applied(sampling: Sampling, step: str) -> str:
    """The options of a sampling step that have an effect, as text, with their values if these are numbers."""
    values = {name: getattr(sampling, name) for name in STEPS[step]}
    changed = {name: value for name, value in values.items() if value != getattr(UNCHANGED, name)}
    return ", ".join(f"{name} {v:g}" if isinstance(v, int | float) else name for name, v in changed.items())


def lens(reading: Reading, *, tuned: TunedLens | None = None) -> Picture:
    """Draw the next token that each layer predicts at each position of the text of `reading` (logit lens). `tuned`, if
    given, first translates the residual streams into those of the last layer (tuned lens)."""
    predictions = logit_lens(reading.model, reading.tokens, top=1, tuned=tuned)
    order = range(len(predictions.names) - 1, -1, -1)
    names = [f"block {layer - 1}" if layer else "embedding" for layer in order]
    pieces, probabilities = reading.pieces(reading.tokens), predictions.probabilities[..., 0].numpy()
    texts = [reading.pieces(predictions.ids[layer, :, 0].tolist()) for layer in order]
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
                reading="after {column}, {row} predicts {text} with {value}",
            )
        )
    translated = "" if tuned is None else " translated by a trained map (Belrose et al. 2023),"
    return Picture(
        "Logit lens" if tuned is None else "Tuned lens",
        f"The residual stream before the first block (embedding) and after each block,{translated} read by the model's "
        "own final norm and head as if the model ended there: the likeliest next token, shaded by its probability. "
        "Read from bottom to top: the top row is the prediction of the model. The columns are the tokens of the text; "
        "a cell predicts the token after its column.",
        panels,
    )


def tokens(reading: Reading) -> Picture:
    """Draw the loss, rank and entropy of each token of the text of `reading`."""
    statistics = token_statistics(reading.model, reading.tokens)
    losses, pieces = -statistics.logprobs, reading.pieces(reading.tokens)
    notes = ["the first token is given"]
    for loss, rank, entropy in zip(
        losses[1:].tolist(), statistics.ranks[1:].tolist(), statistics.entropies[1:].tolist()
    ):
        notes.append(f"loss {loss:.2f}, rank {rank:,}, entropy {entropy:.2f}")
    uniform = float(np.log(reading.model.config.vocab_size))
    ranks = ["", *(f"{rank:,}" for rank in statistics.ranks[1:].tolist())]
    scale = ColorScale(uniform, unit="nats of loss")
    panels = [words("each token by its loss, over its rank", pieces, losses.numpy(), notes, scale, below=ranks)]
    if len(pieces) > 2:
        series = {"loss": losses[1:].tolist(), "entropy": statistics.entropies[1:].tolist()}
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
    return Picture("The loss of each token", caption.strip(), panels)


def patch(reading: Reading, *, corrupted: str = "", right: str = "", wrong: str = "") -> Picture:
    """Draw activation patching: the model reads the text `corrupted`, one activation at a time is replaced by that of
    the original text in `reading`, and the picture shows how far this restores the original prediction.

    Both texts must have the same number of tokens. `right` is the next token after the original text, `wrong` the next
    token after the corrupted text; "" is the likeliest one. Raises a UserError without a corrupted text, and if both
    texts have the same next token.
    """
    if not corrupted:
        raise UserError('Cannot draw patch for one text: give a second text with --corrupted "..."')
    clean, other = reading.tokens, reading.encode(corrupted)
    answer, other_answer = reading.next_token(right, clean), reading.next_token(wrong, other)
    if answer == other_answer:
        raise UserError(
            "Cannot patch texts with the same next token: choose other texts, or give different tokens with "
            "--right and --wrong"
        )
    metric = logit_difference(answer, other_answer)
    streams = activation_patching(reading.model, clean, other, metric, "in").effects.numpy()
    of_heads = activation_patching(reading.model, clean, other, metric, "attn.heads").effects.numpy()
    pieces = [
        piece if piece == changed else f"{piece}/{changed}"
        for piece, changed in zip(reading.pieces(clean), reading.pieces(other), strict=True)
    ]
    layers = [f"layer {i}" for i in range(len(streams))]
    scale = ColorScale(1, signed=True, unit="0: nothing changes; 1: the answer of the text is restored")
    answers = reading.pieces([answer, other_answer])
    return Picture(
        "Activation patching",
        f"The model reads the corrupted text, with one activation replaced by that of the other text. Where this "
        f"restores the difference of the logits of “{answers[0]}” and “{answers[1]}”, the activation carries the "
        "difference between the texts.",
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
    """Draw the mean loss at each position of the text of `reading`, also beyond the context length if the position
    encoding allows it."""
    model, c = reading.model, reading.model.config
    loss = text_loss_by_position(model, reading.encode(reading.text))
    length = len(loss.loss)
    group = max(1, length // 64)
    means = loss.loss[: length // group * group].view(-1, group).mean(1).tolist()
    marks = {"context length": c.context_length} if length > c.context_length else {}
    trained = loss.loss[: c.context_length]
    halves = trained[: len(trained) // 2].mean(), trained[len(trained) // 2 :].mean()
    measured = "{:.2f} nats over the first half of the positions{}, {:.2f} over the second".format(
        halves[0], " within the context length" * bool(marks), halves[1]
    )
    if marks:
        measured += f", and {loss.loss[c.context_length :].mean():.2f} beyond it, farther than any training window"
    return Picture(
        "Loss by position",
        f"The mean loss at each position of {counted(loss.windows, 'window')} of {length:,} tokens"
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


VIEWS: dict[str, Callable[..., Picture]] = {  # functions of a Reading, with options as keyword arguments
    "attention": attention,
    "arrows": attention_arrows,
    "next": next_token,
    "lens": lens,
    "heads": heads,
    "tokens": tokens,
    "patch": patch,
    "positions": positions,
    "neurons": neurons,
    "experts": experts,
}
