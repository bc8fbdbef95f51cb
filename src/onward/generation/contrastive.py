"""Contrastive search: likely tokens that do not repeat what the model has already represented.

Shapes: B prompts, K candidates, S tokens of the longest text, D d_model, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from onward.errors import UserError
from onward.generation.distribution import History, process_logits
from onward.generation.sampler import blame
from onward.generation.sampling import Sampling
from onward.generation.search import UNCHANGED, check_prompts, prefill, without
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
    """The tokens that continue each prompt, up to a stop token, which is not part of them, or `max_new_tokens`.

    Of the `k` likeliest tokens v, the one with the greatest (1 - alpha) p(v) - alpha max_j cos(h_v, h_j) comes next,
    where h are the last hidden states of v and of the tokens j before it (Su et al. 2022). `alpha` is between 0,
    which is greedy, and 1. `sampling` shapes p: penalties, bans, temperature and so on, by default not at all.
    `allowed` (V,) is False for tokens that are never chosen; before `min_new_tokens` no token of `stop_token_ids` is.
    All prompts are searched together, in k rows of one cache each. Values out of range and prompts that cannot
    be continued are a UserError.
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
        held, states = prefill(model, prompts, max_new_tokens, len(prompts) * k)
        past = torch.nn.utils.rnn.pad_sequence([torch.cat(pieces) for pieces in states], batch_first=True)
        past = F.pad(F.normalize(past.float(), dim=-1), (0, 0, 0, max_new_tokens))  # (B, S, D)
        last = torch.stack([pieces[-1][-1] for pieces in states])
        held.manager.reorder([row for row in range(len(prompts)) for _ in range(k)])
        live = list(range(len(prompts)))
        while live:
            texts, lengths = [prompts[i] + answers[i] for i in live], [len(prompts[i]) for i in live]
            logits = model.logits(last)
            few = len(answers[live[0]]) < min_new_tokens  # all have as many tokens
            mask = without(stop_token_ids, allowed, logits) if few else allowed
            p = process_logits(logits, [sampling] * len(live), History(texts, lengths), mask).softmax(-1)
            if not bool(p.isfinite().all()):
                raise blame(logits, texts, model)
            chances, tokens = p.topk(k)  # (B, K)
            # the token before comes again in all rows, so that no row has to become a copy of another
            pieces = [[text[-1], token] for text, row in zip(texts, tokens.tolist()) for token in row]
            starts = [len(text) - 1 for text in texts for _ in range(k)]
            hidden = held.forward(pieces, starts)[:, 1].unflatten(0, (-1, k))  # (B, K, D)
            likeness = F.normalize(hidden.float(), dim=-1) @ past.mT  # (B, K, S)
            size = torch.tensor([len(text) for text in texts], device=p.device)
            unseen = torch.arange(past.size(1), device=p.device) >= size[:, None, None]
            likeness = likeness.masked_fill(unseen, -math.inf).amax(-1)
            value = ((1 - alpha) * chances - alpha * likeness).masked_fill(chances == 0, -math.inf)
            best, each = value.argmax(-1), torch.arange(len(live), device=p.device)
            last = hidden[each, best]
            past[each, size] = F.normalize(last.float(), dim=-1)
            going = []
            for place, token in enumerate(tokens[each, best].tolist()):
                answer = answers[live[place]]
                if token not in stop_token_ids:
                    answer.append(token)
                    if len(answer) < max_new_tokens:
                        going.append(place)
            if 0 < len(going) < len(live):
                held.manager.reorder([place * k + i for place in going for i in range(k)])
            live, last, past = [live[place] for place in going], last[going], past[going]
    return answers
