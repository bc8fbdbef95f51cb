"""The draft head of a model, in the commands that write texts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from onward.cli.shared.output import console
from onward.hub.folder import locate

if TYPE_CHECKING:
    from onward.api.language_model import LanguageModel


def with_draft_head(lm: LanguageModel, model: str, draft: str) -> bool:
    """Give a model the draft head in the folder `draft`; return whether the folder has one. Raises a
    UserError for the draft head of another model."""
    from onward.checkpoint.draft_heads import draft_of, is_draft_head

    if not draft or not is_draft_head(Path(draft)):
        return False
    lm.draft_head = draft_of(Path(draft), locate(model), lm.model)
    return True


def tell_draft(model: str) -> None:
    console.print(f"drafts come from {model}/draft (--lookup 0: no drafts)", markup=False, soft_wrap=True)
