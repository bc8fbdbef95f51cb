"""Beam search: finds likely continuations with a fixed number of hypotheses at a time.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from onward.base.errors import UserError
from onward.generation.distribution import History, process_logits
from onward.generation.failures import no_distribution_error
from onward.generation.options import MAX_ANSWERS
from onward.generation.sampling import Sampling
from onward.generation.search.search import UNCHANGED, SearchRows, check_prompts, mask_without
from onward.model.decoder import Decoder, without_dropout

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True)
class Hypothesis:
    """A continuation of a prompt that beam search returns, with its score."""

    tokens: list[int]  # without the stop token
    score: float  # (logprob - diversity penalties) / (number of tokens, stop token included) ** length_penalty
    logprob: float  # log-probability of the tokens, stop token included, after `sampling`
    finished: bool  # whether the hypothesis ended with a stop token rather than at max_new_tokens


@dataclass
class Beam:
    """A continuation of a prompt that beam search still extends, with its row in the cache."""

    row: int  # cache row of the beam; until rows are reordered, the row of the beam that it extends
    tokens: list[int]
    total: float = 0.0  # log-probability minus the diversity penalties
    logprob: float = 0.0


@dataclass(frozen=True)
class StoppingRules:
    """The options of beam search that decide when a hypothesis ends and when the search ends; see `beam_search`."""

    group_size: int  # number of beams in a group
    stop_token_ids: frozenset[int]
    max_new_tokens: int
    length_penalty: float
    early_stopping: EarlyStopping

    def ended(self, running: list[Beam], finished: list[Hypothesis]) -> bool:
        """Whether a group has ended; `running` and `finished` are best first."""
        if not running or len(finished) < self.group_size:
            return not running
        longest = self.early_stopping == "never" and self.length_penalty > 0
        best = running[0].total / (self.max_new_tokens if longest else len(running[0].tokens)) ** self.length_penalty
        return self.early_stopping is True or best <= finished[-1].score


@dataclass
class BeamGroup:
    """A group of beams of one prompt, which compete with each other, and the hypotheses that these beams finished."""

    running: list[Beam]
    finished: list[Hypothesis] = field(default_factory=list)  # best first

    def advance(self, log_p: Tensor, penalty: Tensor, rules: StoppingRules) -> list[int]:
        """Extend the beams of the group by one token. `log_p` (B, V) are the log-probabilities of the next token of all
        cache rows; `penalty` (V,), the diversity penalty, is subtracted; `rules` say when hypotheses and the search
        end.

        Of the `group_size` likeliest candidates, those that end with a stop token or at `max_new_tokens` become
        finished hypotheses; the `group_size` likeliest others become the running beams, or none once the search has
        ended. Returns the new tokens of finished and running hypotheses.
        """
        if not self.running:
            return []
        sources, self.running, length = self.running, [], len(self.running[0].tokens) + 1
        new_tokens: list[int] = []
        plain = log_p[[beam.row for beam in sources]]
        totals = (plain + plain.new_tensor([beam.total for beam in sources])[:, None] - penalty).flatten()
        enough = (1 + len(rules.stop_token_ids)) * rules.group_size  # at least group_size of them have no stop token
        best = totals.topk(min(enough, len(totals)))
        lasts = plain.flatten()[best.indices].tolist()
        for rank, (total, index, last) in enumerate(zip(best.values.tolist(), best.indices.tolist(), lasts)):
            if total == -math.inf:
                break
            source, token = sources[index // log_p.size(1)], index % log_p.size(1)
            ended, logprob = token in rules.stop_token_ids, source.logprob + last
            runs = not ended and length < rules.max_new_tokens
            if (len(self.running) if runs else rank) >= rules.group_size:
                continue
            new_tokens.append(token)
            tokens = source.tokens if ended else [*source.tokens, token]
            if runs:
                self.running.append(Beam(source.row, tokens, total, logprob))
            else:
                self.finished.append(Hypothesis(tokens, total / length**rules.length_penalty, logprob, ended))
        self.finished = ranked(self.finished)[: rules.group_size]
        if rules.ended(self.running, self.finished):
            self.running = []
        return new_tokens


def ranked(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    return sorted(hypotheses, key=lambda hypothesis: -hypothesis.score)


@torch.inference_mode()
def beam_search(
    model: Decoder,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling = UNCHANGED,
    min_new_tokens: int = 0,
    beams: int = 4,
    groups: int = 1,
    diversity: float = 0.0,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    n: int = 1,
    stop_token_ids: Collection[int] = (),
    allowed: Tensor | None = None,
) -> list[list[Hypothesis]]:
    """Return the `n` best hypotheses for each prompt, best first; fewer if fewer exist.

    The score of a hypothesis is its log-probability / number of new tokens ** `length_penalty`; a greater penalty
    favors longer hypotheses. A hypothesis ends with a token of `stop_token_ids` or at `max_new_tokens`. Once a group
    has as many finished hypotheses as beams, its search ends at once (`early_stopping` True), or as soon as no running
    hypothesis can beat the worst finished one at its present length (False), or at any length ("never", which is exact
    if the penalty is at least 0). The rules are those of transformers' `generate(num_beams=beams)`.

    With `groups`, each step extends the groups in turn, and `diversity` is subtracted from the score of a token for
    each time that an earlier group chose it in this step (diverse beam search with Hamming diversity, Vijayakumar et
    al. 2016); each group has beams / groups beams.

    `sampling` changes the model's log-probabilities (penalties, bans, temperature and so on), which are not normalized
    again; by default they are not changed. `allowed` (V,) is False for tokens that are never chosen; before
    `min_new_tokens` no token of `stop_token_ids` is chosen. All prompts are searched together, in `beams` rows of one
    cache each. Raises a UserError for invalid options.
    """
    for sentence, wrong in {
        f"beams is {beams}: it must be from 1 to {MAX_ANSWERS}": not 1 <= beams <= MAX_ANSWERS,
        f"n is {n}: it must be from 1 to beams, {beams}": not 1 <= n <= beams,
        f"groups is {groups}: beams, {beams}, must be a multiple of it": groups < 1 or beams % groups,
        f"diversity is {diversity}: it must be at least 0": not 0 <= diversity < math.inf,
        "Cannot use diversity, because it acts between groups: make groups more than 1": diversity and groups == 1,
        # with a greater penalty, the power of the length could exceed fp64
        f"length_penalty is {length_penalty}: it must be from -50 to 50": not abs(length_penalty) <= 50,
        f"early_stopping is {early_stopping!r}, not True, False or 'never'": early_stopping
        not in (True, False, "never"),
    }.items():
        if wrong:
            raise UserError(sentence)
    check_prompts(model, prompts, sampling, max_new_tokens, min_new_tokens, stop_token_ids)
    if not (prompts and max_new_tokens):
        return [[Hypothesis([], 0.0, 0.0, False)] for _ in prompts]
    rules = StoppingRules(beams // groups, frozenset(stop_token_ids), max_new_tokens, length_penalty, early_stopping)
    with without_dropout(model):
        search_rows = SearchRows(model, len(prompts) * beams, max(map(len, prompts)) + max_new_tokens)
        hidden = search_rows.read(prompts)
        rows = [(prompt, Beam(row, [])) for row, prompt in enumerate(prompts)]
        searches = [[BeamGroup([beam]) for _ in range(groups)] for _, beam in rows]
        while rows:
            logits = model.logits(hidden)
            texts, lengths = [prompt + beam.tokens for prompt, beam in rows], [len(prompt) for prompt, _ in rows]
            too_short = len(rows[0][1].tokens) < min_new_tokens  # all have the same number of tokens
            mask = mask_without(stop_token_ids, allowed, logits) if too_short else allowed
            log_p = process_logits(
                logits.float().log_softmax(-1), [sampling] * len(rows), History(texts, lengths), mask
            )
            for search in searches:
                penalty = torch.zeros_like(log_p[0])
                for group in search:
                    for token in group.advance(log_p, penalty, rules):
                        penalty[token] += diversity
            no_candidate = any(not (group.running or group.finished) for search in searches for group in search)
            if no_candidate or bool(log_p.isnan().any()):
                raise no_distribution_error(logits, texts, model)
            rows = [(p, beam) for p, search in zip(prompts, searches) for group in search for beam in group.running]
            if rows:
                search_rows.reorder([beam.row for _, beam in rows])
                for row, (_, beam) in enumerate(rows):
                    beam.row = row
                hidden = search_rows.read([prompt + beam.tokens for prompt, beam in rows])
    return [ranked([h for group in search for h in group.finished])[:n] for search in searches]
