"""Run functions in the processes of a group, set up as by torchrun."""

import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed

from support.forked import CONTEXT


def run_ranks(task: Callable[..., Any], *arguments: Any, count: int = 2) -> list[Any]:
    """The result or exception of `task(*arguments)` in each rank; None for a rank that was killed."""
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # must outlive the ranks
    pipes, processes = [], []
    for rank in range(count):
        pipe, end = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=run_rank, args=(rank, count, store.port, end, task, arguments))
        process.start()
        end.close()
        pipes.append(pipe)
        processes.append(process)
    outcomes = [received(pipe) for pipe in pipes]
    for process in processes:
        process.join()
    return outcomes


class Ranks:
    """Processes of one group that wait for tasks, since starting new ones takes seconds."""

    def __init__(self, count: int) -> None:
        store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.store, self.pipes, self.processes = store, [], []
        for rank in range(count):
            pipe, end = CONTEXT.Pipe()
            process = CONTEXT.Process(target=serve_rank, args=(rank, count, store.port, end), daemon=True)
            process.start()
            end.close()
            self.pipes.append(pipe)
            self.processes.append(process)

    def run(self, task: Callable[..., Any], *arguments: Any) -> list[Any]:
        """The result of `task(*arguments)` in each rank; raises an error of a rank."""
        for pipe in self.pipes:
            pipe.send((task, arguments))
        outcomes = [received(pipe) for pipe in self.pipes]
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join()


def serve_rank(rank: int, count: int, port: int, pipe: Connection) -> None:
    """Run incoming tasks until there are no more."""
    begin_rank(rank, count, port)
    while True:
        try:
            task, arguments = pipe.recv()
        except EOFError:
            return
        try:
            outcome = task(*arguments)
        except Exception as error:
            outcome = error
        pipe.send(outcome)


def received(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return None


def run_rank(rank: int, count: int, port: int, pipe: Connection, task: Callable[..., Any], arguments: Any) -> None:
    """Run a task as a rank, and send its result or exception."""
    begin_rank(rank, count, port)
    try:
        outcome = task(*arguments)
    except BaseException as error:
        outcome = error
    pipe.send(outcome)


def begin_rank(rank: int, count: int, port: int) -> None:
    """Set the environment variables that torchrun sets for a rank."""
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    values |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    os.environ.update({name: str(value) for name, value in values.items()})
    torch.set_num_threads(1)
