"""Substitutions in source code: "line => line instead"; AND joins several substitutions of one change."""

AND = " && "


def substituted(source: str, changes: str) -> str:
    """The source with replaced lines."""
    for change in changes.split(AND) if changes else []:
        line, _, instead = change.partition(" => ")
        assert line in source, f"there is no line {line!r}"
        source = source.replace(line, instead)
    return source
