"""What a process keeps of the memory that it frees."""

import platform
import resource

import pytest
import torch

from onward.base.limits import keep_freed_memory

PAGES = 16_384  # of the tensor below


def faults_of_another() -> int:
    """The page faults of making one more tensor of 64 MiB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep freed memory")
def test_memory_that_is_freed_is_used_again_without_page_faults() -> None:
    keep_freed_memory()
    for _ in range(20):  # glibc finds a place that an aligned tensor fits into again after some
        torch.ones(1 << 24)
    assert faults_of_another() < PAGES / 100
