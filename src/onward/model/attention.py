"""Self-attention: projections, then softmax attention by the fastest backend for the shape, dtype and device.

A backend takes queries q (B, T, H, E), keys k (B, S, K, E), values v (B, S, K, F) and an AttentionMask, and returns
(B, T, H, F); `reference.reference` computes every step in plain PyTorch, and the other backends match its results.
Shapes: B batch, T tokens in this call, S keys, D d_model, H heads, K key/value heads, G = H / K, E d_head, F width of a
value.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onward.config.decoder import DecoderConfig, SelfAttention
from onward.kernels import causal
from onward.kernels.memory import Unreadable
from onward.kernels.operations import attention_kernel, is_worth
from onward.model.activations import Activation, Child, ContextVectors, Declarations, Queries, attention, output
from onward.model.context import AttentionContext
from onward.model.flex import flex
from onward.model.layer_cache import CacheEntry, Keys, to_tensor
from onward.model.layers import Linear, NewNorm, outputs_of
from onward.model.mask import AttentionMask
from onward.model.norms import HeadNorms
from onward.model.query_blocks import query_blocks
from onward.model.reference import reference
from onward.model.tiles import MIN_TILED, is_tiled

MAX_FOLDED = 16  # maximum number of queries per row for which the heads of a group are folded into the query length
QUERY_BLOCK = 512  # queries per block in `sdpa_blocks`
MAX_KEYS = 3 << 17  # bytes of a row's keys and values per query head up to which the kernel is faster than SDPA
MAX_DENSE = 1 << 21  # largest T * S for which the bias of a packed or window layer is computed as a whole


class SelfAttentionModule(nn.Module):
    """Self-attention, x (B, T, D) -> (B, T, D): project to queries, keys and values, attend, project back. A subclass
    may override `project` alone.

    `part` is the attention part of the config; `norm` is a function from a width to a new norm, for norms of queries
    and keys.
    """

    def __init__(self, part: SelfAttention, config: DecoderConfig, norm: NewNorm) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.d_head, self.d_value = part.heads(config)
        q_width, k_width = self.n_heads * self.d_head, self.n_kv_heads * self.d_head
        self.q = Linear(config.d_model, q_width, bias=part.bias)
        self.k = Linear(config.d_model, k_width, bias=part.bias)
        self.v = Linear(config.d_model, self.n_kv_heads * self.d_value, bias=part.bias)
        self.clip: nn.Module = nn.Hardtanh(-part.clip, part.clip) if part.clip else nn.Identity()
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        # a norm of q or k is over the last dimension of (B, T, groups, q_group or k_group)
        self.q_group, self.k_group = (q_width, k_width) if part.qk_norm == "width" else (self.d_head, self.d_head)
        if part.qk_norm == "heads":
            self.q_norm = HeadNorms(norm(self.d_head) for _ in range(self.n_heads))
            self.k_norm = HeadNorms(norm(self.d_head) for _ in range(self.n_kv_heads))
        elif part.qk_norm != "none":
            self.q_norm = norm(self.q_group)
            self.k_norm = norm(self.k_group)
        scale = self.d_head**-0.5 if part.scale is None else part.scale
        self.attend = Attend(scale, config.dropout, part.attn_softcap, self.n_heads if part.sinks else 0)
        width = self.n_heads * self.d_value
        self.out: nn.Module = Linear(width, config.d_model, bias=part.out_bias) if part.out else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        q, k, v = self.project(x)
        keys, values = context.update(k=context.rotate(k), v=v)
        return self.dropout(self.out(self.attend(context.rotate(q), keys, values, context).flatten(-2)))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, T, H, E), keys (B, T, K, E) and values (B, T, K, F) of x (B, T, D), before any
        rotation."""
        heads = (*x.shape[:2], -1, self.d_head)
        q, k, v = map(self.clip, outputs_of((self.q, self.k, self.v), x))
        q = self.q_norm(q.unflatten(-1, (-1, self.q_group))).view(heads)
        k = self.k_norm(k.unflatten(-1, (-1, self.k_group))).view(heads)
        return q, k, v.unflatten(-1, (-1, self.d_value))

    def activations(self) -> Declarations:
        vectors = ContextVectors(("k", "q"), {"k": "k_rotated", "v": "v"})
        q, k = (("B", "T", heads, self.d_head) for heads in (self.n_heads, self.n_kv_heads))
        v = "B", "T", self.n_kv_heads, self.d_value
        q_groups, k_groups = self.n_heads * self.d_head // self.q_group, self.n_kv_heads * self.d_head // self.k_group
        return {
            "q_norm": Child("q_norm", (q_groups,), default=partial(output, self.q_group)),
            "k_norm": Child("k_norm", (k_groups,), default=partial(output, self.k_group)),
            "k": Activation(vectors, k, 2),
            "q": Activation(vectors, q, 2),
            "k_rotated": Activation(vectors, k, 2, rotary=True),
            "v": Activation(vectors, v, 2),
            "q_rotated": Activation(Queries(), q, 2, rotary=True),
            **attention(self.n_heads, self.d_value),
        }


class Attend(nn.Module):
    """Softmax attention, the function `attend` as a module, so that forward hooks can reach its queries, keys and
    values.

    `scale` multiplies the scores, `dropout` is the rate for the attention weights in training, `softcap` caps the
    scores (None: no cap), and `sinks` is the number of learned sink scores: one per head, or 0 for none.
    """

    def __init__(self, scale: float, dropout: float, softcap: float | None = None, sinks: int = 0) -> None:
        super().__init__()
        self.scale, self.dropout, self.softcap = scale, dropout, softcap
        self.sinks = nn.Parameter(torch.zeros(sinks)) if sinks else None

    def scaled(self, q: Tensor, context: AttentionContext) -> Tensor:
        """Return the queries; a subclass may multiply them by a factor of their positions."""
        return q

    def forward(self, q: Tensor, k: Keys, v: Keys, context: AttentionContext) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        return attend(q, k, v, context.mask, scale=self.scale, softcap=self.softcap, sinks=self.sinks, dropout=dropout)


