"""The drafts of a LanguageModel that come with its files."""

from __future__ import annotations

from pathlib import Path
from weakref import WeakKeyDictionary

from onward.base.errors import UserError
from onward.checkpoint.prediction import load_prediction
from onward.generation.drafts.hidden_draft import HiddenDraft
from onward.generation.drafts.paced import LENGTHS
from onward.generation.drafts.proposal import Draft
from onward.model.cache import KVCache
from onward.model.decoder import Decoder
from onward.model.draft_head import DraftHead
from onward.model.eagle import EagleDecoder

TrainedDraft = DraftHead | EagleDecoder
PREDICTIONS: WeakKeyDictionary[Decoder, Decoder] = WeakKeyDictionary()  # layers for multi-token prediction, once loaded


def mtp_draft(model: Decoder, path: Path | None) -> Draft:
    """Return a draft that uses the model's own multi-token prediction layer, loaded at the first call from `path`, the
    model's files. Raises a UserError if there is no such layer."""
    if path is None:
        raise UserError("Cannot draft by mtp, because this model was not loaded from files: load it with onward.load")
    if model not in PREDICTIONS:
        PREDICTIONS[model] = load_prediction(path, model)
    return HiddenDraft(PREDICTIONS[model])


def trained_draft(model: Decoder, head: TrainedDraft, cache: KVCache | None) -> Draft | None:
    """Return a draft that uses the model's draft head or EAGLE-3 draft; None if `cache` is given and cannot verify the
    draft tokens."""
    if cache and (cache.chunk <= LENGTHS[-1] or (cache.states and cache.keep < LENGTHS[-1])):
        return None
    if isinstance(head, EagleDecoder):
        from onward.generation.drafts.eagle_draft import EagleDraft

        return EagleDraft(model, head)
    from onward.generation.drafts.head_draft import PacedHead

    return PacedHead(model, head)
