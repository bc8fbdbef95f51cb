"""Checks whether kernels can be used on this machine: whether they compile and give correct results."""

from __future__ import annotations

import platform
import warnings
from functools import cache

from onward.kernels.requirements import lacking

TESTED = "x86_64", "AMD64"  # architectures on which kernels were tested; elsewhere each process tests some kernels


class NoCompiler(UserWarning):
    """Warning that kernels cannot be used on this machine, so that decoding is slower."""


@cache
def unavailable() -> str:
    """The reason why kernels cannot be used on this machine, with a warning at the first call; "" if they can."""
    if reason := lacking() or wrong():
        warnings.warn(NoCompiler(f"decoding is slower here, since its kernels cannot be used: {reason}"), stacklevel=3)
    return reason


def wrong() -> str:
    """A phrase that names the first kernel that gives wrong results on this machine; "" if none does."""
    if platform.machine() in TESTED:
        return ""
    from onward.kernels.self_test import wrong_kernel  # imported here because it compiles kernels

    kernel = wrong_kernel()
    return kernel and f"on this processor ({platform.machine()}) the kernel for {kernel} differs from PyTorch"
