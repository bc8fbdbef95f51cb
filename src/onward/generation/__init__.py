"""Drafts, constraints and cached prefixes for an `onward.Engine`, and its errors and warnings."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from onward.generation.cache.prefix_files import PrefixFiles
    from onward.generation.check_request import ContextOverflow, PromptError
    from onward.generation.drafts.lookup import LookupDraft
    from onward.generation.drafts.model_draft import ModelDraft
    from onward.generation.drafts.proposal import Draft, Proposal
    from onward.generation.drafts.times import expected_tokens
    from onward.generation.request import Constraint
    from onward.generation.schemas import SchemaWarning
else:
    from onward.base.public import lazily

    __getattr__, __dir__ = lazily(__name__)

__all__ = [
    "Constraint",
    "ContextOverflow",
    "Draft",
    "LookupDraft",
    "ModelDraft",
    "PrefixFiles",
    "PromptError",
    "Proposal",
    "SchemaWarning",
    "expected_tokens",
]
