"""Columns of tables under our names. Imports nothing heavy."""

from onward.errors import UserError


def renaming(columns: str) -> dict[str, str]:
    """Parse an option such as "prompt=question,completion=answer" to {"prompt": "question", "completion": "answer"}:
    Onward's name of each field and the name of its column in the data. Raises a UserError for any other form."""
    pairs = [pair.partition("=") for pair in columns.split(",") if pair.strip()]
    for name, equal, theirs in pairs:
        if not (name.strip() and theirs.strip()):
            wrong = f"{name}{equal}{theirs}".strip()
            raise UserError(f"columns has {wrong!r}: write our name and theirs, prompt=question,completion=answer")
    names = [name.strip() for name, _, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"columns has {twice[0]} twice: name one column for it")
    return {name.strip(): theirs.strip() for name, _, theirs in pairs}
