"""What each way of choosing tokens makes of one distribution, as a table and as a picture.

Shapes: V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from onward.generation.distribution import next_token_distribution
from onward.generation.sampling import Sampling
from onward.reports.markup import MARKS, readable, visible
from onward.reports.plot import COLORS

STYLE = """
svg { font: 11px system-ui, sans-serif; fill: var(--ink); font-variant-numeric: tabular-nums }
.paper { fill: var(--paper) } .before { fill: var(--line) } .after { fill: var(--accent) }
.name { font-weight: 600 } .share, .out { fill: var(--soft) }
"""
WIDTH, COLUMNS, ROW, LEFT, BAR = 860, 5, 15, 50, 80  # of the picture, in it; of a panel: row height, labels, bars


@dataclass(frozen=True)
class Comparison:
    """One distribution as it is and as each strategy makes it."""

    tokens: list[str]  # the likeliest first; the last stands for all others, where there are more
    shares: dict[str, list[float]]  # strategy -> the probability of each of them

    def markdown(self) -> str:
        """A table with a row per token and a column per strategy."""
        rows = [["", *self.shares], ["---", *["---:"] * len(self.shares)]]
        for i, token in enumerate(self.tokens):
            rows.append([token, *(share(each[i]) for each in self.shares.values())])
        return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)

    def svg(self) -> str:
        """A picture with a panel per strategy: its bars upon those of the distribution as it is."""
        height, before = 34 + ROW * len(self.tokens), next(iter(self.shares.values()))
        panels = []
        for i, (name, after) in enumerate(self.shares.items()):
            place = 12 + i % COLUMNS * (WIDTH - 12) // COLUMNS, 8 + i // COLUMNS * height
            texts = [f'<text class="name" y="14">{visible(name)}</text>']
            for row, (token, old, new) in enumerate(zip(self.tokens, before, after)):
                label = visible(token if len(token) < 9 else f"{token[:7]}…")
                kind, y = "in" if new else "out", 31 + ROW * row
                texts += [
                    f'<text class="{kind}" x="{LEFT - 6}" y="{y}" text-anchor="end">{label}</text>',
                    f'<text class="share" x="{LEFT + BAR * max(old, new) + 4:.1f}" y="{y}">{share(new)}</text>',
                ]
            panels.append(
                f'<g transform="translate{place}"><path class="before" d="{bars(before, ROW - 2)}"/>'
                f'<path class="after" d="{bars(after, ROW - 8)}"/>{"".join(texts)}</g>'
            )
        total = 8 + -(-len(self.shares) // COLUMNS) * height
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total}" role="img" '
            f'aria-label="What each strategy makes of one distribution"><style>{COLORS}{STYLE}</style>'
            f'<rect class="paper" width="{WIDTH}" height="{total}" rx="8"/>\n' + "\n".join(panels) + "\n</svg>\n"
        )


def compare(logits: Tensor, name: Callable[[int], str], most: int = 8) -> Comparison:
    """What strategies make of the distribution of these logits (V,), for the `most` likeliest tokens.

    `name` gives a token's text. For penalties, the second likeliest token, the third and again the second are taken to
    have been generated before.
    """
    ids = logits.argsort(descending=True, stable=True)[:most].tolist()
    first, second, third, fourth = ids[:4]
    names = [readable(name(i), MARKS) for i in ids]
    generated = second, third, second
    ways = {
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
    count = len(ways)
    found = next_token_distribution(logits.expand(count, -1), [*ways.values()], [generated] * count, [0] * count).cpu()
    shares = found[:, ids].tolist()
    if len(ids) < len(logits):
        found[:, ids] = 0
        shares = [[*of, rest] for of, rest in zip(shares, found.sum(-1).tolist())]
        names.append("others")
    return Comparison(names, dict(zip(ways, shares)))


def share(p: float) -> str:
    """A probability in three digits, or a dash for none."""
    return f"{p:.3f}".removeprefix("0") if p else "–"


def bars(shares: Sequence[float], height: int) -> str:
    """The path of a bar per share."""
    return "".join(
        f"M{LEFT} {20 + ROW * row + (ROW - height) / 2:g}h{BAR * p:.1f}v{height}H{LEFT}z"
        for row, p in enumerate(shares)
        if p
    )
