"""The memory limit of a process, and the freed memory that it keeps."""

import dataclasses
import os
import platform
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import onward
from onward import RunConfig
from onward.base import limits
from onward.base.limits import keep_freed_memory
from onward.training.run import room

PAGES = 16_384  # number of pages of the tensor below


def faults_of_another() -> int:
    """The number of page faults when one more tensor of 64 MiB is made."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(1 << 24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to keep freed memory")
def test_memory_that_is_freed_is_used_again_without_page_faults() -> None:
    keep_freed_memory()
    for _ in range(20):  # glibc needs some allocations before it reuses memory for an aligned tensor
        torch.ones(1 << 24)
    assert faults_of_another() < PAGES / 100


GIB = 1 << 30
MOUNT = "30 25 0:26 {root} {point} rw,nosuid - {kind} cgroup rw{options}\n"
# (line of /proc/self/cgroup, root of the mount, kind of mount, {file below the mount: content}, expected GiB)
GROUPS = [
    ("0::/jobs/one", "/", "cgroup2", {"jobs/one/memory.max": "max", "jobs/memory.max": str(2 * GIB)}, 2),
    ("0::/jobs/one", "/", "cgroup2", {"jobs/one/memory.max": str(GIB), "jobs/memory.max": str(2 * GIB)}, 1),
    ("0::/jobs/one", "/", "cgroup2", {"jobs/one/memory.high": str(GIB), "jobs/memory.max": str(2 * GIB)}, 1),
    ("0::/", "/", "cgroup2", {"memory.max": str(2 * GIB)}, 2),
    ("0::/../../other", "/", "cgroup2", {"memory.max": str(2 * GIB)}, 2),
    ("0::/docker/a/b", "/docker/a", "cgroup2", {"b/memory.max": str(2 * GIB), "memory.max": str(GIB)}, 1),
    ("4:memory:/jobs/one", "/", "cgroup", {"jobs/memory.limit_in_bytes": str(2 * GIB)}, 2),
    ("4:cpu,memory:/docker/a", "/docker/a", "cgroup", {"memory.limit_in_bytes": str(GIB)}, 1),
    ("4:memory:/jobs", "/", "cgroup", {"jobs/memory.limit_in_bytes": "9223372036854771712"}, 1024),
    ("3:cpu:/jobs\n0::/", "/", "cgroup", {"jobs/memory.limit_in_bytes": str(GIB)}, 1024),
    ("0::/jobs", "/", "cgroup2", {"jobs/memory.max": "damaged"}, 1024),
]


@pytest.mark.parametrize(("line", "root", "kind", "files", "expected"), GROUPS)
def test_memory_is_that_of_the_narrowest_group_upwards(
    line: str, root: str, kind: str, files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: Any
) -> None:
    point = tmp_path / "a mount"
    for name, content in files.items():
        (point / name).parent.mkdir(parents=True, exist_ok=True)
        (point / name).write_text(content + "\n")
    options = ",memory" if kind == "cgroup" else ""
    mount = MOUNT.format(root=root, point=str(point).replace(" ", r"\040"), kind=kind, options=options)
    other = MOUNT.format(root="/", point="/elsewhere", kind="cgroup", options=",cpu")
    (tmp_path / "cgroup").write_text(f"7:pids:/\n{line}\n")
    (tmp_path / "mountinfo").write_text(other + mount)
    monkeypatch.setattr(limits, "PROCESS", tmp_path)
    monkeypatch.setattr(os, "sysconf", lambda name: 1 << 20)  # page size 1 MiB, and 1 Mi pages: 1 TiB
    assert limits.memory_size() == expected * GIB


def test_limit_of_the_address_space_is_a_limit_of_memory() -> None:
    code = "from onward.base.limits import memory_size; print(memory_size())"
    shell = f"ulimit -v {2 << 20}; exec {sys.executable} -c '{code}'"
    size = int(subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True).stdout)
    assert 1.5 * GIB < size < 2 * GIB


def test_a_run_beyond_the_memory_is_refused_and_one_near_it_says_so(tmp_path: Path, monkeypatch: Any) -> None:
    config = RunConfig(sources=("x",), out=str(tmp_path), preset="mini")
    decoder, cpu = config.decoder(4096), torch.device("cpu")
    monkeypatch.setattr(room, "resident_memory", lambda: 0)
    for size, batch, expected in [(10**10, 8, []), (10**8, 64, [r"needs about .* uses more than 100.0 MB"])]:
        monkeypatch.setattr(room, "memory_size", lambda size=size: size)
        found = room.check_room(dataclasses.replace(config, batch_size=batch), decoder, cpu)
        assert len(found) == len(expected)
        assert all(re.search(pattern, sentence) for pattern, sentence in zip(expected, found))
    monkeypatch.setattr(room, "memory_size", lambda: 10**6)
    with pytest.raises(onward.UserError, match=r"Cannot train .* this process may use 1.0 MB"):
        room.check_room(config, decoder, cpu)
    assert room.check_room(config, decoder, torch.device("meta")) == []
