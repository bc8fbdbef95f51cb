"""Whether the operations of a decoding step are being recorded, to compile a step that runs kernels in their place."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode


def is_recorded() -> bool:
    return not torch.compiler.is_compiling() and getattr(_get_current_dispatch_mode(), "records_steps", False)


def unrecorded() -> AbstractContextManager[object]:
    """A context manager whose operations are not recorded: their results are constants of a recorded decoding step."""
    return torch._C._DisableTorchDispatch() if is_recorded() else nullcontext()
