"""The subject of the doctor: the model to check, as a function from token ids to logits, and optional facts about it.

Shapes: B rows, T tokens, S tokens in one call, D width, V vocabulary.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Annotated, Any, NamedTuple, NoReturn, TypedDict, Unpack

import torch
from torch import Tensor, nn

from onward.base.arguments import Range
from onward.base.errors import UserError
from onward.model.cache import KVCache
from onward.model.decoder import Decoder

Adapter = Callable[[nn.Module, Tensor], Tensor]  # (model, token ids (B, T)) -> logits (B, T, V)
LossFunction = Callable[[Tensor, Tensor], Tensor]  # (logits (B, T, V), targets (B, T)) -> a scalar
CacheStep = Callable[[Tensor], Tensor]  # the next token ids (1, S) of a text -> their logits (1, S, V)
ROWS, LENGTH = 2, 16  # shape of the token ids that the checks use
BATCHES = 64  # maximum number of the user's batches that are used
SHORTEST = 4  # smallest context: checks compare the beginning of a text with its end
LENGTH_NAMES = "context_length", "block_size", "max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"
TARGET_NAMES = "targets", "target", "labels", "label", "y"
POSITION_NAMES = "position_ids", "positions"
# relative to the largest logit; fp32: 1e-4
TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float64: 1e-10}


class About(TypedDict, total=False):
    """Optional facts about the model to check, such as its loss, as keyword arguments of `doctor`."""

    vocab_size: Annotated[int, Range(1, 1 << 31)]  # number of token ids; default: the number of logits
    context_length: Annotated[
        int, Range(0, 1 << 31)
    ]  # tokens of the longest text; by default an attribute of the model
    fresh: bool  # the weights are newly initialized
    trained: bool  # the model is trained to predict the next token
    adapter: Adapter | None  # adapter(model, tokens) returns the logits of a model with a different signature
    loss: LossFunction | None  # training loss of the model; default: the loss that it returns for targets
    cache: (
        Callable[[nn.Module], CacheStep] | None
    )  # makes an empty cache: a function from the next tokens to their logits,
    # with a method crop(length) if the cache can be rolled back
    batches: Iterable[tuple[Tensor, Tensor]]  # token ids and targets for training, (B, T) each
    validation_batches: Iterable[tuple[Tensor, Tensor]]  # token ids and targets of held-out text, (B, T) each
    train: Callable[..., Any] | None  # train(model), or one step as train(model, optimizer, tokens, targets)
    tokenizer: Any  # a tokenizer with vocab_size or a length; Onward's has chat templates
    frozen: str  # regular expression for the names of parameters that must not be trained


@dataclass(frozen=True)
class Cache:
    """An empty cache for one text: `step` takes the next token ids (1, S) and returns their logits."""

    step: CacheStep
    crop: Callable[[int], object] | None = None  # rolls the cache back to a length
    content: Callable[[], Any] = lambda: None  # returns the object that holds the keys and values


class Use(NamedTuple):
    """A recorded call of a module: its result and its first tensor argument."""

    name: str
    result: Tensor
    given: Tensor | None


class ReachedError(BaseException):
    """Ends a forward pass or a training run early. Not a subclass of Exception, so that `except Exception` in a model
    does not catch it."""


class Subject:
    """The model to check, random token ids (2, T), and its logits for them. Raises a UserError if the model returns
    anything but logits."""

    def __init__(self, model: nn.Module, **about: Unpack[About]) -> None:
        self.model, self.about = model.eval(), about
        self.memo: dict[str, Any] = {}  # results shared between checks
        self.fresh, self.trained = about.get("fresh", False), about.get("trained", False)
        self.adapter, self.tokenizer = about.get("adapter"), about.get("tokenizer")
        self.context_length = about.get("context_length") or self.attribute(*LENGTH_NAMES) or 0
        parameter = next(model.parameters(), None)
        self.device = torch.device("cpu") if parameter is None else parameter.device
        self.dtype = torch.float32 if parameter is None else parameter.dtype
        length, generator = min(LENGTH, self.context_length or LENGTH), torch.Generator().manual_seed(0)
        if length < SHORTEST:
            raise UserError(
                f"Cannot check a model with a context of {length} tokens: the checks need at least {SHORTEST}"
            )
        with torch.no_grad():
            few = torch.zeros(1, min(2, length), dtype=torch.long, device=self.device)
            self.vocab_size = about.get("vocab_size") or self(few).size(-1)
            length = self.longest(length)
            length -= length == self.vocab_size  # T = V would hide swapped axes
            self.tokens = torch.randint(self.vocab_size, (ROWS, length), generator=generator).to(self.device)
            self.logits = self(self.tokens)
        if self.logits.shape != (ROWS, length, self.vocab_size):
            raise UserError(
                f"for token ids {tuple(self.tokens.shape)} the model returns {tuple(self.logits.shape)} instead of "
                f"logits {(ROWS, length, self.vocab_size)} of vocab_size {self.vocab_size}: give "
                "--vocab-size, or --adapter FILE.py:FUNCTION"
            )
        self.allowed = TOLERANCE.get(self.dtype, 1e-4) * max(1e-3, float(self.logits.abs().nan_to_num().max()))
        try:
            re.compile(about.get("frozen", ""))
        except re.error as error:
            raise UserError(f"frozen is not a regular expression ({error}): {about.get('frozen')!r}") from None
        self.batches = [self.checked_batch(batch) for batch in islice(about.get("batches", ()), BATCHES)]
        held_out = islice(about.get("validation_batches", ()), BATCHES)
        self.validation_batches = [self.checked_batch(batch) for batch in held_out]

    def __call__(self, tokens: Tensor, **more: Any) -> Tensor:
        """Logits (B, T, V) of token ids (B, T); `more` are further arguments of the model."""
        tokens = tokens.contiguous()  # since a model may call view()
        if self.adapter:
            return self.adapter(self.model, tokens)
        try:
            result = self.model(tokens, **more)
        except Exception as error:
            what = f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
            if isinstance(error, IndexError) and "range" in what:
                raise UserError(
                    f"Cannot call the model with {tokens.size(1)} token ids of up to {int(tokens.max())} "
                    f"({what}): give --vocab-size if it has fewer ids, or --context-length if its context "
                    "is shorter"
                ) from error
            raise UserError(
                f"Cannot call the model with token ids {tuple(tokens.shape)}, of int64 ({what}): give "
                "--adapter FILE.py:FUNCTION, where FUNCTION(model, tokens) returns logits"
            ) from error
        logits = logits_of(result)
        name = self.parameter(*TARGET_NAMES)
        if name and logits.size(1) < tokens.size(1):  # nanoGPT returns all logits only if it gets targets
            return logits_of(self.model(tokens, **more, **{name: tokens}))
        return logits

    def longest(self, length: int) -> int:
        """The greatest number of tokens, at most `length`, that the model accepts. Raises a UserError if it accepts
        neither `length` nor a smaller number of at least four."""
        try:
            self(torch.zeros(1, length, dtype=torch.long, device=self.device))
            return length
        except UserError as error:
            cause = error
        for shorter in range(length - 1, 3, -1):
            try:
                self(torch.zeros(1, shorter, dtype=torch.long, device=self.device))
                return shorter
            except UserError:
                continue
        raise UserError(f"{cause}; if its context is shorter, give --context-length") from cause

    def checked_batch(self, batch: Any) -> tuple[Tensor, Tensor]:
        """A user's batch on the model's device. Raises a UserError unless it is a pair of tensors (B, T) with ids of
        the model."""
        pair = isinstance(batch, Sequence) and len(batch) == 2 and all(isinstance(x, Tensor) for x in batch)
        if not pair or batch[0].dim() != 2 or batch[0].shape != batch[1].shape or batch[0].is_floating_point():
            shapes = [tuple(x.shape) for x in batch if isinstance(x, Tensor)] if isinstance(batch, Sequence) else batch
            raise UserError(
                f"Cannot use a batch of {shapes!r:.200}: give pairs of token ids and targets, integers (B, T) each"
            )
        if int(batch[0].max()) >= self.vocab_size:
            raise UserError(
                f"a batch has token id {int(batch[0].max())}, but the model has only {self.vocab_size} token ids"
            )
        return batch[0].to(self.device), batch[1].to(self.device)

    def attribute(self, *names: str) -> Any:
        """The first attribute among `names` that the model or its config has."""
        holders = self.model, getattr(self.model, "config", None)
        return next((getattr(h, name) for name in names for h in holders if getattr(h, name, None) is not None), None)

    def parameter(self, *names: str) -> str:
        """The first of `names` that is a parameter of the model's `forward`."""
        known = () if self.adapter else inspect.signature(self.model.forward).parameters
        return next((name for name in names if name in known), "")

    def declares(self, pattern: str) -> list[float]:
        """The numbers in the model's config whose field names match `pattern`."""
        text = repr(getattr(self.model, "config", ""))
        return [float(x) for x in re.findall(rf"\w*(?:{pattern})\w*['\"]?[=:] ?(\d+\.?\d*(?:e-?\d+)?)", text)]

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor | None:
        """The user's loss of logits (B, T, V) and targets (B, T) or, without one, the model's own loss on the test
        tokens; None if the model returns none."""
        if own := self.about.get("loss"):
            return own(logits, targets)
        name = self.parameter(*TARGET_NAMES)
        if not name:
            return None
        result = self.model(self.tokens, **{name: targets})
        if isinstance(result, Mapping):
            loss = result.get("loss")
        else:
            loss = result.loss if hasattr(result, "loss") else result[1] if isinstance(result, tuple) else result
        return loss if isinstance(loss, Tensor) and loss.dim() == 0 else None

    def new_cache(self) -> Cache | None:
        """An empty cache: the user's, Onward's, that of transformers, or that of a model with a parameter `cache` and a
        method `new_cache()`."""
        model = self.model
        if made := self.about.get("cache"):
            step = made(model)
            return Cache(step, getattr(step, "crop", None), lambda: step)
        if self.adapter:
            return None
        if isinstance(model, Decoder):
            size = self.tokens.size(1)
            options: Any = {"device": self.device, "dtype": self.dtype}
            cache, done = KVCache(model.config, 1, size, size, keep=size, **options), 0

            def ours(tokens: Tensor) -> Tensor:
                nonlocal done
                positions = torch.arange(done, done + tokens.size(1), device=self.device)[None]
                done += tokens.size(1)
                return model(tokens, positions, cache.view())

            def back(length: int) -> None:
                nonlocal done
                done = length

            return Cache(ours, back)
        if self.parameter("past_key_values"):
            past: Any = None

            def theirs(tokens: Tensor) -> Tensor:
                nonlocal past
                result = model(tokens, past_key_values=past, use_cache=True)
                past = result.past_key_values
                return logits_of(result)

            return Cache(theirs, lambda length: past.crop(length), lambda: past)
        if self.parameter("cache") and hasattr(model, "new_cache"):
            memory: Any = model.new_cache()  # type: ignore[operator]
            return Cache(
                lambda tokens: logits_of(model(tokens, cache=memory)), getattr(memory, "crop", None), lambda: memory
            )
        return None

    @cached_property
    def later(self) -> Tensor:
        """The test tokens (2, T), with all tokens from the middle on replaced by others."""
        half = self.tokens.size(1) // 2
        return torch.cat([self.tokens[:, :half], (self.tokens[:, half:] + 1) % self.vocab_size], 1)

    def leak(self, logits: Tensor, of_later: Tensor) -> float:
        """Largest difference between the logits of the test tokens and of the tokens `later`, at positions before the
        middle."""
        return float((logits - of_later)[:, : self.tokens.size(1) // 2].abs().max())

    @cached_property
    def is_causal(self) -> bool:
        with torch.no_grad():
            return self.leak(self.logits, self(self.later)) <= self.allowed

    @contextmanager
    def outputs(self) -> Iterator[list[Use]]:
        """Yield a list that records the calls of modules that return floating-point tensors, in the order of their
        returns."""
        uses: list[Use] = []

        def note(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
                result = result[0] if isinstance(result, tuple) and result else result
                given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
                if isinstance(result, Tensor) and result.is_floating_point():
                    uses.append(Use(name, result.detach(), None if given is None else given.detach()))

            return hook

        modules = [(name, module) for name, module in self.model.named_modules() if name]
        with hooked(module.register_forward_hook(note(name), with_kwargs=True) for name, module in modules):
            yield uses

    def given_to(self, module: nn.Module, tokens: Tensor) -> Tensor | None:
        """The first argument of the first call of `module`; the forward pass is stopped there."""
        tensors: list[Tensor] = []

        def stop(module: nn.Module, args: tuple[Any, ...]) -> NoReturn:
            tensors.extend(args[:1])
            raise ReachedError

        with hooked([module.register_forward_pre_hook(stop)]):
            try:
                self(tokens)
            except ReachedError:
                pass
        return tensors[0] if tensors and isinstance(tensors[0], Tensor) else None

    @cached_property
    def blocks(self) -> list[tuple[str, nn.Module]]:
        """Blocks as (name, module): the outermost list of modules of one class that return (B, T, D)."""
        with torch.no_grad(), self.outputs() as uses:
            self(self.tokens)
        streams = {use.name for use in uses if use.result.dim() == 3 and use.result.shape[:2] == self.tokens.shape}
        for name, module in self.model.named_modules():
            items = [*module.children()] if isinstance(module, nn.ModuleList | nn.Sequential) else []
            names = [f"{name}.{i}" for i in range(len(items))]
            if items and len({type(item) for item in items}) == 1 and {*names} <= streams and [*items[0].children()]:
                return list(zip(names, items))
        return []


@contextmanager
def hooked(handles: Iterable[Any]) -> Iterator[None]:
    handles = list(handles)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def logits_of(result: Any) -> Tensor:
    """The logits in a model's result: the tensor itself, the first item of a tuple, `.logits` or ["logits"]."""
    if isinstance(result, Mapping) and "logits" in result:
        result = result["logits"]
    result = result.logits if hasattr(result, "logits") else result[0] if isinstance(result, tuple) else result
    if isinstance(result, list) and result and all(isinstance(x, Tensor) and x.dim() == 3 for x in result):
        raise UserError(
            f"Cannot read the logits, because the model returns a list of {len(result)}, as for early "
            "exits: give --adapter FILE.py:FUNCTION, where FUNCTION(model, tokens) returns one of them, "
            "such as model(tokens)[-1]"
        )
    if not isinstance(result, Tensor) or result.dim() != 3:
        shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise UserError(f"the model returns {shape} instead of logits (B, T, V): give --adapter FILE.py:FUNCTION")
    return result
