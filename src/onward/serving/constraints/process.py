"""The processes of constraints. One parent process holds the vocabularies. It forks a child for each constraint, which
prepares the constraint and then computes the masks of answers, and a child for each check of an answer. Does not import
torch.

Shapes: V vocabulary.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jsonschema  # noqa: F401  # once, before it forks
import numpy as np

from onward.base.errors import UserError
from onward.generation.constraint import Language, TextConstraint, Vocabulary, started
from onward.generation.schema_check import SECONDS, Conformance

Mask = tuple[bytes, bool]  # the bits of a mask (V,), and whether the answer is complete


@dataclass(frozen=True)
class Task:
    """A constraint that a child prepares, as `constraint.started` does: `vocabulary` is the index of the vocabulary in
    the order in which the parent process got them, `memory` the number of bytes that the child may allocate."""

    vocabulary: int
    what: str
    text: str
    end: tuple[int, ...]
    memory: int

    def run(self, connection: Connection, vocabularies: Sequence[Vocabulary]) -> None:
        answer(connection, self, vocabularies[self.vocabulary])


@dataclass(frozen=True)
class Check:
    """A text that a child checks against the JSON schema `schema`. `what` is the schema's name in messages, and
    `memory` the number of bytes that the check may take."""

    schema: Any
    what: str
    text: str
    memory: int

    def run(self, connection: Connection, vocabularies: Sequence[Vocabulary]) -> None:
        check(connection, self)


def serve(connection: Connection) -> None:
    """Receive vocabularies, as the arguments of Vocabulary, and tasks, each with the connection of the child that runs
    it."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children do not become zombies
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # sent by the terminal: the server must end first
    vocabularies: list[Vocabulary] = []
    while True:
        try:
            given = connection.recv()
        except EOFError:
            return
        if isinstance(given, tuple):
            vocabularies.append(Vocabulary(*given))
            continue
        own = Connection(reduction.recv_handle(connection))
        if not os.fork():
            connection.close()
            os.nice(5)  # so that a preparation does not delay the engine's steps
            try:
                given.run(own, vocabularies)
            finally:
                os._exit(0)
        own.close()


def answer(connection: Connection, task: Task, vocab: Vocabulary) -> None:
    """Prepare a constraint, and send its masks: the message (source, target, token) creates the state `target`, which
    follows the state `source` after a token; a single number drops a state. The reply to a triple is a Mask, or the
    message of a UserError."""
    limit_memory(task.memory)
    connection.send(os.getpid())
    states: dict[int, TextConstraint] = {}
    given: Any = (-1, 0, -1)  # creates the state before the first token
    while True:
        try:
            if isinstance(given, int):
                states.pop(given, None)
            else:
                source, target, token = given
                if target == 0:
                    state = started(Language(task.what, task.text), vocab, task.end)
                else:
                    state = states.pop(source) if source == target else states[source].copy()
                    state.accept(token)
                states[target] = state
                connection.send((np.packbits(state.mask).tobytes(), state.full))
        except UserError as error:
            connection.send(str(error))
        except MemoryError:
            return
        try:
            given = connection.recv()
        except EOFError:  # the server has ended, or no longer needs this constraint
            return


def check(connection: Connection, task: Check) -> None:
    """Send a sentence with the reason why the text does not conform to the schema, "" if it conforms; nothing if memory
    runs out."""
    limit_memory(task.memory)
    seconds = math.ceil(SECONDS) + 1  # in case the check itself does not end in time
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    with suppress(MemoryError):
        connection.send(Conformance(task.schema, task.what).problem(task.text))


def limit_memory(more: int) -> None:
    """Let this process allocate at most `more` further bytes."""
    if sys.platform == "linux":  # on other systems only the time is limited
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
