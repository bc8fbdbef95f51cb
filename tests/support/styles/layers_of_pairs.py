"""A wrapper around a list of (norm, layer) pairs, attention and feedforward alternating, with rotary pairs."""

import torch
from torch import einsum, nn
from torch.nn import functional as F


def rotate_pairs(t, freqs):
    x = t.unflatten(-1, (-1, 2))
    a, b = x.unbind(-1)
    cos, sin = freqs.cos().to(t.dtype), freqs.sin().to(t.dtype)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.scale, self.g = dim**0.5, nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.normalize(x, dim=-1) * self.scale * self.g


class Attention(nn.Module):
    def __init__(self, dim, dim_head=8, heads=4):
        super().__init__()
        self.heads, self.scale = heads, dim_head**-0.5
        self.to_qkv = nn.Linear(dim, 3 * dim_head * heads, bias=False)
        self.to_out = nn.Linear(dim_head * heads, dim, bias=False)

    def forward(self, x, freqs):
        b, n, h = x.shape[0], x.shape[1], self.heads
        q, k, v = (t.view(b, n, h, -1).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        q = q * self.scale
        q, k = rotate_pairs(q, freqs), rotate_pairs(k, freqs)
        sim = einsum("b h i d, b h j d -> b h i j", q, k)
        causal_mask = torch.ones((n, n), dtype=torch.bool).triu(1)
        sim = sim.masked_fill(causal_mask, -torch.finfo(sim.dtype).max)
        attn = sim.softmax(dim=-1)
        out = einsum("b h i j, b h j d -> b h i d", attn, v)
        return self.to_out(out.transpose(1, 2).reshape(b, n, -1))


class FeedForward(nn.Module):
    def __init__(self, dim, mult=4):
        super().__init__()
        self.proj_in = nn.Linear(dim, dim * mult * 2)
        self.proj_out = nn.Linear(dim * mult, dim)

    def forward(self, x, freqs):
        x, gate = self.proj_in(x).chunk(2, dim=-1)
        x = x * F.gelu(gate)
        return self.proj_out(x)


class AttentionLayers(nn.Module):
    def __init__(self, dim, depth):
        super().__init__()
        self.layers = nn.ModuleList([])
        for _ in range(depth):
            self.layers.append(nn.ModuleList([RMSNorm(dim), Attention(dim)]))
            self.layers.append(nn.ModuleList([RMSNorm(dim), FeedForward(dim)]))
        inv_freq = 10000 ** (-torch.arange(0, 8, 2).float() / 8)
        self.register_buffer("inv_freq", inv_freq)
        self.final_norm = RMSNorm(dim)

    def forward(self, x):
        t = torch.arange(x.shape[1]).float()
        freqs = einsum("i,j->ij", t, self.inv_freq)
        for norm, layer in self.layers:
            out = layer(norm(x), freqs)
            x = x + out
        return self.final_norm(x)


class GPT(nn.Module):
    def __init__(self, num_tokens=61, max_seq_len=32, dim=32, depth=2):
        super().__init__()
        self.max_seq_len = max_seq_len
        self.token_emb = nn.Embedding(num_tokens, dim)
        nn.init.normal_(self.token_emb.weight, std=0.02)
        self.attn_layers = AttentionLayers(dim, depth)
        self.to_logits = nn.Linear(dim, num_tokens, bias=False)

    def forward(self, x):
        x = self.token_emb(x)
        x = self.attn_layers(x)
        return self.to_logits(x)
