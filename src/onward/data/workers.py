"""The same work on many tasks, in several processes that end with the one that started them."""

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

from onward.errors import UserError

T = TypeVar("T")
COMMAND = [sys.executable, "-P", "-c", "from onward.data.workers import serve; serve()"]


def spread(work: Callable[[T], None], tasks: Iterator[T], workers: int, done: Callable[[T], None]) -> None:
    """Do `work` on each task, in `workers` processes (0: one per core), and call `done` on it afterwards.

    Tasks are taken when a process is free, so that few are in memory; a single one is done in this process. Unlike
    those of `multiprocessing`, the processes do not run the main program again, so that it needs no guard, and they end
    when their input does, so that none is left behind when this process is killed.
    """
    first = list(islice(tasks, 2))
    tasks = chain(first, tasks)
    workers = workers or cores()
    if len(first) < 2 or workers == 1:
        for task in tasks:
            work(task)
            done(task)
        return
    lock, stop = Lock(), Event()
    processes: list[subprocess.Popen[bytes]] = []

    def serve_one() -> None:
        try:
            with subprocess.Popen([*COMMAND, str(os.getpid())], stdin=PIPE, stdout=PIPE, env=environment()) as process:
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
                    done(task)
        except (EOFError, BrokenPipeError):
            raise UserError("a worker was killed, perhaps for lack of memory: try fewer --workers") from None

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
    """Be a worker: read the work and then tasks from standard input, answer each with None or an error."""
    Thread(target=watch, args=[int(sys.argv[1])], daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, and the first one ends the others
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print must not come between the answers
    with suppress(EOFError, BrokenPipeError):  # the first one has ended
        work = pickle.load(sys.stdin.buffer)
        while True:
            task = pickle.load(sys.stdin.buffer)
            try:
                error = work(task)
            except (UserError, MemoryError) as known:
                error = known
            except Exception:
                error = RuntimeError(traceback.format_exc())
            pickle.dump(error, answers)
            answers.flush()


def watch(parent: int) -> None:
    """End this process when the one that started it has, so that no work is done twice."""
    while os.getppid() == parent:
        time.sleep(0.1)
    os._exit(1)


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment() -> dict[str, str]:
    """That of a worker: it finds what this process finds, and takes one core."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TOKENIZERS_PARALLELISM": "false"}