def attend(
    q: Tensor,
    k: Keys,
    v: Keys,
    mask: AttentionMask,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute attention by the fastest backend that supports the options, which are the same as in `reference`."""
    plain = softcap is None and sinks is None
    if not dropout and not (plain and q.size(1) >= MIN_TILED and is_tiled(q, v, mask)):
        y = without_gathering(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks)
        if y is not None:
            return y
    if (
        (plain and not dropout and mask.causal_only)
        and (isinstance(k, Tensor) and isinstance(v, Tensor))
        and causal.takes_kernel(q, k, v)
    ):
        return causal.causal_attention(q, k, v, scale)
    if not plain or reference_is_faster(q, k):
        return reference(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks, dropout=dropout)
    long = q.size(1) * mask.key_positions.size(1) > MAX_DENSE
    if long and not mask.causal_only and not isinstance(k, CacheEntry):
        if q.device.type == "cuda" and not dropout:
            return flex(q, k, v, mask, scale=scale)
        return sdpa_blocks(q, k, v, mask, scale=scale, dropout=dropout)
    return sdpa(q, k, v, mask, scale=scale, dropout=dropout)


def reference_is_faster(q: Tensor, k: Keys) -> bool:
    # in bf16 training on a CPU, the fused kernel's backward pass is slower than plain matmuls up to 512 keys
    if q.device.type != "cpu" or q.dtype != torch.bfloat16 or not q.requires_grad:
        return False
    return isinstance(k, Tensor) and k.size(1) <= 512


def without_gathering(
    q: Tensor, k: Keys, v: Keys, mask: AttentionMask, *, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor | None:
    """Compute attention by the CPU kernel, which reads keys and values from the KV cache without gathering them, or
    from tensors. Returns None if the kernel does not support the arguments or is not faster."""
    if isinstance(k, CacheEntry) and isinstance(v, CacheEntry):
        return k.attend(q, v, mask, scale=scale, softcap=softcap, sinks=sinks)
    if isinstance(k, CacheEntry) or isinstance(v, CacheEntry) or not mask.plain or not mask.linear:
        return None
    size = (k[0].numel() + v[0].numel()) * k.element_size()
    kernel = attention_kernel(q, [k, v], k.size(1)) if size <= MAX_KEYS * q.size(2) else None
    if kernel is None or not is_worth("attention", q):
        return None
    positions = mask.query_positions.expand(len(q), -1)
    with suppress(Unreadable):
        vectors = q, k.contiguous(), v.contiguous(), positions
        return kernel(*vectors, scale=scale, softcap=softcap, sinks=sinks, slopes=mask.slopes, **mask.reach)
    return None


def sdpa(q: Tensor, k: Keys, v: Keys, mask: AttentionMask, *, scale: float, dropout: float = 0.0) -> Tensor:
    """Compute attention by PyTorch's `scaled_dot_product_attention` (SDPA), with the mask as a dense bias, or with
    `is_causal`."""
    k, v = to_tensor(k, q.dtype), to_tensor(v, q.dtype)
    return biased_sdpa(q, k, v, None if mask.causal_only else mask.dense(q.dtype), scale, dropout)


def biased_sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, dropout: float) -> Tensor:
    """Compute SDPA with `bias` (B or 1, 1 or H, T, S) added to the scores; None stands for the causal mask.

    With a bias, few queries and grouped heads, the G heads of a group are folded into the query length: in bf16 on a
    CPU this is five to eight times as fast as `enable_gqa`, and on CUDA it keeps a masked call off the math kernel.
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    heads, kv_heads = q.size(1), k.size(1)
    if heads == kv_heads or bias is None or q.size(2) > MAX_FOLDED:
        causal = bias is None
        y = F.scaled_dot_product_attention(q, k, v, bias, dropout, causal, scale=scale, enable_gqa=heads != kv_heads)
        return y.transpose(1, 2)
    rows, _, tokens, _ = q.shape
    q = q.unflatten(1, (kv_heads, -1)).flatten(2, 3)  # (B, K, G * T, E)
    if tokens > 1 or bias.size(1) > 1:
        bias = bias.expand(-1, heads, -1, -1).unflatten(1, (kv_heads, -1)).flatten(2, 3)
    y = F.scaled_dot_product_attention(q, k, v, bias, dropout, scale=scale)
    return y.view(rows, heads, tokens, -1).transpose(1, 2)


def sdpa_blocks(
    q: Tensor, k: Keys, v: Keys, mask: AttentionMask, *, scale: float, dropout: float = 0.0, block: int = QUERY_BLOCK
) -> Tensor:
    """Compute SDPA in `query_blocks`, so that the full (T, S) bias of a long row of packed documents or of a window
    layer is never in memory. Keys and values must be tensors, not entries of a cache."""
    k, v = to_tensor(k, q.dtype), to_tensor(v, q.dtype)
    out = []
    for queries, keys in query_blocks(mask, q.size(1), k.size(1), block):
        bias = mask.score_bias(q.dtype, queries, keys)
        out.append(biased_sdpa(q[:, queries], k[:, keys], v[:, keys], bias, scale, dropout))
    return torch.cat(out, 1)
