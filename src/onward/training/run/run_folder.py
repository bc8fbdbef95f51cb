"""The folder of a run: its creation, its run.json, and the check that a step is saved."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote

from onward.base import fields
from onward.base.errors import UserError
from onward.base.files import read_json, write_json
from onward.checkpoint.saves.folder import saves, step_of
from onward.training.config import RunConfig
from onward.training.run.lock import Hold, run_lock


@contextmanager
def new_folder(folder: Path) -> Iterator[Hold]:
    """Context manager: creates and locks the folder of a new run. After a UserError the folder is removed, unless it
    existed before or contains partly prepared texts."""
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}; choose another --out") from None
    with run_lock(folder) as hold:
        if not new and not (folder / "run.json").exists() and holds_model(folder):
            raise UserError(f"{folder} contains a model, which a run would overwrite: choose another --out")
        if saves(folder):  # another process has started a run here in the meantime
            raise UserError(f"{folder} already contains a run: --resume {quote(str(folder))}, or choose another --out")
        try:
            yield hold
        except UserError:
            if new and not (folder / "data.unfinished").exists():
                shutil.rmtree(folder, ignore_errors=True)
            raise


def holds_model(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("config.json", "adapter_config.json"))


def record_steps(config: RunConfig) -> None:
    """Write the number of steps to the run.json of a run with a time limit, once it is known. If the disk is full, the
    file stays unchanged, and the next save calls this again."""
    path = Path(config.out) / "run.json"
    with suppress(UserError):
        if config.steps and not read_json(path).get("steps"):
            write_json(path, fields.plain(config))


def check_saved(folder: Path, step: int, failure: UserError | None) -> None:
    """Raise a UserError if `step`, the last step of the run in `folder`, is not saved; `failure` is the error of the
    save, or None if the save was skipped because weights were not finite."""
    if any(step_of(path) == step for path in saves(folder)):
        return
    if failure:
        raise UserError(f"{failure}; fix this, then continue with --resume {folder}")
    raise UserError(f"the weights of step {step} are not finite: this step is not saved")
