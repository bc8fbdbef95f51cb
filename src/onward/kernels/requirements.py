"""Requirements of a machine for compiling kernels. Any other compiler error is a bug, and is raised."""

from __future__ import annotations

import ctypes
import mmap

OPENMP = "GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"


def lacking() -> str:
    """The first requirement for compiling kernels that this machine lacks, in words; "" if it lacks none."""
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
        return "the system forbids executing memory that this process has written (systemd: MemoryDenyWriteExecute)"
    for name in OPENMP:
        if not hasattr(openmp(), name):
            return f"the OpenMP of PyTorch has no {name}"
    return ""


def openmp() -> ctypes.CDLL:
    """The library with the OpenMP functions of PyTorch, so that kernels run in PyTorch's threads."""
    import torch

    return ctypes.CDLL(torch._C.__file__)


def may_execute() -> bool:
    """Whether the system lets this process execute memory that it has filled with code, as compiled kernels need."""
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # LLVM would not report a refusal
    page.write(b"\0")
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return bool(protect(address, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC) == 0)
