"""EVA: initializes adapters with the directions in which the inputs of their layers vary most (Paischer et al. 2024).

Shapes: N rows, I inputs, O outputs, R rank, B windows, T tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onward.base.errors import UserError
from onward.config.lora import EVA, LoRA
from onward.model.decoder import Decoder, without_dropout
from onward.transforms.lora import adapters_of, remove_adapters

SEED = 42  # seed of the randomized SVD, as in PEFT
Rows = tuple[Tensor, Tensor | None, Tensor]  # tokens (B, T), positions (B, T), mask of the tokens to use (B, T)


class Components:
    """The first `count` principal components of vectors (I,), computed incrementally from batches (N, I) (Ross et al.
    2008): an SVD of each batch together with the previous components, with a correction for the shift of the mean."""

    def __init__(self, count: int) -> None:
        self.count, self.seen, self.squares = count, 0, 0.0
        self.mean = self.vectors = self.values = torch.zeros(0)  # (I,), (count, I), (count,)
        self.same = torch.zeros(count)  # cosine similarity of each component before and after the last batch

    def add(self, x: Tensor) -> None:
        """Update the components with the vectors x (N, I); a batch with fewer vectors than components is skipped."""
        if len(x) < self.count:
            return
        mean, before = x.mean(0), self.vectors
        rows = x - mean
        squares = float(rows.double().square().sum())
        total = self.seen + len(x)
        if self.seen:
            shift = self.mean - mean
            weight = self.seen * len(x) / total
            squares += self.squares + weight * float(shift.double().square().sum())
            rows = torch.cat([self.values[:, None] * self.vectors, rows, weight**0.5 * shift[None]])
            mean = mean + shift * (self.seen / total)
        with torch.random.fork_rng():
            torch.manual_seed(SEED)
            _, values, vectors = torch.svd_lowrank(rows, min(2 * self.count, *rows.shape), 4)
        vectors = vectors.mT[: self.count]
        # made positive, so that the signs of components are determined
        largest = vectors.gather(1, vectors.abs().argmax(1, keepdim=True))
        self.values, self.vectors = values[: self.count], vectors * largest.sign()
        if self.seen:
            self.same = F.cosine_similarity(self.vectors, before)
        self.mean, self.seen, self.squares = mean, total, squares

    def shares(self) -> list[float]:
        """The share of the variance that each component explains."""
        return (self.values.double().square() / self.squares).tolist()

    def converged(self, rank: int, tau: float) -> bool:
        """Whether the last batch hardly changed the first `rank` components: their cosine similarity is at least
        `tau`."""
        return self.seen > 0 and bool((self.same[:rank] >= tau).all())


class LayerInputs:
    """The principal components of the inputs of layers, by layer name; EVA initializes adapters from these.
    Layers that are called one after the other with the same tensor, such as queries, keys and values, have the same
    components."""

    def __init__(self, inputs: Mapping[str, int], rank: int, rule: EVA) -> None:
        """`inputs` maps layer names to numbers of input features."""
        self.tau, self.budget = rule.tau, rank * len(inputs)
        self.most = {name: min(round(rank * rule.rho), size) for name, size in inputs.items()}
        self.ranks = dict(self.most)  # ranks as distributed after the last batch
        self.first: dict[str, str] = {}  # for each layer, the first layer with the same inputs
        self.components: dict[str, Components] = {}  # components of each first layer
        self.counted = torch.zeros(0, dtype=torch.bool)  # (B, T), mask of the tokens of the current batch to use
        # the most recent inputs, and the first layer that received them
        self.last: tuple[Tensor | None, str] = None, ""

    def read(self, name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Forward pre-hook of the layer `name`: update the components with its inputs until they have converged."""
        [x] = inputs
        if name not in self.first:
            self.first[name] = self.last[1] if self.last[0] is x else name
            self.components.setdefault(self.first[name], Components(self.most[name]))
        self.last = x, self.first[name]
        if self.first[name] == name and not self.components[name].converged(self.ranks[name], self.tau):
            self.components[name].add(x.reshape(*self.counted.shape, -1)[self.counted].float())

    def distribute(self) -> None:
        """Distribute `budget`, the sum of all ranks, over the layers: the components of all layers are sorted by the
        share of variance that they explain, and a layer's rank is the number of its components among the first
        `budget`. Of layers with the same inputs, none gets a higher rank than the first."""
        known = [(share, n) for n in self.first for share in self.components[self.first[n]].shares()[: self.most[n]]]
        best = Counter(name for _, name in sorted(known, key=lambda one: -one[0])[: self.budget])
        self.ranks = {name: best[name] for name in self.first}

    @property
    def complete(self) -> bool:
        return all(one.seen for one in self.components.values())

    @property
    def converged(self) -> bool:
        return all(one.converged(self.ranks[name], self.tau) for name, one in self.components.items())


@torch.no_grad()
def explained_variance(model: Decoder, lora: LoRA, batches: Iterable[Rows], name: str = "default") -> dict[str, int]:
    """Initialize the new adapters called `name`, which were added with the settings `lora`, by EVA: the rows of A are
    the first principal components of the layer's inputs, and B is 0. Reads `batches` (token ids, positions, mask of the
    tokens to use) until the components have converged or no batches are left. Adapters of embeddings keep their default
    initialization.

    The ranks are redistributed over the layers according to the share of variance that each component explains; their
    sum stays the same, and a layer with rank 0 gets no adapter. Returns {name of the layer: rank}.

    Raises a UserError for stacks of experts, and for batches with too few tokens.
    """
    assert isinstance(lora.init, EVA)
    every = {n: (t, adapter) for n, t, adapter in adapters_of(model, name) if not isinstance(t.module, nn.Embedding)}
    for layer, (target, _) in every.items():
        if target.weight.ndim > 2:
            raise UserError(
                f"Cannot initialize {layer} with eva, because it is a stack of experts: choose other targets"
            )
    inputs = LayerInputs({layer: one.weight.size(-1) for layer, (one, _) in every.items()}, lora.rank, lora.init)
    with ExitStack() as stack:
        stack.enter_context(without_dropout(model))
        for layer, (target, _) in every.items():
            stack.callback(target.module.register_forward_pre_hook(partial(inputs.read, layer)).remove)
        for tokens, positions, inputs.counted in batches:
            model.hidden(tokens, positions)
            if inputs.complete:
                inputs.distribute()
                if inputs.converged:
                    break
    if not inputs.complete:
        most = max(inputs.most.values())
        raise UserError(
            f"Cannot initialize with eva, because no batch of the data has {most} tokens: lower rank or rho"
        )
    for layer, rank in inputs.ranks.items():
        target, adapter = every[layer]
        components = inputs.components[inputs.first[layer]]
        if not rank:
            continue
        length = components.values[:rank, None].sqrt() if lora.init.whiten else 1.0
        adapter.a.data = (components.vectors[:rank] / length).to(adapter.a).contiguous()
        adapter.b.data = adapter.b.new_zeros(adapter.b.size(0), rank)
        adapter.scaling = lora.scaling_of(rank)
    remove_adapters(model, [every[layer][0] for layer, rank in inputs.ranks.items() if not rank], name)
    return inputs.ranks
