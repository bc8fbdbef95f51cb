"""The order of the pages, in the tabs Home, Learn, Use, Build and Look up."""

from collections.abc import Iterable, Mapping
from itertools import groupby

from docs.site.commands import heading, option_page, shared_groups
from onward.cli.overview import GROUPS
from onward.learn.chapters import chapters

LEARN = ("tutorial-mistakes", "examples")  # in addition to the chapters
USE = {
    "Begin": ("commands", "reports", "doctor"),
    "Data and training": ("data", "training", "scale", "finetuning"),
    "Use a model": ("generation", "evaluation", "serving", "deploying", "interchange"),
    "Look inside and plan": ("inside", "pictures", "planning"),
}
BUILD = {
    "The code": ("ARCHITECTURE", "CONTRIBUTING", "decisions"),
    "Models": ("families", "models-of-transformers"),
    "Measured": ("performance", "benchmarks", "robustness"),
    "Releases": ("CHANGELOG",),
}
ELSEWHERE = ("index", "public")


def navigation(names: Mapping[str, Iterable[str]], pages: Iterable[str]) -> list[dict[str, object]]:
    """Return the navigation. `names` maps each module to the pages of its public names. `pages` are the names of all
    guides; a guide that is in none of the lists above is added to the tab Use."""
    placed = {*LEARN, *ELSEWHERE, *(page for part in (USE, BUILD) for group in part.values() for page in group)}
    others = [f"{page}.md" for page in sorted({*pages} - placed)]
    grouped = lambda part: [{title: [f"{page}.md" for page in group]} for title, group in part.items()]
    return [
        {"Home": "index.md"},
        {
            "Learn": [
                {"The course": "learn/index.md"},
                *(
                    {part: [{f"{one.number}. {one.title}": f"learn/{one.path.name}"} for one in own]}
                    for part, own in groupby(chapters(), lambda one: one.part)
                ),
                {"Beside the course": [*(f"{page}.md" for page in LEARN), {"Glossary": "glossary.md"}]},
            ]
        },
        {"Use": [*grouped(USE), *([{"More": others}] if others else [])]},
        {"Build": grouped(BUILD)},
        {
            "Look up": [
                *({title.capitalize(): [f"commands/{name}.md" for name in group]} for title, group in GROUPS.items()),
                {"Options of several commands": [{heading(one)[0]: option_page(one)} for one in shared_groups()]},
                {"Python": [{"Public names": "public.md"}, *({module: [*own]} for module, own in names.items())]},
            ]
        },
    ]
