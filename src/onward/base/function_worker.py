"""Processes that call a function of the user, with a time limit."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

from onward.base.errors import UserError
from onward.base.suggestions import nearest
from onward.base.workers import exit_with_parent, worker_environment

COMMAND = [sys.executable, "-P", "-c", "from onward.base.function_worker import serve; serve()"]
LOADING = 600.0  # seconds that a file may take until its function is defined, such as for loading a model
ENDING = 5.0  # seconds that a process which has closed its connection may take to end
TEXTS = "prompts", "completions", "answers"


class NoAnswer(Exception):
    """Raised when the process of a Worker ends or takes too long instead of answering; the message is the reason."""


class Worker:
    """A process that executes the Python file `file` and calls its function `name`, such as a user's reward, with a
    time limit. Raises a UserError if the file cannot be executed, or has no such function."""

    def __init__(self, file: str, name: str) -> None:
        self.file, self.name = file, name
        self.start()

    def start(self) -> None:
        """Start the process, and wait until it has loaded the function. Raises a UserError if loading fails."""
        self.connection, theirs = Pipe()
        self.process = subprocess.Popen(
            [*COMMAND, str(os.getpid()), str(theirs.fileno()), self.file, self.name],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=worker_environment(),
            start_new_session=True,
        )
        theirs.close()
        self.stop = weakref.finalize(self, end, self.process, self.connection)
        try:
            error = self.receive(LOADING)
        except NoAnswer as why:
            error = f"{self.file} {why}"
        if error:
            self.stop()
            raise UserError(error)

    def receive(self, seconds: float) -> Any:
        """Return the next object that the process sends. Raises NoAnswer if this takes longer than `seconds`, or if the
        process ends."""
        try:
            if self.connection.poll(seconds):
                return self.connection.recv()
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(ENDING)
            status = self.process.returncode
            raise NoAnswer(f"ended its process with status {status}: remove the call that ends it") from None
        raise NoAnswer(f"has not returned after {seconds:g} s: make it faster, or check for an endless loop")

    def call(self, columns: Mapping[str, Sequence[Any]], seconds: float) -> list[Any]:
        """Return the list of values that the function returns for `columns`: lists, by field name, with an entry for
        each completion. A call that takes longer than `seconds`, or ends its process, is made once more in a new
        process. Raises a UserError if that fails too, or if the function raises."""
        for last in (False, True):
            if not self.stop.alive:
                self.start()
            with suppress(OSError):  # the process has ended since its last call
                self.connection.send(columns)
            try:
                values, error = self.receive(seconds)
                break
            except NoAnswer as why:
                self.stop()
                if last:
                    raise UserError(f"the reward {self.name} {why}") from None
        if error:
            raise UserError(f"the reward {self.name} failed: {error}; let it return a number for every completion")
        return values


def end(process: subprocess.Popen[bytes], connection: Connection) -> None:
    """Kill a worker's process and the processes that it started, and close the connection to it."""
    connection.close()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def serve() -> None:
    """Run in the process of a Worker: load the function, and send "" or an error message. Then receive columns, call
    the function, and send (values, "") or ([], error message), until the parent exits."""
    parent, descriptor, file, name = sys.argv[1:]
    Thread(target=exit_with_parent, args=[int(parent)], daemon=True).start()
    os.dup2(2, 1)  # the function's prints are not output of the command
    sys.stdout = sys.stderr  # stderr shows prints at once
    connection = Connection(int(descriptor))
    try:
        function = function_of(Path(file), name)
    except UserError as error:
        connection.send(str(error))
        return
    connection.send("")
    with suppress(EOFError):  # the parent has exited
        while True:
            columns = connection.recv()
            try:
                answer = [number(value) for value in values_of(function, columns)], ""
            except Exception as error:
                answer = [], described(error)
            connection.send(answer)


def function_of(file: Path, name: str) -> Callable[..., Any]:
    """Import a Python file, which may import other files of its folder, and return its function `name`. Raises a
    UserError if the file cannot be run, or has no such function."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if not file.exists() or spec is None or spec.loader is None:
        raise UserError(f"there is no file {file}: give FILE.py:FUNCTION")
    sys.path.append(str(file.resolve().parent))
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{file} cannot be run: {described(error)}") from None
    functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    if name not in functions:
        raise UserError(f"{file} has no function {name!r}: {nearest(name, functions)}")
    function: Callable[..., Any] = getattr(module, name)
    return function


def values_of(function: Callable[..., Any], columns: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Call a function of the user for `columns`, lists by field name, and return its values as a list. The function may
    be asynchronous, and so may each of its values.

    Prompts, completions and answers are given by position, and other columns by name if the function has a parameter of
    that name or **kwargs. Without *args, all columns are given by name if the function has fewer than three positional
    parameters, or if one of the first three has the name of another column.
    """
    parameters = inspect.signature(function).parameters
    kinds = {one.kind for one in parameters.values()}
    named = {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}
    first = [name for name, one in parameters.items() if one.kind not in named][:3]
    others = columns.keys() - {*TEXTS}
    by_position = inspect.Parameter.VAR_POSITIONAL in kinds or (len(first) == 3 and not others & {*first})
    given = [columns[name] for name in TEXTS] if by_position else []
    rest = others if by_position else columns.keys()
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        rest = rest & parameters.keys()
    result = function(*given, **{name: columns[name] for name in sorted(rest)})
    return asyncio.run(awaited(result))


async def awaited(result: Any) -> list[Any]:
    """Return the values of a function's result as a list, after awaiting the result, or each value, if it is
    awaitable."""
    values = list(await result if inspect.isawaitable(result) else result)
    waiting = [i for i, value in enumerate(values) if inspect.isawaitable(value)]
    for i, value in zip(waiting, await asyncio.gather(*(values[i] for i in waiting))):
        values[i] = value
    return values


def number(value: Any) -> Any:
    """Convert a value returned by a user's function so that it can be sent between processes: numbers of any library
    become float, text, bytes and None stay as they are, and any other value becomes the first 99 characters of its
    repr."""
    try:
        return value if isinstance(value, str | bytes | None) else float(value)
    except (TypeError, ValueError):
        return repr(value)[:99]


def described(error: Exception) -> str:
    """Return the type and the message of an error in one line, for error messages."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300].rstrip(":")
