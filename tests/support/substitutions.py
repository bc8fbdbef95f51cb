"""Substitutions in source code: "line => line instead"; two of one change are joined by AND."""

AND = " && "


def substituted(source: str, changes: str) -> str:
    """The source with other lines."""
    for change in changes.split(AND) if changes else []:
        line, _, instead = change.partition(" => ")
        assert line in source, f"there is no line {line!r}"
        source = source.replace(line, instead)
    return source
