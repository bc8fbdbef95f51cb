"""The decoder: embedding, blocks, norm, head. The same forward pass serves training, prefill and decoding; the caller
passes the cache.

Shapes: B batch, T tokens in this call, D d_model, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from onward.base.arguments import checked
from onward.base.errors import UserError
from onward.base.notebook import Shown
from onward.config.decoder import DecoderConfig, at
from onward.model import activations
from onward.model.activations import NORM, Activation, Child, Declarations, Output
from onward.model.build import build_block, build_norm, build_position, initialize
from onward.model.cache import CacheView, KVCache
from onward.model.context import AttentionContext, attention_contexts, rotates
from onward.model.layers import Linear
from onward.model.scales import RoundedScale, Scale, Softcap


class Decoder(Shown, nn.Module):
    """A decoder-only Transformer of a DecoderConfig, with newly initialized weights.

    >>> model = Decoder(DecoderConfig(vocab_size=100, d_model=64, n_layers=2, n_heads=4))
    >>> model(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 100])
    """

    @checked
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        c = self.config = config
        narrow = c.d_embed != c.d_model
        self.embed = nn.Embedding(c.vocab_size, c.d_embed)
        self.embed_in = Linear(c.d_embed, c.d_model, bias=False) if narrow else nn.Identity()
        self.embed_scale = RoundedScale(c.embed_scale) if c.embed_scale != 1.0 else nn.Identity()
        self.embed_norm = build_norm(c.embed_norm, c) if c.embed_norm else nn.Identity()
        self.position = build_position(at(c.position, 0), c)
        self.dropout = nn.Dropout(c.dropout)
        inputs = getattr(at(c.block, 0), "layer_inputs", None)
        self.layer_inputs: nn.Module | None = inputs(c) if inputs else None
        self.blocks = nn.ModuleList(build_block(at(c.block, layer), c, layer) for layer in range(c.n_layers))
        self.norm = build_norm(c.final_norm or at(c.norm, c.n_layers - 1), c, c.n_layers - 1)
        self.embed_out = Linear(c.d_model, c.d_embed, bias=False) if narrow else nn.Identity()
        self.head = Linear(c.d_embed, c.vocab_size, bias=c.head_bias)
        self.logit_scale = Scale(c.logit_scale) if c.logit_scale != 1.0 else nn.Identity()
        self.logit_softcap = Softcap(c.logit_softcap) if c.logit_softcap else nn.Identity()
        if c.tied:
            self.head.weight = self.embed.weight
        initialize(self, c)

    def activations(self) -> Declarations:
        c = self.config
        names: Declarations = {"embed": Activation(Output("embed"), ("B", "T", c.d_embed))}
        if self.position is not None:
            names["position"] = Activation(Output("position"), ("B", "T", "D"))
        names["embed_norm"] = Child("embed_norm", default=NORM)
        for layer in range(c.n_layers):
            rotary, name = rotates(at(c.position, layer)), f"blocks.{layer}"
            names[name] = Child(name, rotary=rotary, default=activations.block)
        names["norm"] = Child("norm", default=NORM)
        return {**names, "logits": Activation(Output("logit_softcap"), ("B", "T", c.vocab_size))}

    @property
    def device(self) -> torch.device:
        """The device of the model's weights."""
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embedding, of the residual stream, and of a KV cache for this model."""
        return self.embed.weight.dtype

    def extra_repr(self) -> str:
        return str(self.__dict__.get("attachments", ""))  # see attachments.py

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, cache: KVCache | CacheView | None = None
    ) -> Tensor:
        """Return logits (B, T, V); those at index t predict the token at index t + 1. The arguments are those of
        `hidden`."""
        return self.logits(self.hidden(tokens, positions, cache))

    def hidden(
        self, tokens: Tensor, positions: Tensor | None = None, cache: KVCache | CacheView | None = None
    ) -> Tensor:
        """Return the hidden states (B, T, D): the residual stream after the last block and the final norm.

        `tokens` are ids (B, T), or vectors (B, T, d_embed) in place of their embeddings. `positions` (B, T) are by
        default 0, 1, 2, .... A position that is not the previous one plus one begins a segment (`segments.Segments`). A
        segment at 0 is a packed document, whose tokens attend to no earlier document; a segment at another position is
        a branch of the document before it. With a `cache`, positions are required, each row continues after the tokens
        in the cache, and a row's last position must be its greatest. Tokens of a wrong shape or dtype, ids out of
        range, and positions beyond the cache or the learned positions raise a UserError (a ValueError); the values of
        ids and positions are checked on a CPU only.
        """
        check_tokens(tokens, self.config)
        view = cache.view() if isinstance(cache, KVCache) else cache
        check(self.config, positions, tokens.size(1), view)
        return self.hidden_of_checked(tokens, positions, view)

    def hidden_of_checked(self, tokens: Tensor, positions: Tensor | None, view: CacheView | None) -> Tensor:
        """Compute `hidden` without checking the arguments; `view` holds the cache rows to use, None for none. Reads no
        value of a tensor on the host, so that it forces no sync and can be compiled."""
        x = tokens if tokens.is_floating_point() else self.embed(tokens)
        x = self.embed_norm(self.embed_scale(self.embed_in(x)))
        plain = positions is None
        if positions is None:
            positions = torch.arange(x.size(1), device=x.device)[None]
        if self.position is not None:
            x = x + self.position(positions, x.dtype)
        x = self.dropout(x)
        contexts = self.contexts(x.dtype, positions, view, plain=plain)
        if self.layer_inputs is not None:
            contexts = [replace(c, inputs=own) for c, own in zip(contexts, self.layer_inputs(tokens, x))]
        for block, context in zip(self.blocks, contexts):
            x = block(x, context)
        return self.norm(x)

    def contexts(
        self, dtype: torch.dtype, positions: Tensor, view: CacheView | None, *, plain: bool
    ) -> list[AttentionContext]:
        """Return the AttentionContext of each layer; the arguments are those of `attention_contexts`."""
        return attention_contexts(self.config, dtype, positions, view, plain=plain)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits (B, T, V) from hidden states (B, T, D), which `hidden` returns. Raises a UserError for
        hidden states of another width or dtype."""
        try:
            return self.logit_softcap(self.logit_scale(self.head(self.embed_out(hidden))))
        except (TypeError, AttributeError, RuntimeError):  # a check before the call would cost time at each step
            if not isinstance(hidden, Tensor) or (hidden.dtype, hidden.shape[-1]) != (self.dtype, self.config.d_model):
                shape = f"(B, T, {self.config.d_model}) in {self.dtype}"
                raise UserError(f"hidden is {described(hidden)}: give hidden states {shape}") from None
            raise


