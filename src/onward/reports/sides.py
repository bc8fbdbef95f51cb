"""A page with the answers of two models side by side, for a person who judges them without knowing which model wrote
which answer."""

import random
from collections.abc import Sequence

from onward.evaluation.preferences import Pair
from onward.reports.pictures.markup import embedded, resource, visible


def sides_page(names: Sequence[str], pairs: Sequence[Pair], verdicts: Sequence[float] = ()) -> str:
    """A self-contained HTML file. Sides are drawn from a fixed seed; the browser stores the choices. With the
    `verdicts` of a judge (1: the second model is better), the page shows them after each choice."""
    rng = random.Random(0)
    rows = [
        {
            "prompt": pair.prompt,
            "answers": [pair.first, pair.second],
            "swapped": rng.random() < 0.5,
            "verdict": verdicts[i] if verdicts else None,
        }
        for i, pair in enumerate(pairs)
    ]
    data = {"models": [*names], "rows": rows}
    page = resource("sides.html")
    title = f"{names[0]} and {names[1]}, side by side"
    return page.replace("{{title}}", visible(title)).replace("{{data}}", embedded(data))
