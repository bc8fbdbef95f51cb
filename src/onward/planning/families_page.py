"""Generates the tables of docs/families.md: `python -m onward.planning.families_page docs/families.md`."""

import re
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from onward.base.fields import text
from onward.families import presets
from onward.planning.releases import catalog, step

LADDER = ("gpt", "gpt2", "gpt3-175b", "palm-540b", "llama-7b", "mistral-7b", "gemma-7b")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def link(source: str) -> str:
    """A source of a family, "arXiv:NUMBER" or an address without https, as a link."""
    name = source.rpartition("/")[2].removesuffix(".pdf").replace("_", " ")
    return f"[{name}](https://{source.replace('arXiv:', 'arxiv.org/abs/')})"


def families() -> str:
    def code(names: Iterable[str]) -> str:
        return ", ".join(f"`{name}`" for name in names)

    rows = []
    for family in catalog():
        types, classes = code(family["architectures"]), code(dict.fromkeys(family["architectures"].values()))
        releases = ", ".join(preset["name"] for preset in family["presets"])
        sources = ", ".join(map(link, filter(None, family["source"].split(", "))))
        rows.append([code([f"{family['family']}.py"]), family["about"], sources, types, classes, releases])
    return table(["file", "what it is", "source", "model_type", "architecture in transformers", "releases"], rows)


def ladder() -> str:
    """Differences between consecutive designs of LADDER, as tables."""
    known = [name for name in LADDER if name in presets()]
    steps = [step(before, after) for before, after in pairwise(known)]
    return "\n\n".join(
        f"### {step['before']} → {step['after']}\n\n"
        + table(
            ["what", "before", "after", "meaning"],
            [[f"`{c['what']}`", text(c["before"]), text(c["after"]), c["meaning"]] for c in step["changes"]],
        )
        for step in steps
    )


def renewed(page: str) -> str:
    """The page with the text between `<!-- NAME -->` and `<!-- end -->` regenerated."""
    made = {"families": families(), "ladder": ladder()}
    within = re.compile(r"<!-- (\w+) -->\n.*?\n<!-- end -->", re.DOTALL)
    return within.sub(lambda match: f"<!-- {match[1]} -->\n\n{made[match[1]]}\n\n<!-- end -->", page)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")
