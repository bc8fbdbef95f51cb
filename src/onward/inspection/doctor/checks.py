"""The doctor's table of all checks of a model, and the functions that run them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Unpack, get_type_hints

import torch
from torch import nn

from onward.base import arguments
from onward.base.arguments import checked
from onward.base.errors import UserError
from onward.base.suggestions import nearest
from onward.inspection.doctor.attending import ATTENDING
from onward.inspection.doctor.caching import CACHING
from onward.inspection.doctor.corpus import CORPUS, Corpus
from onward.inspection.doctor.finding import Check, Finding
from onward.inspection.doctor.forward import FORWARD
from onward.inspection.doctor.learning import LEARNING
from onward.inspection.doctor.modules import PARTS
from onward.inspection.doctor.stream import STREAM
from onward.inspection.doctor.subject import About, Subject
from onward.inspection.doctor.trained import TRAINED
from onward.inspection.doctor.training import TRAINING

CHECKS: dict[str, Check] = FORWARD | CACHING | ATTENDING | STREAM | PARTS | LEARNING | TRAINING | TRAINED
CHEAP = tuple(name for name, check in CHECKS.items() if check.cheap)


@torch.no_grad()
def examine(subject: Subject | Corpus, names: Collection[str] = ()) -> Iterator[Finding]:
    """Run the checks (by default all) and yield their findings; an exception gives the status "not run"."""
    for name, check in (CORPUS if isinstance(subject, Corpus) else CHECKS).items():
        if names and name not in names:
            continue
        try:
            status, what, *where = check.run(subject)
        except Exception as error:  # raised by the model's code
            cause = error.__cause__ or error
            status, where = "not run", []
            what = " ".join(f"could not be run: {type(cause).__name__}: {cause}".split())[:300]
        why, mend = (check.why, check.mend) if status == "failed" else ("", "")
        yield Finding(name, status, what, "".join(where), check.how, why, mend)


@contextmanager
def restored_state(model: nn.Module) -> Iterator[None]:
    """Restore the mode of each module and the random state at the end of the `with` block."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@checked
def doctor(model: nn.Module, *, checks: Collection[str] = (), **about: Unpack[About]) -> list[Finding]:
    """Look for mistakes in a model that maps token ids (B, T) to logits (B, T, V), to a tuple that begins with them, or
    to an object with `.logits`: run the checks named in `checks`, by default all, and return one finding per check.

    Optional facts about the model are keyword arguments, see `About`: `fresh` and `trained` weights, an `adapter` for a
    model with a different call signature, its `loss`, its `cache`, its `batches`, its `tokenizer`, the pattern of
    parameters that should be `frozen`. A check without the facts it needs is `not applicable`. The model is left
    unchanged. Raises a UserError for an unknown argument.
    """
    kinds = get_type_hints(About, include_extras=True)
    if unknown := next((name for name in about if name not in kinds), None):
        raise UserError(f"doctor has no argument {unknown}: {nearest(unknown, kinds)}")
    arguments.check(arguments.types_of(kinds), about)
    with restored_state(model):
        return list(examine(Subject(model, **about), checks))