def check_tokens(tokens: Tensor, config: DecoderConfig) -> None:
    """Raise a UserError unless `tokens` are token ids (B, T) or vectors (B, T, d_embed); on a CPU, the range of the ids
    is checked."""
    if not isinstance(tokens, Tensor):
        raise UserError(f"tokens are {described(tokens)}: give a tensor of ids (B, T), or of vectors (B, T, d_embed)")
    is_ids, shape = tokens.dtype in (torch.int64, torch.int32), tuple(tokens.shape)
    if not ((is_ids and len(shape) == 2) or (tokens.is_floating_point() and shape[2:] == (config.d_embed,))):
        vectors = f"vectors (B, T, {config.d_embed}) in place of their embeddings"
        raise UserError(f"tokens are {described(tokens)}: give ids (B, T) as int64, or {vectors}")
    if not tokens.numel():
        raise UserError(f"tokens are {described(tokens)}: give at least one row, and at least one token in each row")
    if is_ids and tokens.device.type == "cpu" and not torch.compiler.is_compiling():
        least, greatest = tokens.aminmax()
        check_ids(int(least), int(greatest), config)


def check_ids(least: int, greatest: int, config: DecoderConfig) -> None:
    for token in least, greatest:
        if not 0 <= token < config.vocab_size:
            vocabulary = f"a vocabulary of {config.vocab_size}: give ids, or a tokenizer, of this model"
            raise UserError(f"token id {token} is out of range for {vocabulary}")


def check(config: DecoderConfig, positions: Tensor | None, tokens: int, cache: CacheView | None) -> None:
    """Raise a UserError if `positions` are not integers (B, `tokens`), are missing though there is a cache, are
    negative, or are beyond the positions of the model or of its cache, or if one call may not add `tokens` tokens per
    row to the cache; the values of the positions are checked on a CPU only."""
    limit = at(config.position, 0).limit(config)
    if not isinstance(cache, CacheView | None):
        raise UserError(f"cache is {type(cache).__name__}: give a KVCache, a view of one, or None")
    integers = isinstance(positions, Tensor) and positions.dtype in (torch.int64, torch.int32)
    if positions is not None and not (integers and positions.shape[1:] == (tokens,)):
        raise UserError(f"positions are {described(positions)}: give integers (B, {tokens}), one for each token")
    if cache:
        if positions is None:
            raise UserError("Cannot use a cache without positions: give the positions (B, T) of the tokens")
        if tokens > cache.chunk:
            chunk = f"a cache made for {cache.chunk} at a time"
            raise UserError(f"Cannot add {tokens} tokens in one call to {chunk}: use a larger chunk")
        limit = min(limit, cache.length)
    if positions is None:
        first, last, real = 0, tokens - 1, tokens - 1
    elif positions.device.type == "cpu" and positions.numel() and not torch.compiler.is_compiling():
        first, last = int(positions.min()), int(positions.max())
        real = int(positions[:, 0].max()) if cache else last  # later columns may be padding
    else:  # on an accelerator, reading positions would force a sync
        return
    if real >= limit or first < 0:
        position = real if first >= 0 else first
        raise UserError(f"position {position} is outside the {limit} positions of the model or its cache")
    if cache and last >= cache.end:
        raise UserError(f"position {last}, padding included, is past the {cache.end} slots of this view of a cache")


def described(value: object) -> str:
    """The dtype and shape of a tensor, or the type of any other value, for messages."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode inside the `with` block, and restore the mode of each module afterwards."""
    training = [module for module in model.modules() if module.training] if model.training else []
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
