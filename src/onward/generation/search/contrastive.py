"""Contrastive search: likely tokens whose hidden states differ from those of earlier tokens.

Shapes: B prompts, K candidates, S tokens of the longest text, D d_model, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from onward.base.errors import UserError
from onward.generation.distribution import History, process_logits
from onward.generation.failures import no_distribution_error
from onward.generation.sampling import Sampling
from onward.generation.search.search import UNCHANGED, check_prompts, mask_without, prefill
from onward.model.decoder import Decoder, without_dropout


@torch.inference_mode()
def contrastive_search(
    model: Decoder,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    alpha: float = 0.6,
    k: int = 4,
    sampling: Sampling = UNCHANGED,
    min_new_tokens: int = 0,
    stop_token_ids: Collection[int] = (),
    allowed: Tensor | None = None,
) -> list[list[int]]:
    """Continue each prompt by contrastive search. Returns the new tokens of each prompt, up to a stop token, which is
    not part of them, or `max_new_tokens`.

    The next token is the one of the `k` likeliest tokens v with the greatest (1 - alpha) p(v) - alpha max_j cos(h_v,
    h_j), where h are the hidden states of v and of the tokens j before it (Su et al. 2022). `alpha` is from 0, which is
    greedy, to 1.

    `sampling` changes p (penalties, bans, temperature and so on); by default p is not changed. `allowed` (V,) is False
    for tokens that are never chosen; before `min_new_tokens` no token of `stop_token_ids` is chosen. All prompts are
    searched together, in k rows of one cache each. Raises a UserError for values out of range and for prompts that
    cannot be continued.
    """
    if not 0 <= alpha <= 1:
        raise UserError(f"alpha is {alpha}: it must be between 0 and 1")
    if k < 1:
        raise UserError(f"k is {k}: it must be at least 1")
    check_prompts(model, prompts, sampling, max_new_tokens, min_new_tokens, stop_token_ids)
    answers: list[list[int]] = [[] for _ in prompts]
    if not (prompts and max_new_tokens):
        return answers
    k = min(k, model.config.vocab_size)
    with without_dropout(model):
        search_rows, states = prefill(model, prompts, max_new_tokens, len(prompts) * k)
        past = torch.nn.utils.rnn.pad_sequence([torch.cat(pieces) for pieces in states], batch_first=True)
        past = F.pad(F.normalize(past.float(), dim=-1), (0, 0, 0, max_new_tokens))  # (B, S, D)
        last = torch.stack([pieces[-1][-1] for pieces in states])
        search_rows.manager.reorder([row for row in range(len(prompts)) for _ in range(k)])
        live = list(range(len(prompts)))
        while live:
            texts, lengths = [prompts[i] + answers[i] for i in live], [len(prompts[i]) for i in live]
            logits = model.logits(last)
            too_short = len(answers[live[0]]) < min_new_tokens  # all have as many tokens
            mask = mask_without(stop_token_ids, allowed, logits) if too_short else allowed
            p = process_logits(logits, [sampling] * len(live), History(texts, lengths), mask).softmax(-1)
            if not bool(p.isfinite().all()):
                raise no_distribution_error(logits, texts, model)
            probabilities, tokens = p.topk(k)  # (B, K)
            # every row also feeds the token before, so that no row of the cache has to be copied
            pieces = [[text[-1], token] for text, row in zip(texts, tokens.tolist()) for token in row]
            starts = [len(text) - 1 for text in texts for _ in range(k)]
            hidden = search_rows.forward(pieces, starts)[:, 1].unflatten(0, (-1, k))  # (B, K, D)
            similarity = F.normalize(hidden.float(), dim=-1) @ past.mT  # (B, K, S)
            size = torch.tensor([len(text) for text in texts], device=p.device)
            unseen = torch.arange(past.size(1), device=p.device) >= size[:, None, None]
            similarity = similarity.masked_fill(unseen, -math.inf).amax(-1)
            value = ((1 - alpha) * probabilities - alpha * similarity).masked_fill(probabilities == 0, -math.inf)
            best, batch = value.argmax(-1), torch.arange(len(live), device=p.device)
            last = hidden[batch, best]
            past[batch, size] = F.normalize(last.float(), dim=-1)
            continuing = []
            for index, token in enumerate(tokens[batch, best].tolist()):
                answer = answers[live[index]]
                if token not in stop_token_ids:
                    answer.append(token)
                    if len(answer) < max_new_tokens:
                        continuing.append(index)
            if 0 < len(continuing) < len(live):
                search_rows.manager.reorder([index * k + i for index in continuing for i in range(k)])
            live, last, past = [live[index] for index in continuing], last[continuing], past[continuing]
    return answers
