"""Applies a function to many tasks in worker processes, which exit when the process that started them does."""

import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from itertools import chain, islice
from subprocess import PIPE
from threading import Event, Lock, Thread
from typing import TypeVar

from onward.base.errors import UserError

T = TypeVar("T")
COMMAND = [sys.executable, "-P", "-c", "from onward.base.workers import serve; serve()"]


def run_tasks(work: Callable[[T], None], tasks: Iterator[T], workers: int, done: Callable[[T], None]) -> None:
    """Call `work` on each task in `workers` processes (0: one per core), then `done` on the task in this process.

    A task is drawn from the iterator when a process is free, so few tasks are in memory. With a single task or a single
    worker, this process does the work. Unlike the processes of `multiprocessing`, workers do not import the main
    program again, so the main program needs no `if __name__ == "__main__"`. Workers exit when their standard input
    ends, so that none survives this process.

    Raises the first error of a task, and a UserError if a worker is killed.
    """
    first = list(islice(tasks, 2))
    tasks = chain(first, tasks)
    workers = workers or available_cores()
    if len(first) < 2 or workers == 1:
        for task in tasks:
            work(task)
            done(task)
        return
    lock, stop = Lock(), Event()
    processes: list[subprocess.Popen[bytes]] = []

    def serve_one() -> None:
        try:
            with subprocess.Popen(
                [*COMMAND, str(os.getpid())], stdin=PIPE, stdout=PIPE, env=worker_environment()
            ) as process:
                processes.append(process)
                assert process.stdin
                assert process.stdout
                pickle.dump(work, process.stdin)
                while not stop.is_set():
                    with lock:
                        task = next(tasks, None)
                    if task is None:
                        return
                    pickle.dump(task, process.stdin)
                    process.stdin.flush()
                    if error := pickle.load(process.stdout):
                        raise error
                    with lock:
                        done(task)
        except (EOFError, BrokenPipeError):
            raise UserError("a worker process was killed, perhaps for lack of memory: try fewer --workers") from None

    with ThreadPoolExecutor(workers) as threads:
        try:
            for future in as_completed([threads.submit(serve_one) for _ in range(workers)]):
                future.result()
        except BaseException:
            stop.set()
            for process in processes:
                process.kill()
            raise


def serve() -> None:
    """Run a worker process of `run_tasks`: read the function and then tasks from standard input; answer each task on
    standard output with None or its error."""
    Thread(target=exit_with_parent, args=[int(sys.argv[1])], daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent stops its workers
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries that print must not write between the answers
    with suppress(EOFError, BrokenPipeError):  # the parent has exited
        work = pickle.load(sys.stdin.buffer)
        while True:
            task = pickle.load(sys.stdin.buffer)
            try:
                error = work(task)
            except (UserError, MemoryError) as expected:
                error = expected
            except Exception:
                error = RuntimeError(traceback.format_exc())
            pickle.dump(error, answers)
            answers.flush()


def exit_with_parent(parent: int) -> None:
    """Wait in this process until the process `parent` (a PID) has exited, then exit at once, even in the middle of a
    task, which the next run repeats."""
    while os.getppid() == parent:
        time.sleep(0.1)
    os._exit(1)


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_environment() -> dict[str, str]:
    """Return the environment variables of a worker process: those of this process, its import path, and one core for
    `tokenizers`."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TOKENIZERS_PARALLELISM": "false"}
