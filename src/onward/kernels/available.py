"""Whether kernels can be compiled on this machine, and give right results. Any other error of the compiler is a defect,
and is raised."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import platform
import warnings
from functools import cache

TESTED = "x86_64", "AMD64"  # architectures on which kernels have been run; elsewhere each process tests some of them
OPENMP = "GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"


class NoCompiler(UserWarning):
    """The warning that kernels cannot be used on this machine, so that decoding is slower."""


@cache
def unavailable() -> str:
    """Return the reason why kernels cannot be used on this machine, with a warning at the first call; "" if they can be
    used."""
    if reason := lacking() or wrong():
        warnings.warn(NoCompiler(f"decoding is slower here, since its kernels cannot be used: {reason}"), stacklevel=3)
    return reason


def lacking() -> str:
    """Return the first requirement for compiling kernels that this machine lacks, in words; "" if it lacks none."""
    try:
        import llvmlite.binding as llvm
    except (ImportError, OSError) as error:  # it is not installed, or its library cannot be loaded
        return f"llvmlite cannot be imported ({error})"
    try:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        target = llvm.Target.from_default_triple().create_target_machine()
        llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)
    except RuntimeError as error:
        return f"LLVM does not know this processor ({error})"
    if not may_execute():
        return "this process must not execute memory that it has written, as MemoryDenyWriteExecute of systemd has it"
    for name in OPENMP:
        if not hasattr(openmp(), name):
            return f"the OpenMP of PyTorch has no {name}"
    return ""


def wrong() -> str:
    """Return the first kernel that gives wrong results on this machine, in words; "" if none does. On x86-64 nothing is
    tested."""
    if platform.machine() in TESTED:
        return ""
    kernel = importlib.import_module("onward.kernels.self_test").wrong_kernel()  # it imports files that import this one
    return kernel and f"on this processor ({platform.machine()}) the kernel for {kernel} differs from PyTorch"


def openmp() -> ctypes.CDLL:
    """Return the shared library that contains the OpenMP functions of PyTorch, so that kernels run in PyTorch's
    threads."""
    import torch

    return ctypes.CDLL(torch._C.__file__)


def may_execute() -> bool:
    """Return whether the system lets this process execute memory that it has filled with code, which compiled kernels
    need; checked here because LLVM would not report a refusal."""
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    page.write(b"\0")
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return bool(protect(address, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC) == 0)
