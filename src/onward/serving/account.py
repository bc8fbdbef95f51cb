"""The account of a request: all work that the request causes, counted among the pending work of the server, and ended
together with the request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from onward.serving.errors import ApiError
from onward.serving.server_options import RequestLimits


class Account:
    """The work of one request: `size` answers, or one piece of other work, for a `client` (an API key or an address).
    The callbacks `ends` run at the end of the request, to cancel unfinished work."""

    def __init__(self, accounts: Accounts, client: str) -> None:
        self.accounts, self.client, self.size = accounts, client, 0
        self.ends = ExitStack()
        accounts.coming.add(self)
        self.ends.callback(self.arrive)

    def arrive(self) -> None:
        """Record that the request's job has reached the engines' thread, or that the request ended without one."""
        self.accounts.coming.discard(self)

    def grow(self, size: int) -> None:
        """Count this work as `size` answers. Raises an ApiError with status 429 if too many answers are pending."""
        self.accounts.check(self.client, size - self.size)
        self.accounts.add(self, size - self.size)


class Accounts:
    """The accounts of all requests in progress. At most `num_rows()` answers are generated at a time, and
    `limits.max_queue` wait. Above this total, only a client with at most the fraction 1 - `limits.share` of it may add
    answers, up to twice the total, so that no other client can lock it out."""

    def __init__(self, limits: RequestLimits, num_rows: Callable[[], int]) -> None:
        self.max_queue, self.share, self.num_rows = limits.max_queue, limits.share, num_rows
        self.pending = 0  # number of pending answers and other pieces of work
        self.of_client = Counter[str]()
        self.coming = set[Account]()  # accounts of requests that were read but have not reached the engines' thread

    @property
    def most(self) -> int:
        return self.num_rows() + self.max_queue

    @contextmanager
    def open(self, client: str) -> Iterator[Account]:
        """A context manager: the account of a request until the end of the block. Raises an ApiError with status 429 if
        too many answers are pending."""
        account = Account(self, client)
        try:
            with account.ends:
                account.grow(1)
                yield account
        finally:
            self.add(account, -account.size)

    def check(self, client: str, more: int) -> None:
        own, pending = self.of_client[client] + more, self.pending + more
        within_share = own <= (1 - self.share) * self.most and pending <= 2 * self.most
        if pending > self.most and not within_share:
            raise ApiError(
                f"Cannot wait for more answers, because {self.pending} are pending already: try again later", 429
            )

    def add(self, account: Account, more: int) -> None:
        account.size += more
        self.pending += more
        self.of_client[account.client] += more
        if not self.of_client[account.client]:
            del self.of_client[account.client]
