"""Constraints that other processes compute: the server waits for each for a limited time, and caches prepared
constraints.

Shapes: V vocabulary.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.base.limits import in_bytes
from onward.generation.constraint import Language, claims_of, pieces_of
from onward.generation.schema_check import SECONDS
from onward.generation.schemas import Claim
from onward.planning.tables import byte_count
from onward.serving.constraints import process
from onward.serving.constraints.process import Check, Mask, Task
from onward.serving.errors import ApiError
from onward.serving.server_options import RequestLimits
from onward.text.tokenizer import Tokenizer

STEP = 2.0  # seconds in which the mask of the next token must be computed
FAILED = 256  # largest number of remembered constraints that cannot be used
Key = tuple[Tokenizer, int, str, str, tuple[int, ...]]  # constraint: tokenizer, vocabulary size, kind, text, end tokens


class Constraints:
    """The constraints of all requests, used in the event loop. Keeps at most `limits.max_constraints` prepared
    constraints, each in a separate process, which ends if it takes too much time or memory."""

    def __init__(self, limits: RequestLimits) -> None:
        self.limits = limits
        self.parent = Parent()
        self.kept: OrderedDict[Key, Child] = OrderedDict()  # the least recently used first
        self.preparing: dict[Key, tuple[asyncio.Task[None], list[None]]] = {}  # list: an item per waiting request
        self.failed: OrderedDict[Key, str] = OrderedDict()
        self.threads = ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // 2), "onward-constraints")
        self.checks = ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // 2), "onward-checks")

    async def start(
        self, language: Language, tokenizer: Tokenizer, size: int, end: Collection[int]
    ) -> RemoteConstraint:
        """The constraint of an empty answer. Raises a UserError for a language that is too large, or that no tokens of
        the model can meet, and an ApiError with status 429 if too many constraints are in use."""
        key: Key = (tokenizer, size, language.what, language.source, tuple(sorted(end)))
        if (child := self.kept.get(key)) and child.failure:
            del self.kept[key]
            self.fail(key, child.failure)
        if key in self.failed:
            raise UserError(self.failed[key])
        if key not in self.kept:
            await self.shared(key, lambda: Child(language, tokenizer, size, end, self.limits))
        self.kept.move_to_end(key)
        return self.kept[key].first

    async def shared(self, key: Key, child: Callable[[], Child]) -> None:
        """Prepare a constraint once for all requests that wait for it; if no request waits any longer, end its
        process."""
        if key not in self.preparing:
            self.make_room()
            self.preparing[key] = asyncio.ensure_future(self.prepare(key, child())), []
        task, requests = self.preparing[key]
        requests.append(None)
        try:
            await asyncio.shield(task)
        finally:
            requests.pop()
            if not requests and not task.done():
                task.cancel()

    async def prepare(self, key: Key, child: Child) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self.threads, child.prepare, self.parent)
            self.kept[key] = child
        except UserError as error:
            child.end(str(error))
            self.fail(key, str(error))
            raise
        except asyncio.CancelledError:
            child.end("cancelled")
            raise
        finally:
            del self.preparing[key]

    async def problem(self, claims: Callable[[Sequence[int]], list[Claim]], tokens: Sequence[int]) -> str:
        """Return a sentence with the reason why a complete answer does not meet one of its claims; "" if it meets all.
        A separate process checks each, with limits on time and memory."""
        loop = asyncio.get_running_loop()
        for claim in await loop.run_in_executor(self.checks, claims, tokens):
            if problem := await loop.run_in_executor(self.checks, self.check, claim):
                return problem
        return ""

    def check(self, claim: Claim) -> str:
        what, memory = claim.schema.what, int(byte_count(self.limits.constraint_memory, "constraint_memory"))
        connection = self.parent.fork(lambda: Check(claim.schema.original, what, claim.text, memory))
        reason = f"takes more than {SECONDS:g} seconds"
        try:
            if connection.poll(2 * SECONDS + 1):
                return str(connection.recv())
        except (EOFError, OSError):
            reason += f" or {in_bytes(memory)}"
        finally:
            connection.close()
        return f"{what} is not met: the check of the answer {reason}: simplify it"

    def fail(self, key: Key, message: str) -> None:
        self.failed[key] = message
        if len(self.failed) > FAILED:
            self.failed.popitem(last=False)

    def make_room(self) -> None:
        """If there is no room for another constraint, end the process of the least recently used one that no answer
        uses; raise an ApiError if all are in use."""
        if len(self.kept) + len(self.preparing) < self.limits.max_constraints:
            return
        unused = next((key for key, child in self.kept.items() if not child.users), None)
        if unused is None:
            raise ApiError("Cannot prepare one more constraint, because too many are in use: try again later", 429)
        self.kept.pop(unused).end("removed")

    def close(self) -> None:
        for threads in self.threads, self.checks:
            threads.shutdown(wait=False, cancel_futures=True)
        for child in self.kept.values():
            child.end("the server ends")
        self.parent.close()


class Parent:
    """The process that forks the children. It starts with the first constraint, and again if it has ended."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.connection: Connection | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.vocabularies: list[tuple[Tokenizer, int]] = []  # vocabularies that the process has, in this order

    def fork(self, task: Callable[[], Task | Check]) -> Connection:
        """Start a child for a task; return the connection to it."""
        with self.lock:
            if self.process and self.process.poll() is not None:  # the parent process has ended
                self.close()
            own, other = Pipe()
            connection = self.connection or self.started()
            connection.send(task())
            reduction.send_handle(connection, other.fileno(), None)  # type: ignore[arg-type]  # for Windows
            other.close()
            return own

    def vocabulary(self, tokenizer: Tokenizer, size: int) -> int:
        """The index of the vocabulary in the parent process; called by a task of `fork`."""
        if (tokenizer, size) not in self.vocabularies:
            assert self.connection is not None
            self.connection.send(pieces_of(tokenizer, size))
            self.vocabularies.append((tokenizer, size))
        return self.vocabularies.index((tokenizer, size))

    def started(self) -> Connection:
        self.connection, other = Pipe()
        command = [sys.executable, "-m", process.__name__, str(other.fileno())]
        null = subprocess.DEVNULL
        self.process = subprocess.Popen(command, pass_fds=[other.fileno()], stdin=null, stderr=null)
        other.close()
        return self.connection

    def close(self) -> None:
        if self.connection and self.process:
            self.connection.close()  # ends the process
            self.process.wait()
        self.connection, self.process, self.vocabularies = None, None, []


