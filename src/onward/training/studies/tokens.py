"""The tokens of a study: a folder for each combination of texts and tokenizer.

FOLDER/data-N/
  options.json       the options that determine the tokens
  inputs.json, ...   as in the folder of a run
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onward.base import fields
from onward.base.errors import UserError
from onward.base.files import read_json, write_json
from onward.data.prepare import with_content
from onward.data.progress import Progress, silent
from onward.data.sources import is_stream
from onward.data.tokens import is_prepared, load_tokens
from onward.training.config import RunConfig
from onward.training.inputs.record import changed_tokens
from onward.training.inputs.texts import HELD_OUT, prepare_inputs, share
from onward.training.studies.groups import ONE_GROUP, StudyGroup

# the options that choose texts
TEXTS = "sources", "weights", "field", "encoding", "raw", "repeated_lines", "validation"
OPTIONS = "options.json"


def other_texts(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return an option in which two configurations differ, so that their losses are on different texts; "" if their
    losses can be compared."""
    differ = [name for name in TEXTS if one[name] != other[name]]
    return differ[0] if "validation" in differ or (differ and share(one["validation"])) else ""


def tokens_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run, `options`, that determine its tokens; without a tokenizer, `base` provides it."""
    return {name: options[name] for name in TEXTS} | {"tokenizer": options["tokenizer"] or options["base"]}


def study_tokens(config: RunConfig, progress: Progress = silent, group: StudyGroup = ONE_GROUP) -> Path:
    """Return the folder of the tokens of `config` in the folder of a study, `config.out`; the first process prepares
    the tokens if there are none. Raises a UserError if the texts have changed since; streams are not compared."""
    folder, options, number = Path(config.out), fields.plain(config), 1
    asked = tokens_options(options)
    while (tokens := folder / f"data-{number}").exists() and known_options(tokens, options) != asked:
        number += 1
    if (tokens / "inputs.json").exists():
        if changed := [*changed_tokens(tokens), *changed_sources(config, tokens)]:
            raise UserError(
                f"{' and '.join(changed)} changed since {folder} was begun, and its runs must have the same texts: "
                "restore them, or choose another --out"
            )
    elif not group.first:
        raise UserError(f"{tokens} is not on the disk of all processes: choose --out on a shared disk")
    else:
        write_json(tokens / OPTIONS, asked)
        prepare_inputs(config, tokens, progress)
    return tokens


def known_options(tokens: Path, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the options that determine the tokens in a folder; None if it contains no tokens yet. Earlier versions
    recorded no options: if the variants agree, record theirs, with `options` as defaults for new fields."""
    if (tokens / OPTIONS).exists():
        return read_json(tokens / OPTIONS)
    if not (tokens / "inputs.json").exists():
        return None
    record = tokens.parent / "variants.json"
    variants = read_json(record).values() if record.exists() else ()
    known = [tokens_options({**options, **one}) for one in variants]
    if not known or any(one != known[0] for one in known):
        raise UserError(
            f"Cannot tell the tokenizer of the tokens in {tokens}, which an earlier version of Onward prepared: choose "
            "another --out"
        )
    write_json(tokens / OPTIONS, known[0])
    return known[0]


def changed_sources(config: RunConfig, tokens: Path) -> list[str]:
    """List the texts of `config` whose content has changed since the tokens in a folder were prepared from them."""
    named = [] if config.validation == "none" or share(config.validation) else [config.validation]
    texts = [text for text in (*config.sources, *named) if not (is_stream(text) or is_prepared(text))]
    settings: dict[str, Any] = {}
    for folder in filter(is_prepared, (tokens / "data", tokens / HELD_OUT)):
        settings |= load_tokens(folder).index.settings
    return [f"the {name} or its time" for name, value in with_content({}, texts).items() if settings.get(name) != value]
