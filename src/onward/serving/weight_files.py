"""The weight files that are mapped into memory: a change of such a file changes the model, or ends the process."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

SUFFIXES = ".safetensors", ".gguf", ".bin", ".pt", ".pth"
Status = tuple[int, int]  # size in bytes and time of the last change in nanoseconds


class WeightFiles:
    """The weight files that this process maps, as they were when this object was made. On systems without /proc, none
    are found."""

    def __init__(self) -> None:
        self.known: dict[Path, tuple[int, Status]] = {}  # inode and status
        with suppress(OSError):
            lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
            for path in {line.split(maxsplit=5)[-1] for line in lines if line.endswith(SUFFIXES)}:
                status = os.stat(path)
                self.known[Path(path)] = status.st_ino, (status.st_size, status.st_mtime_ns)

    def changed(self) -> Path | None:
        """The first mapped file that was written to after this object was created; None if there is none. A file that
        was removed or replaced stays in memory unchanged."""
        for path, (inode, before) in self.known.items():
            with suppress(OSError):
                status = os.stat(path)
                if status.st_ino == inode and (status.st_size, status.st_mtime_ns) != before:
                    return path
        return None


def copy_to_memory(model: nn.Module) -> None:
    """Copy each parameter and buffer into separate memory, so that the weight files may change."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
