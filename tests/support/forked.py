"""Runs commands in processes that have already imported torch, since a new Python process needs seconds for this."""

import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import IO, Any

CONTEXT = multiprocessing.get_context("forkserver")
OURS = "training.run.run", "parallel.failures", "parallel.processes", "cli.commands.serve", "serving.server"
CONTEXT.set_forkserver_preload([*(f"onward.{name}" for name in OURS), "pytest", "hypothesis"])


class Forked:
    """A process that exits with the status `task(*arguments)`, with the interface of subprocess.Popen. It has the
    environment, the working directory and the limit of open files of the caller; `stderr` is its standard error."""

    def __init__(self, task: Callable[..., int], *arguments: Any) -> None:
        pipe, end = CONTEXT.Pipe(duplex=False)
        self.stderr: IO[str] = open(os.dup(pipe.fileno()), encoding="utf-8")  # noqa: SIM115
        pipe.close()
        surroundings = dict(os.environ), resource.getrlimit(resource.RLIMIT_NOFILE)
        self.process = CONTEXT.Process(target=begin, args=(task, arguments, *surroundings, end), daemon=True)
        self.process.start()
        end.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        assert self.process.exitcode is not None, f"it still runs after {timeout} s"
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        if self.poll() is None:
            self.send_signal(signal.SIGKILL)


def begin(
    task: Callable[..., int],
    arguments: tuple[Any, ...],
    environment: dict[str, str],
    files: tuple[int, int],
    end: Connection,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    resource.setrlimit(resource.RLIMIT_NOFILE, files)
    os.dup2(end.fileno(), 2)
    end.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(task(*arguments))
