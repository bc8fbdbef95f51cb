"""The default draft: looks up earlier text, and proposes it only if this saves time. Each request has an account of the
steps that its proposals saved and cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from onward.base.own import own_parts
from onward.config.decoder import DecoderConfig, at
from onward.generation.cache.manager import CacheManager
from onward.generation.drafts.costs import cost_of, rounds_rows_apart
from onward.generation.drafts.lookup import LookupDraft
from onward.generation.drafts.proposal import Draft, Proposal
from onward.generation.request import Request
from onward.model.cache import KVCache
from onward.model.decoder import Decoder
from onward.model.rows import OPEN

LENGTHS = 3, 7  # proposal lengths: only two, since a step is compiled for each
OF_INTEGERS = (2,)  # proposal lengths if rounds_rows_apart
BEGIN = 0.5  # steps that a request may lose at first
SHARE = 0.01  # steps that a request may lose for each token of its answer
MOST = 2.0  # greatest balance, so that drafting ends soon after a text is no longer copied
MOST_ROWS = 4  # maximum number of decoding requests: with more, a step leaves no time for draft tokens
SMALLEST = 4_000_000  # number of weights below which overhead around the matmuls dominates a step


def default_draft(model: Decoder, cache: KVCache | None) -> PacedDraft | None:
    """Return an engine's default draft: lookup, used while it saves time. None for recurrent layers, since a row would
    have to keep a state for each draft token; for parts from outside the package, whose costs are not known; for small
    models, whose steps take little longer than a proposal; and for a `cache` that cannot add a whole proposal in one
    call. If `rounds_rows_apart`, few tokens are proposed, to one request at a time."""
    config = model.config
    layers, chunk = range(config.n_layers), cache.chunk if cache else config.context_length
    if chunk <= LENGTHS[-1] or is_small(config) or own_parts(config):
        return None
    if any(at(config.attention, layer).states(config) for layer in layers):
        return None
    lookup = LookupDraft(LENGTHS[-1], ngram=4, least=2)
    if rounds_rows_apart(model):
        return PacedDraft(lookup, cost_of(model), lengths=OF_INTEGERS, most_rows=1)
    return PacedDraft(lookup, cost_of(model))


def is_small(config: DecoderConfig) -> bool:
    """Return whether a model of this shape is so small that a step takes little longer than a proposal: then nothing is
    drafted by default, neither by lookup nor by a draft head saved with the model."""
    layer = config.d_model * (4 * config.d_model + 3 * config.d_ff)
    return config.n_layers * layer + config.d_model * config.vocab_size < SMALLEST


@dataclass
class Account:
    """The balance of a request, in plain decoding steps, and its last proposal."""

    balance: float = BEGIN
    level: int = 0  # index in `lengths` of the next proposal's length
    tokens: int = 0  # tokens of the answer at the last step
    proposed: int = 0  # tokens of the last proposal
    accepted: int = 0  # the request's accepted tokens before the last proposal
    cost: float = 0.0  # extra cost of verifying the last proposal, in plain steps


class PacedDraft:
    """A draft that forwards the proposals of another `draft` while this saves time.

    For one request, verifying K tokens takes 1 + `cost` * K times as long as a step without draft tokens; each accepted
    token saves a step. A proposal has one of `lengths` tokens; nothing is proposed while more than `most_rows` requests
    decode. A request whose balance is used up decodes plainly until the SHARE that each of its tokens earns allows
    another attempt, so that refused proposals cost at most about SHARE of its time. Costs are estimated, not measured,
    so that a request takes the same steps whenever it is repeated.
    """

    manager: CacheManager | None = None

    def __init__(self, draft: Draft, cost: float, lengths: Sequence[int] = LENGTHS, most_rows: int = MOST_ROWS) -> None:
        self.draft, self.cost, self.most_rows = draft, cost, most_rows
        self.lengths = [n for n in lengths if n <= draft.num_draft_tokens] or [draft.num_draft_tokens]
        self.num_draft_tokens = self.lengths[-1]
        self.accounts: WeakKeyDictionary[Request, Account] = WeakKeyDictionary()

    def start(self, rows: int, length: int, chunk: int, vocab_size: int) -> None:
        """Prepare the draft; see `Draft.start`."""
        self.draft.start(rows, length, chunk, vocab_size)
        self.manager = self.draft.manager

    def propose(self, requests: Sequence[Request], room: Sequence[int]) -> list[Proposal]:
        """Return a proposal of one of `lengths` tokens for each request for which this saves time, else an empty
        one."""
        accounts = [self.settled(request) for request in requests]
        wanted = [self.length(*each) for each in zip(requests, accounts, room)]
        if len(requests) > self.most_rows or not any(wanted):
            return [Proposal() for _ in requests]
        found = self.draft.propose(requests, wanted)
        found = [proposal if len(proposal.tokens) == n else Proposal() for proposal, n in zip(found, wanted)]
        if width := max(len(proposal.tokens) for proposal in found):
            rows = len(requests)  # every row is padded to the longest proposal
            excess = self.cost * rows * width / (1 + self.cost * (rows - 1))
            # rows without a proposal wait, too: the rows that have one bear this cost
            share = rows / sum(1 for proposal in found if proposal.tokens)
            for account, request, proposal in zip(accounts, requests, found):
                account.proposed, account.accepted = len(proposal.tokens), request.num_accepted
                account.cost = share * excess
        return found

    def settled(self, request: Request) -> Account:
        """Return the account of a request, with its last step counted."""
        account = self.accounts.setdefault(request, Account())
        new, account.tokens = len(request.tokens) - account.tokens, len(request.tokens)
        account.balance += SHARE * new
        if account.proposed:
            kept = request.num_accepted - account.accepted
            account.balance += kept - account.cost
            most = len(self.lengths) - 1
            account.level = (
                min(account.level + 1, most) if kept == account.proposed else 0 if kept == 0 else account.level
            )
            account.proposed = 0
        account.balance = min(account.balance, MOST)
        return account

    def length(self, request: Request, account: Account, room: int) -> int:
        """Return the number of tokens to propose next for a request: 0 if its balance is used up, if no length fits, or
        if a logits processor, an open trace or an edit would see tokens that may be refused."""
        if account.balance < 0 or request.sampling.processors or OPEN.get():
            return 0
        return max((n for n in self.lengths[: account.level + 1] if n <= room), default=0)
