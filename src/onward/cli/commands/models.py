"""onward models: published decoders and their differences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from shlex import quote
from shutil import get_terminal_size
from typing import Any, ClassVar

from onward.base.errors import UserError
from onward.cli.shared.options import parse
from onward.cli.shared.output import human, print_json, print_next, print_table
from onward.hub.cache import cached_models
from onward.hub.names import size_of

ABOUT = """\
List published decoders, describe one, or compare two; list the models downloaded from the hub.

examples:
  onward models                        all families and their releases
  onward models llama                  the releases with these letters in their names
  onward models llama-3.1-8b           one release, and the changes since its first ancestor
  onward models diff gpt2 llama-2-7b   the differences between two releases
  onward models diff llama-7b runs/mybook
  onward models diff smollm2-135m HuggingFaceTB/SmolLM2-135M      a name on the hub: only its config.json is fetched
  onward models cached                 downloaded models from the hub, with their sizes
"""
WIDE = 110  # minimum terminal width, in columns, for showing the meaning of each row


@dataclass(frozen=True)
class Options:
    """The options of `onward models`, which lists and describes published decoders."""

    positional: ClassVar[tuple[str, ...]] = ("names",)
    names: tuple[str, ...] = ()  # a release, or letters of its name; "diff" and two of these; "cached"; default: "list"
    json: bool = False  # print the result as JSON


def main(argv: Sequence[str]) -> None:
    options = parse(Options, argv, prog="onward models", about=ABOUT)
    from onward.families import presets
    from onward.planning.releases import catalog, step

    value: Any
    show: Callable[[Any], None]
    following: tuple[str, ...]
    match options.names:
        case () | ("list",):
            show, value = show_all, list(catalog())
            following = "llama-2-7b", "diff gpt2 llama-2-7b"
        case ("cached",):
            show, value = show_cached, cached()
            following = (quote(value[0]["name"]) if value else "llama-2-7b",)
        case ("diff", before, after):
            show, value = show_step, step(before, after)
            following = (quote(after),)
        case ("diff", *_):
            raise UserError("onward models diff takes two releases or folders: onward models diff gpt2 llama-2-7b")
        case (part,) if part not in presets() and (found := [*catalog(part)]):
            show, value = show_all, found
            following = tuple(release["name"] for family in found for release in family["presets"])[:2]
        case (name,):
            show, value = show_one, describe_release(name)
            following = (f"diff {'llama-7b' if name == 'gpt2' else 'gpt2'} {quote(name)}",)
        case _:
            raise UserError("onward models takes one release or folder: to compare two, write onward models diff A B")
    if options.json:
        print_json(value)
    else:
        show(value)
        print_next(*(f"onward models {words}" for words in following))


def describe_release(name: str) -> dict[str, Any]:
    """Describe a release as a JSON object: its parts, and the changes from each ancestor to the next."""
    from onward.base import fields
    from onward.planning.descriptions import describe, sentence
    from onward.planning.releases import find, steps

    family, config = find(name)
    facts = [{"what": fact.what, "value": fact.value, "meaning": fact.meaning} for fact in describe(config)]
    described = {"name": name, "family": sentence(family), "facts": facts}
    return described | {"decoder": fields.plain(config), "steps": steps(name)}


def cached() -> list[dict[str, Any]]:
    """Return a table row for each downloaded revision."""
    return [
        {
            "name": model.repo_id,
            "revision": ", ".join(sorted(revision.refs)) or revision.commit_hash,
            "files": len(revision.files),
            "bytes": revision.size_on_disk,
        }
        for model in cached_models()
        for revision in sorted(model.revisions, key=lambda revision: revision.commit_hash)
    ]


def show_cached(models: list[dict[str, Any]]) -> None:
    if models:
        print_table([{**model, "bytes": size_of(model["bytes"])} for model in models])
    else:
        print("no models")


def show_all(families: list[dict[str, Any]]) -> None:
    width = max(len(preset["name"]) for family in families for preset in family["presets"])
    for family in families:
        print(f"{family['family']}: {family['about']}")
        for preset in family["presets"]:
            size, context = human(preset["parameters"]), preset["context_length"]
            of = f"  from {preset['ancestor']}" if preset["ancestor"] else ""
            print(f"  {preset['name']:{width}} {size:>6} parameters {context:>10,} tokens of context{of}")


def show_one(release: dict[str, Any]) -> None:
    print(f"{release['name']}: {release['family']}")
    show_rows(release["facts"])
    for step in release["steps"]:
        print()
        show_step(step)


def show_step(step: dict[str, Any]) -> None:
    print(f"{step['before']} -> {step['after']}")
    show_rows(step["changes"], narrow=get_terminal_size().columns < WIDE)


def show_rows(rows: list[dict[str, Any]], narrow: bool = False) -> None:
    from onward.base.fields import text

    if rows:
        print_table([{k: text(v) for k, v in row.items() if not (narrow and k == "meaning")} for row in rows])
    else:
        print("nothing")
