"""Columns of tables under our names. Imports nothing heavy."""

from onward.errors import UserError


def renaming(columns: str) -> dict[str, str]:
    """Parse `prompt=question,completion=answer` to {"prompt": "question", "completion": "answer"}: our name and that of
    the data's column. Raises a UserError for any other form."""
    pairs = [pair.partition("=") for pair in columns.split(",") if pair.strip()]
    for name, equal, theirs in pairs:
        if not (name.strip() and theirs.strip()):
            wrong = f"{name}{equal}{theirs}".strip()
            raise UserError(f"columns has {wrong!r}: write our name and theirs, prompt=question,completion=answer")
    return {name.strip(): theirs.strip() for name, _, theirs in pairs}
