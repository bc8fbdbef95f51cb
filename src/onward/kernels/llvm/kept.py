"""Stores machine code in a folder for the next start of the program."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from onward.base.errors import UserError
from onward.base.files import atomic_write
from onward.kernels.llvm import loadable
from onward.kernels.requirements import OPENMP

CHECKSUM = 32  # bytes of the SHA-256 at the start of a file
MAX_BYTES = 1 << 26  # size limit of a file; the code of a step takes about 100 kB
LOADING = 60  # seconds after which code counts as malformed
FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # follows no symlink, waits for no pipe


class NotKept(UserWarning):
    """Warning that machine code cannot be stored in a folder for the next start, with the reason."""


def private_folder(folder: str | Path) -> Path | None:
    """Return the absolute path of a folder for machine code to which no other user has access; create it if it is
    missing. Returns None, with a warning that gives the reason, if others have access or the folder cannot be used.

    Symlinks above the folder are resolved. No folder on the path lets another user rename the next one, so that the
    path always leads to the same folder.
    """
    try:
        path = Path(os.path.abspath(folder))
        path = Path(os.path.realpath(path.parent), path.name)
        reason = next(filter(None, (unsafe(place, place == path) for place in [*reversed(path.parents), path])), "")
    except (OSError, ValueError) as error:
        reason = f"{folder}: {getattr(error, 'strerror', None) or error}"
    if reason:
        warn(reason)
        return None
    return path


def unsafe(place: Path, private: bool) -> str:
    """Return the reason why another user could put code into the folder `place` or below it; "" if no other user could.
    The folder is created if it is missing.

    Only this user may have access to a `private` folder. Others may enter a folder above it, and write to that folder
    if it is sticky.
    """
    with suppress(FileExistsError):  # another process may create it at the same time
        if not os.path.lexists(place):
            place.mkdir(0o700)
            place.chmod(0o700)  # regardless of the umask
    status = place.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return f"{place} is a symlink or a file: name a folder"
    if status.st_uid not in ({os.geteuid()} if private else {os.geteuid(), 0}):
        return f"{place} belongs to another user: name a folder of your own"
    if private and status.st_mode & 0o077:
        return f"other users have access to {place}: chmod 700 it, or name a folder that does not exist yet"
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        return f"other users may write to {place}: chmod go-w it, or name another folder"
    return ""


def warn(reason: str) -> None:
    warnings.warn(
        NotKept(f"the code of compiled steps is not kept, so it is compiled at each start: {reason}"), stacklevel=4
    )


def read(path: Path) -> bytes | None:
    """Read the machine code in a file of a private folder; None if the file is missing, too large or not private, or
    its checksum is wrong."""
    try:
        with open(path, "rb", opener=lambda name, _: os.open(name, FLAGS)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
                return None
            data = file.read(MAX_BYTES + 1)
    except OSError:
        return None
    code = data[CHECKSUM:]
    return code if len(data) <= MAX_BYTES and data[:CHECKSUM] == checksum(path, code) else None


def write(path: Path, code: bytes) -> None:
    """Write machine code to a file of a private folder, with a checksum; warn if the file cannot be written."""
    try:
        with atomic_write(path) as new:
            new.touch(0o600)
            new.write_bytes(checksum(path, code) + code)
    except UserError as error:
        warn(str(error))


def checksum(path: Path, code: bytes) -> bytes:
    """Return the SHA-256 of machine code and of the name of its file, which is a hash of the code's source."""
    return hashlib.sha256(path.name.encode() + code).digest()


def is_loadable(code: bytes, functions: Sequence[str]) -> bool:
    """Return whether LLVM can load machine code that contains these functions. Loads the code in a separate process,
    since malformed code may crash the process."""
    import llvmlite

    folder = str(Path(llvmlite.__file__).parents[1])
    command = [sys.executable or "", "-I", "-S", loadable.__file__, folder, ",".join(OPENMP), ",".join(functions)]
    try:
        done = subprocess.run(
            command, input=code, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=LOADING, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return done.stdout == loadable.LOADABLE
