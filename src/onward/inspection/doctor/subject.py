"""What the doctor examines: a model as a function from token ids to logits, and what else it can do.

Shapes: B rows, T tokens, S tokens in one call, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from onward.errors import UserError
from onward.model.cache import KVCache
from onward.model.decoder import Decoder

Adapter = Callable[[nn.Module, Tensor], Tensor]  # (model, token ids (B, T)) -> logits (B, T, V)
Step = Callable[[Tensor], Tensor]  # the next token ids (1, S) of a text -> their logits (1, S, V)
ROWS, LENGTH = 2, 16  # of the token ids that the checks use
LENGTH_NAMES = "context_length", "block_size", "max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"
TARGET_NAMES = "targets", "target", "labels", "label", "y"
TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float64: 1e-10}  # of the largest logit; fp32: 1e-4


class Subject:
    """A model with its vocabulary size, and tokens (2, T) to try it on.

    `fresh` says that its weights are those of the initialization. The vocabulary size is read from the logits, and the
    context length from the model's attributes, unless they are given.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        vocab_size: int = 0,
        context_length: int = 0,
        fresh: bool = False,
        adapter: Adapter | None = None,
    ) -> None:
        self.model, self.fresh, self.adapter = model.eval(), fresh, adapter
        self.context_length = context_length or self.attribute(LENGTH_NAMES) or 0
        parameter = next(model.parameters(), None)
        self.device = torch.device("cpu") if parameter is None else parameter.device
        self.dtype = torch.float32 if parameter is None else parameter.dtype
        length = min(LENGTH, self.context_length or LENGTH)
        with torch.no_grad():
            self.vocab_size = vocab_size or self(torch.zeros(1, 2, dtype=torch.long, device=self.device)).size(-1)
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(self.vocab_size, (ROWS, length), generator=generator).to(self.device)
        with torch.no_grad():
            self.logits = self(self.tokens)
        if self.logits.shape != (ROWS, length, self.vocab_size):
            raise UserError(
                f"for token ids {tuple(self.tokens.shape)} the model returns {tuple(self.logits.shape)} instead of "
                f"logits {(ROWS, length, self.vocab_size)}: give --vocab-size, or --adapter FILE.py:FUNCTION"
            )
        self.allowed = TOLERANCE.get(self.dtype, 1e-4) * max(1e-3, float(self.logits.abs().nan_to_num().max()))

    def __call__(self, tokens: Tensor) -> Tensor:
        """The logits (B, T, V) of token ids (B, T)."""
        if self.adapter:
            return self.adapter(self.model, tokens)
        try:
            result = self.model(tokens)
        except Exception as error:
            what = " ".join(str(error).split())
            raise UserError(
                f"the model cannot be called with token ids {tuple(tokens.shape)}, of int64 ({type(error).__name__}: "
                f"{what:.200}): give --adapter FILE.py:FUNCTION, where FUNCTION(model, tokens) returns logits"
            ) from error
        return logits_of(result)

    def attribute(self, names: tuple[str, ...]) -> Any:
        """The first attribute of the model or its config with one of these names; None where there is none."""
        holders = self.model, getattr(self.model, "config", None)
        return next((getattr(h, name) for name in names for h in holders if getattr(h, name, None) is not None), None)

    def parameter(self, *names: str) -> str:
        """The first parameter of `forward` that has one of these names; "" where there is none."""
        known = inspect.signature(self.model.forward).parameters
        return next((name for name in names if name in known), "")

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor | None:
        """The loss that the model itself returns for targets; None where it returns none."""
        name = self.parameter(*TARGET_NAMES)
        if not name:
            return None
        result = self.model(tokens, **{name: targets})
        loss = result.loss if hasattr(result, "loss") else result[1] if isinstance(result, tuple) else result
        return loss if isinstance(loss, Tensor) and loss.dim() == 0 else None

    def new_cache(self) -> Step | None:
        """A function that continues one text, with an empty cache; None where the model has no cache it knows.

        Known are Onward's, that of transformers, and a parameter `cache` of `forward` with a method `new_cache()`.
        """
        model = self.model
        if isinstance(model, Decoder):
            size = self.tokens.size(1)
            cache, done = KVCache(model.config, 1, size, size, device=self.device, dtype=self.dtype), 0

            def ours(tokens: Tensor) -> Tensor:
                nonlocal done
                positions = torch.arange(done, done + tokens.size(1), device=self.device)[None]
                done += tokens.size(1)
                return model(tokens, positions, cache.view())

            return ours
        if self.parameter("past_key_values"):
            past: Any = None

            def theirs(tokens: Tensor) -> Tensor:
                nonlocal past
                result = model(tokens, past_key_values=past, use_cache=True)
                past = result.past_key_values
                return logits_of(result)

            return theirs
        if self.parameter("cache") and hasattr(model, "new_cache"):
            memory: Any = model.new_cache()  # type: ignore[operator]
            return lambda tokens: logits_of(model(tokens, cache=memory))
        return None

    @contextmanager
    def outputs(self) -> Iterator[list[tuple[str, Tensor]]]:
        """A list that gets the name and the result of each module, in the order in which they end."""
        found: list[tuple[str, Tensor]] = []

        def note(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, result: Any) -> None:
                result = result[0] if isinstance(result, tuple) and result else result
                if isinstance(result, Tensor) and result.is_floating_point():
                    found.append((name, result.detach()))

            return hook

        hooks = [module.register_forward_hook(note(name)) for name, module in self.model.named_modules() if name]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()


def logits_of(result: Any) -> Tensor:
    """The logits in what a model returns: a tensor, the first of a tuple, or `.logits`."""
    result = result.logits if hasattr(result, "logits") else result[0] if isinstance(result, tuple) else result
    if not isinstance(result, Tensor) or result.dim() != 3:
        shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise UserError(f"the model returns {shape} instead of logits (B, T, V): give --adapter FILE.py:FUNCTION")
    return result
