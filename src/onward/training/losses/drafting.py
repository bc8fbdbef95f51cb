"""The loss of a draft head: it learns the distributions of its model on the model's own answers.

Shapes: T tokens, N draft tokens, D d_model.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from onward.data.windows import IGNORE_INDEX, Batch
from onward.generation.sampling import Sampling
from onward.model.decoder import Decoder
from onward.model.divided import rows_at_once
from onward.model.draft_head import DraftHead, embedded
from onward.text.tokenizer import Tokenizer
from onward.training.losses.completions import complete, completion_batch, prompts_of
from onward.training.losses.distillation import divergence
from onward.training.step.loss import Loss, Sums
from onward.transforms.draft_head import draft_head_of


class DraftingLoss(Loss):
    """The forward KL(model || draft head), averaged over `depth` consecutive draft tokens after each token of an
    answer: draft token k has a weight proportional to `falloff` ** k, and the weights sum to 1.

    The answers in the data are replaced by answers of the model itself, of at most `most` tokens, sampled at
    `temperature` or, in half of the batches, greedily. An example without a prompt (a text) is continued from a random
    position.
    """

    def __init__(self, depth: int, falloff: float, temperature: float, most: int, tokenizer: Tokenizer) -> None:
        self.weights = [falloff**k / sum(falloff**j for j in range(depth)) for k in range(depth)]
        self.temperature, self.most, self.tokenizer = temperature, most, tokenizer
        self.answers: list[dict[str, Any]] = []

    @property
    def samples(self) -> Sequence[Mapping[str, Any]]:
        return self.answers

    def prepare(self, model: Decoder, batches: Sequence[Batch]) -> list[Batch]:
        return [self.answered(model, batch) for batch in batches]

    def answered(self, model: Decoder, batch: Batch) -> Batch:
        """Return a batch with the model's own answers to the prompts of `batch`."""
        prompts, random = list[list[int]](), Random(batch.seed)
        for prompt, answer in prompts_of(batch):
            cut = random.randrange(min(len(answer), model.config.context_length // 2)) if len(prompt) == 1 else 0
            prompts.append(prompt + answer[:cut])
        seeds = [batch.seed * 1_000_003 + number for number in range(len(prompts))]
        sampling = Sampling(temperature=self.temperature * random.randrange(2))
        made = complete(model, prompts, seeds, sampling, self.most, frozenset(self.tokenizer.end_ids))
        text = self.tokenizer.decode
        self.answers = [{"prompt": text(list(one.prompt)), "text": text(one.tokens)} for one in made]
        tokens, targets, _ = completion_batch(made)
        return Batch(tokens, targets, seed=batch.seed).to(model.device)

    def __call__(self, model: Decoder, batch: Batch) -> Sums:
        head, chosen = draft_head_of(model), batch.targets != IGNORE_INDEX
        with torch.no_grad():
            hidden, vectors = model.hidden(batch.tokens, batch.positions), embedded(model, batch.tokens)
        state, sums, shared = hidden, list[Tensor](), list[Tensor]()
        for k, weight in enumerate(self.weights, 1):
            state = head(state[:, : hidden.size(1) - k], vectors[:, k:])
            here = chosen[:, k:]
            loss, overlap = self.of_states(model, head, state[here], hidden[:, k:][here])
            sums.append(weight * loss)
            shared.append(overlap)
        loss = torch.stack(sums).sum()
        return loss, loss.detach(), {f"accepted_{k}": overlap for k, overlap in enumerate(shared, 1)}

    def of_states(self, model: Decoder, head: DraftHead, states: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums, over N draft tokens, of the divergence and of the probability that the token is accepted,
        from the states (N, D) of the draft head and the hidden states (N, D) of the model."""
        parts = [*zip(*(x.split(rows_at_once(2 * model.config.vocab_size)) for x in (states, wanted)))]
        of_chunk = partial(compared, model, head)
        if len(parts) > 1:
            of_chunk = partial(checkpoint, of_chunk, use_reentrant=False)
        loss, overlap = torch.stack([torch.stack(of_chunk(s, w)) for s, w in parts]).sum(0)
        return loss, overlap.detach()

    def summarize(self, figures: dict[str, float]) -> dict[str, float]:
        """Return the figures with the acceptance rate of the first draft token at temperature 1, and the mean number of
        tokens per step of the model when `depth` tokens are drafted."""
        first, tokens, reached = 0.0, 1.0, 1.0
        for k in range(1, len(self.weights) + 1):
            reached *= (share := figures.pop(f"accepted_{k}"))
            first, tokens = share if k == 1 else first, tokens + reached
        return {**figures, "accepted": first, "tokens_per_step": tokens}


def compared(model: Decoder, head: DraftHead, states: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        teacher = model.logits(wanted).float()
    student = model.logits(head.norm(states)).float()
    overlap = torch.minimum(student.detach().softmax(-1), teacher.softmax(-1)).sum()
    return divergence(student, teacher, 0.0).sum(), overlap
