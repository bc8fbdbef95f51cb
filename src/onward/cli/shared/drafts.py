"""The draft head of a model, in the commands that write texts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from onward.cli.shared.output import console
from onward.hub.folder import locate

if TYPE_CHECKING:
    from onward.api.language_model import LanguageModel


def trained_draft(draft: str) -> Path | None:
    """Return the folder of the draft head or EAGLE-3 draft named `draft`, on this machine or the hub; None if it is
    another draft. Raises a UserError if there is no such folder."""
    from onward.checkpoint.draft_heads import is_draft

    folder = locate(draft) if draft not in ("", "mtp") else None
    return folder if folder and is_draft(folder) else None


def with_draft(lm: LanguageModel, model: str, draft: str) -> bool:
    """Give a model the draft head or EAGLE-3 draft named `draft`; return whether it is one. Raises a UserError if it is
    that of another model."""
    from onward.checkpoint.draft_heads import draft_of

    if folder := trained_draft(draft):
        lm.draft_head = draft_of(folder, locate(model), lm.model)
    return folder is not None


def tell_draft(model: str) -> None:
    console.print(f"drafts come from {model}/draft (--lookup 0: no drafts)", markup=False, soft_wrap=True)
