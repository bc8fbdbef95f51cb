"""Check fields of rows and messages that are not read: fields with text raise an error, unless they are harmless."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from onward.base.arguments import shown
from onward.base.errors import UserError

# Last words of field names, such as id in source_id, whose texts describe a row and are not training text.
NAMES = (
    "annotator at author authors avatar categories category checksum class client config conversion count country",
    "created creator dataset date datetime day difficulty digest domain domains email engine file filename filepath",
    "files fingerprint flags format from generator group hash header headers id identifier ids idx index ip key",
    "keys kind lang language languages length level license lineage link links locale location md5 meta metadata",
    "method mode model models moderation month name names number origin owner page path platform priority",
    "provenance provider quality rank rating ratings redacted region release repo repository revision role roles",
    "score scores seed session sha sha1 sha256 site size skill skills source sources split stage state status style",
    "subcategory subject subset subtask subtopic tag tags task tasks time timestamp timestamps timezone title",
    "tokenizer topic topics toxicity type types updated uri url urls usage user username uuid uuids variant version",
    "website worker year",
)
HARMLESS = frozenset(" ".join(NAMES).split())
PART = 40  # characters; a shorter text may be part of another by chance
WEIGHTS = ("weight", "train", "training", "loss")  # flags with which other tools exclude rows or messages from the loss


def is_harmless(name: str) -> bool:
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)
    return bool(words) and words[-1].lower() in HARMLESS


def texts_in(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield (path, text) for each text in a value, except blank texts and texts in harmless fields."""
    if is_harmless(name.rpartition(".")[2]):
        return
    if isinstance(value, str):
        if value.strip():
            yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from texts_in(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_in(inner, name)


def check_unread(values: Mapping[str, Any], read: Collection[str]) -> None:
    """Raise a UserError for a row with text, tools or a weight other than 1 in a field that is not in `read`; repeated
    texts and texts in harmless fields are allowed."""
    for name in WEIGHTS:
        if name not in read and str(values.get(name, 1)).lower() not in ("1", "1.0", "true", "none"):
            raise UserError(
                f"cannot use its {name} {shown(values[name])}, because all examples weigh the same: remove the "
                f"example, or leave the field out with --ignore {name}"
            )
    if values.get("tools") and "tools" not in read:
        raise UserError(
            "it has tools, which only messages use: write messages, or leave the tools out with --ignore tools"
        )
    unread = {name: value for name, value in values.items() if name not in read}
    if not (texts := [*texts_in(unread)]):
        return
    known = [text for name in read for _, text in texts_in(values.get(name))]
    for path, text in texts:
        if not repeats(text, known):
            names = ", ".join(name for name in values if name in read and values[name] is not None)
            raise UserError(
                f"cannot use its text {shown(text)} in {path}, because Onward reads only {names}: name its "
                "use with "
                f"--columns, such as --columns prompt={path}, or leave it out with --ignore {path.partition('.')[0]}"
            )


def repeats(text: str, known: Collection[str]) -> bool:
    """Whether a text equals a known text, is a long part of one, or contains all lines of the known texts, as a
    rendered conversation does."""
    inside = any(text.strip() == one.strip() or (len(text) > PART and text.strip() in one) for one in known)
    lines = [line.strip() for one in known for line in one.splitlines()]
    return inside or (any(lines) and all(line in text for line in lines))
