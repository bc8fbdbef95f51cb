"""Converts weights in pickles (.bin), the format of the oldest releases, to safetensors. A separate process with a
memory limit reads them with `torch.load(weights_only=True)`, which makes tensors and runs no code.

`python -m onward.checkpoint.pickles OUT FILE ...` is that process; no other part of Onward reads a pickle file.
"""

from __future__ import annotations

import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.base.files import write_json
from onward.base.limits import limit_memory
from onward.checkpoint.weights import DTYPE_NAMES, fill
from onward.hub.names import FILES, INDEX

ROOM = 1 << 30  # bytes that the process may allocate in addition to twice the size of the largest file
PICKLED = re.compile(r"pytorch_model(-\d+-of-\d+)?\.bin")


@contextmanager
def as_safetensors(folder: Path, parent: Path) -> Iterator[Path]:
    """Return a context with a temporary folder in `parent` that contains the model, its weights converted from pickles
    to safetensors."""
    pickles = sorted(path for path in folder.iterdir() if PICKLED.fullmatch(path.name)) if folder.is_dir() else []
    if not pickles:
        raise UserError(f"{folder} has no pytorch_model.bin: leave out --from-bin, which reads these pickles")
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".from-bin-", dir=parent) as made:
        words = [sys.executable, "-m", __name__, made, *map(str, pickles)]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] if done.returncode == 2 else []
            why = last[0] if last else "its process was killed, perhaps for lack of memory"
            raise UserError(
                f"{pickles[0].parent}: the pickles cannot be read as weights ({why}): use safetensors files"
            )
        for path in folder.iterdir():
            if path.is_file() and FILES[""].fullmatch(path.name):
                shutil.copyfile(path, Path(made, path.name))
        yield Path(made)


def tensors_of(path: Path) -> dict[str, Tensor]:
    """The tensors of a pickle, memory-mapped if its format allows that."""
    state: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
        state = state["state_dict"]
    if not isinstance(state, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in state.items()
    ):
        raise UserError(f"{path.name} does not contain a table of tensors")
    if strange := [name for name, tensor in state.items() if tensor.dtype not in DTYPE_NAMES]:
        raise UserError(f"{path.name}: {strange[0]} is {state[strange[0]].dtype}, a dtype that Onward does not read")
    return dict(state)


def main(argv: Sequence[str]) -> int:
    """The conversion process: `argv` contains a folder and pickles. Each pickle becomes a safetensors file in the
    folder, which also gets an index."""
    out, files = Path(argv[0]), list(map(Path, argv[1:]))
    limit_memory(ROOM + 2 * max(path.stat().st_size for path in files))
    file_of = dict[str, str]()
    try:
        for number, path in enumerate(files, 1):
            name = f"model-{number:05}-of-{len(files):05}.safetensors"
            tensors = tensors_of(path)
            fill(out / name, {key: tensor.to("meta") for key, tensor in tensors.items()}, tensors.items())
            file_of |= dict.fromkeys(tensors, name)
        write_json(out / INDEX, {"weight_map": file_of})
    except pickle.UnpicklingError as error:
        code = re.search(r"GLOBAL ([\w.]+)", str(error))
        print(f"one contains {code[1] if code else 'other data'} besides weights", file=sys.stderr)
        return 2
    except Exception as error:  # any error that a damaged or hostile pickle causes
        print((str(error) or type(error).__name__).splitlines()[0][:300].rstrip("."), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
