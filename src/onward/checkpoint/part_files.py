"""The files of a part of a model that is saved without its base: an adapter, or a draft head."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from onward.base.files import atomic_write, flush
from onward.checkpoint.weights import fill


@dataclass(frozen=True)
class PartFiles:
    """The content of the folder of an adapter or a draft head, to be written."""

    file: str  # name of the file of tensors
    tensors: Mapping[str, Tensor]
    texts: Mapping[str, Mapping[str, Any]]  # JSON by the name of its file


def write_part(folder: Path, files: PartFiles) -> None:
    """All files are flushed before the first is renamed to its final name."""
    with ExitStack() as stack:
        names = files.file, *files.texts
        temporary = {name: stack.enter_context(atomic_write(folder / name)) for name in names}
        fill(temporary[files.file], files.tensors, files.tensors.items())
        for name, value in files.texts.items():
            temporary[name].write_text(json.dumps(value, indent=2) + "\n")
        for new in temporary.values():
            flush(new)