class Child:
    """The process of one constraint over the token ids below `size`. `failure` is the reason why it has ended, `users`
    are the constraints in use, and `first` is the constraint of an empty answer."""

    def __init__(
        self, language: Language, tokenizer: Tokenizer, size: int, end: Collection[int], limits: RequestLimits
    ) -> None:
        self.language, self.tokenizer, self.size, self.end_tokens = language, tokenizer, size, frozenset(end)
        self.spaced, self.seconds, self.lock = (
            list(pieces_of(tokenizer, size)[1]),
            limits.constraint_time,
            threading.Lock(),
        )
        self.memory = int(byte_count(limits.constraint_memory, "constraint_memory"))
        self.connection: Connection | None = None
        self.pid, self.failure = 0, ""
        self.users: WeakSet[RemoteConstraint] = WeakSet()
        self.ids, self.unused = count(1), deque[int]()  # ids of states, and ids to drop with the next message

    def prepare(self, parent: Parent) -> None:
        """Start the process and wait for it. Raises a UserError for a constraint that is too large, or cannot be
        met."""
        with self.lock:
            if self.failure:  # no request waits for it any longer
                raise UserError(self.failure)
            task = self.language.what, self.language.source, tuple(self.end_tokens), self.memory
            self.connection = parent.fork(lambda: Task(parent.vocabulary(self.tokenizer, self.size), *task))
            with suppress(EOFError):  # `reply` reports it
                self.pid = self.connection.recv()
            mask = self.reply(self.seconds, f"preparing it takes more than {self.seconds:g} seconds")
            self.first = RemoteConstraint(self, State(0), *mask)

    def reply(self, seconds: float, reason: str) -> tuple[np.ndarray, bool]:
        """Wait for a mask (V,), and whether the answer is complete. Raises a UserError if the process
        sends a message instead, or ends, or takes too long."""
        assert self.connection is not None
        given: Mask | str | None = None
        try:
            if self.connection.poll(seconds):
                given = self.connection.recv()
        except (EOFError, OSError):
            reason = f"it takes more memory than {in_bytes(self.memory)}"
        if isinstance(given, str):
            raise UserError(given)
        if given is None:
            self.end(f"{self.language.what} cannot be used: it is too large, because {reason}: simplify it")
            raise UserError(self.failure)
        return np.unpackbits(np.frombuffer(given[0], np.uint8), count=self.size).astype(bool), given[1]

    def after(self, source: int, target: int, token: int) -> tuple[np.ndarray, bool]:
        """Create the state `target`, which follows the state `source` after a token; return the `reply`."""
        with self.lock:
            if self.failure or self.connection is None:
                raise UserError(self.failure)
            with suppress(OSError):  # the child has ended; `reply` reports it
                while self.unused:
                    self.connection.send(self.unused.popleft())
                self.connection.send((source, target, token))
            return self.reply(STEP, f"a token takes more than {STEP:g} seconds")

    def end(self, failure: str) -> None:
        if self.pid and not self.failure:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.failure = self.failure or failure


class State:
    """A state in a child, and the number of constraints that are in it."""

    def __init__(self, number: int) -> None:
        self.number, self.users = number, 0


class RemoteConstraint:
    """The constraint of one answer, whose state is in a child; implements `generation.request.Constraint`, as
    `TextConstraint` does."""

    def __init__(self, child: Child, state: State, mask: np.ndarray, full: bool) -> None:
        self.child, self.state, self.mask, self.full = child, state, mask, full
        state.users += 1

    def allowed(self) -> Tensor:
        return torch.from_numpy(self.mask)

    def accept(self, token: int) -> bool:
        if token in self.child.end_tokens or not self.mask[token]:
            return False
        state = self.state if self.state.users == 1 else State(next(self.child.ids))
        self.mask, self.full = self.child.after(self.state.number, state.number, token)
        if state is not self.state:
            self.state.users -= 1
            state.users += 1
            self.state = state
        return not self.full

    def copy(self) -> RemoteConstraint:
        return RemoteConstraint(self.child, self.state, self.mask, self.full)

    def after(self, text: str) -> RemoteConstraint:
        """The constraint of a request, for an answer that is appended to `text`."""
        result = self.copy()
        if not text:
            result.mask = self.mask.copy()
            result.mask[self.child.spaced] = False
        self.child.users.add(result)
        return result

    def claims(self, tokens: Sequence[int]) -> list[Claim]:
        return claims_of(self.child.language.schema, map(self.child.tokenizer.token_bytes, tokens))

    def __del__(self) -> None:
        self.state.users -= 1
        if not self.state.users:
            self.child.unused.append(self.state.number)
