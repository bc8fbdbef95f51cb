"""A decoder in one file, in the common style after Llama and Mixtral: rotary positions, RMSNorm, grouped heads,
experts, a padding mask, a scaled embedding, and a cache that can be truncated. It is correct: tests plant bugs in
it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Cache:
    def __init__(self, layers: int) -> None:
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        past_k, past_v = self.keys[layer], self.values[layer]
        if past_k is not None and past_v is not None:
            k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
        self.keys[layer], self.values[layer] = k, v
        return k, v

    def length(self) -> int:
        return 0 if self.keys[0] is None else self.keys[0].size(2)

    def crop(self, length: int) -> None:
        self.keys = [None if k is None else k[:, :, :length] for k in self.keys]
        self.values = [None if v is None else v[:, :, :length] for v in self.values]


def rotate(x: Tensor, places: Tensor) -> Tensor:
    frequencies = 100.0 ** (-torch.arange(0, x.size(-1), 2, device=x.device) / x.size(-1))
    angles = places[..., None].float() * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, layer: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.layer = heads, kv_heads, layer
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, width // heads * kv_heads, bias=False)
        self.wv = nn.Linear(width, width // heads * kv_heads, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, allowed: Tensor, past: int, cache: Cache | None) -> Tensor:
        B, T, D = x.shape
        q = self.wq(x).view(B, T, self.heads, -1).transpose(1, 2)
        k = self.wk(x).view(B, T, self.kv_heads, -1).transpose(1, 2)
        v = self.wv(x).view(B, T, self.kv_heads, -1).transpose(1, 2)
        places = torch.arange(past, past + T, device=x.device)
        q, k = rotate(q, places), rotate(k, places)
        if cache is not None:
            k, v = cache.update(self.layer, k, v)
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
        weights = scores.masked_fill(~allowed, torch.finfo(x.dtype).min).softmax(-1)
        return self.wo((weights @ v).transpose(1, 2).reshape(B, T, D))


class Experts(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        result = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            result = result + expert(x) * (weights * (chosen == i)).sum(-1, keepdim=True)
        return result


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, layer: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, kv_heads, layer)
        self.mlp = Experts(width, 4) if layer else nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, allowed: Tensor, past: int, cache: Cache | None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), allowed, past, cache))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    def __init__(self, vocab_size: int = 61, context_length: int = 32, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.context_length = context_length
        self.embed = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(Layer(width, 4, 2, layer) for layer in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        for name, matrix in self.named_parameters():
            if matrix.dim() == 2 and name:
                nn.init.normal_(matrix, std=0.02)

    def new_cache(self) -> Cache:
        return Cache(len(self.layers))

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        past, T = 0 if cache is None else cache.length(), tokens.size(1)
        query, key = torch.arange(past, past + T)[:, None], torch.arange(past + T)
        allowed = (key <= query)[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None].bool()
        x = self.embed(tokens) * math.sqrt(self.embed.embedding_dim)
        for layer in self.layers:
            x = layer(x, allowed, past, cache)
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        return logits, F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
