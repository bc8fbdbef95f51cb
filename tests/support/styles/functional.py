"""Functions over a flat dictionary of parameters, with einsum and norms written out."""

import torch
from torch import nn
from torch.nn import functional as F

HEADS, WIDTH, LAYERS, VOCAB, CONTEXT = 4, 32, 2, 61, 32


def layer_norm(x, scale, shift, eps=1e-5):
    mean = x.mean(-1, keepdim=True)
    variance = x.var(-1, keepdim=True, unbiased=False)
    return (x - mean) / torch.sqrt(variance + eps) * scale + shift


def attention(p, name, x):
    q = torch.einsum("btd,dhe->bhte", x, p[f"{name}_wq"])
    k = torch.einsum("btd,dhe->bhte", x, p[f"{name}_wk"])
    v = torch.einsum("btd,dhe->bhte", x, p[f"{name}_wv"])
    logits = torch.einsum("bhqe,bhke->bhqk", q, k)
    logits = logits / q.shape[-1] ** 0.5
    t = x.shape[1]
    visible = torch.arange(t)[:, None] >= torch.arange(t)[None, :]
    logits = torch.where(visible, logits, torch.tensor(-1e9, dtype=x.dtype))
    weights = torch.softmax(logits, dim=-1)
    mixed = torch.einsum("bhqk,bhke->bqhe", weights, v)
    return torch.einsum("bqhe,hed->bqd", mixed, p[f"{name}_wo"])


def mlp(p, name, x):
    hidden = torch.einsum("btd,df->btf", x, p[f"{name}_w1"]) + p[f"{name}_b1"]
    hidden = F.gelu(hidden)
    return torch.einsum("btf,fd->btd", hidden, p[f"{name}_w2"]) + p[f"{name}_b2"]


def decode(p, tokens):
    x = p["embedding"][tokens]
    x = x + p["positions"][: tokens.shape[1]]
    for i in range(LAYERS):
        x = x + attention(p, f"l{i}", layer_norm(x, p[f"l{i}_scale1"], p[f"l{i}_shift1"]))
        x = x + mlp(p, f"l{i}", layer_norm(x, p[f"l{i}_scale2"], p[f"l{i}_shift2"]))
    x = layer_norm(x, p["scale"], p["shift"])
    return torch.einsum("btd,dv->btv", x, p["unembedding"])


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.context_length = CONTEXT
        std, E = 0.02, WIDTH // HEADS
        p = {"embedding": torch.randn(VOCAB, WIDTH) * std, "positions": torch.randn(CONTEXT, WIDTH) * std}
        for i in range(LAYERS):
            for name in "wq", "wk", "wv":
                p[f"l{i}_{name}"] = torch.randn(WIDTH, HEADS, E) * std
            p[f"l{i}_wo"] = torch.randn(HEADS, E, WIDTH) * std
            p[f"l{i}_w1"], p[f"l{i}_b1"] = torch.randn(WIDTH, 4 * WIDTH) * std, torch.zeros(4 * WIDTH)
            p[f"l{i}_w2"], p[f"l{i}_b2"] = torch.randn(4 * WIDTH, WIDTH) * std, torch.zeros(WIDTH)
            for j in 1, 2:
                p[f"l{i}_scale{j}"], p[f"l{i}_shift{j}"] = torch.ones(WIDTH), torch.zeros(WIDTH)
        p["scale"], p["shift"] = torch.ones(WIDTH), torch.zeros(WIDTH)
        p["unembedding"] = torch.randn(WIDTH, VOCAB) * std
        self.params = nn.ParameterDict(p)

    def forward(self, tokens):
        return decode(self.params, tokens)
