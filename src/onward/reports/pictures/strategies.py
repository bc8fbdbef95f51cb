"""Compares sampling strategies on one next-token distribution, as a table and as a picture.

Shapes: V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from onward.generation.distribution import next_token_distribution
from onward.generation.sampling import Sampling
from onward.reports.pictures.markup import MARKS, readable, visible
from onward.reports.pictures.picture import Panel, Picture, fitted

ROW, LEFT, BAR = 15, 58, 80  # pixels of a panel: height of a row, width of its label, width of the longest bar


@dataclass(frozen=True)
class Comparison:
    """The probabilities of the likeliest next tokens, unchanged and under each sampling strategy, such as top-p, as a
    table and as bars."""

    tokens: list[str]  # most probable first; the last is "others" if there are more tokens
    probabilities: dict[str, list[float]]  # for each strategy, the probability of each token

    def markdown(self) -> str:
        rows = [["", *self.probabilities], ["---", *["---:"] * len(self.probabilities)]]
        for i, token in enumerate(self.tokens):
            rows.append([token, *(share(each[i]) for each in self.probabilities.values())])
        return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)

    def panels(self) -> list[Panel]:
        """A panel for each strategy, whose bars are drawn over those of the unchanged distribution."""
        before, panels = next(iter(self.probabilities.values())), []
        for name, after in self.probabilities.items():
            texts, lines = [], []
            for row, (token, old, new) in enumerate(zip(self.tokens, before, after)):
                label, y = fitted(token, 8), 11 + ROW * row
                style = "in" if new else "soft"
                texts += [
                    f'<text class="{style}" x="{LEFT - 6}" y="{y}" text-anchor="end">{visible(label)}</text>',
                    f'<text class="soft" x="{LEFT + BAR * max(old, new) + 4:.1f}" y="{y}">{share(new)}</text>',
                ]
                bar = "█" * round(16 * new)
                lines.append(f"{label:>8} {bar + '░' * (round(16 * old) - len(bar)):16} {share(new)}")
            drawn = (
                f'<path class="before" d="{bars(before, ROW - 2)}"/><path class="after" d="{bars(after, ROW - 8)}"/>'
            )
            data = {"bars": dict(zip(self.tokens, after))}
            panels.append(Panel(name, LEFT + BAR + 34, ROW * len(self.tokens), drawn + "".join(texts), lines, data))
        return panels

    def svg(self) -> str:
        about = "Gray bars: the distribution of the model. Colored bars: the distribution after each strategy."
        return Picture("One distribution after each sampling strategy", about, self.panels()).svg()


def compare(logits: Tensor, name: Callable[[int], str], most: int = 8) -> Comparison:
    """Apply each sampling strategy, such as top-p, to the next-token distribution of logits (V,), and return the
    probabilities of the `most` most probable tokens.

    `name` is a function that returns the text of a token id. The second, the third and again the second most probable
    token count as already generated.
    """
    ids = logits.argsort(descending=True, stable=True)[:most].tolist()
    first, second, third, fourth = ids[:4]
    names = [readable(name(i), MARKS) for i in ids]
    generated = second, third, second
    strategies = {
        "as it is": Sampling(temperature=1),
        "temperature 0": Sampling(temperature=0),
        "temperature 0.5": Sampling(temperature=0.5),
        "temperature 2": Sampling(temperature=2),
        "top_k 3": Sampling(temperature=1, top_k=3),
        "top_p 0.9": Sampling(temperature=1, top_p=0.9),
        "min_p 0.2": Sampling(temperature=1, min_p=0.2),
        "typical_p 0.5": Sampling(temperature=1, typical_p=0.5),
        "repetition_penalty 1.5": Sampling(temperature=1, repetition_penalty=1.5),
        "frequency_penalty 1": Sampling(temperature=1, frequency_penalty=1),
        "presence_penalty 1": Sampling(temperature=1, presence_penalty=1),
        "no_repeat_ngram_size 2": Sampling(temperature=1, no_repeat_ngram_size=2),
        f"logit_bias {names[3]}: 2": Sampling(temperature=1, logit_bias={fourth: 2}),
        f"suppress_tokens {names[0]}": Sampling(temperature=1, suppress_tokens=(first,)),
        f"forced_tokens {names[2]}": Sampling(temperature=1, forced_tokens=(*generated, third)),
    }
    count = len(strategies)
    changed = next_token_distribution(
        logits.expand(count, -1), [*strategies.values()], [generated] * count, [0] * count
    ).cpu()
    probabilities = changed[:, ids].tolist()
    if len(ids) < len(logits):
        changed[:, ids] = 0
        rests = changed.sum(-1).tolist()
        probabilities = [[*of_tokens, rest] for of_tokens, rest in zip(probabilities, rests)]
        names.append("others")
    return Comparison(names, dict(zip(strategies, probabilities)))


def share(p: float) -> str:
    """Three decimals, such as .250; 0 is a dash."""
    return f"{p:.3f}".removeprefix("0") if p else "–"


def bars(probabilities: Sequence[float], height: int) -> str:
    """A horizontal bar for each probability, `height` pixels thick."""
    return "".join(
        f"M{LEFT} {ROW * row + (ROW - height) / 2:g}h{BAR * p:.1f}v{height}H{LEFT}z"
        for row, p in enumerate(probabilities)
        if p
    )
