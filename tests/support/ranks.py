"""Functions that several processes of one group run, as torchrun would start them."""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import distributed

CONTEXT = multiprocessing.get_context("forkserver")


def run_ranks(task: Callable[..., Any], *arguments: Any, count: int = 2) -> list[Any]:
    """What `task(*arguments)` returns or raises in each rank; None for a rank that was killed."""
    CONTEXT.set_forkserver_preload(["onward.training.run.run", "onward.training.failures", "pytest", "hypothesis"])
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # outlives the ranks
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


def received(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return None


def run_rank(rank: int, count: int, port: int, pipe: Connection, task: Callable[..., Any], arguments: Any) -> None:
    """Run a task as a rank, and send what came of it."""
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    values |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    os.environ.update({name: str(value) for name, value in values.items()})
    torch.set_num_threads(1)
    try:
        outcome = task(*arguments)
    except BaseException as error:
        outcome = error
    pipe.send(outcome)
