"""Linear biases for positions, packed projections by head, parallel branches, and a dict as the result."""

import math

import torch
from torch import nn
from torch.nn import functional as F


def slopes_of(heads):
    return torch.tensor([2 ** (-8 * (i + 1) / heads) for i in range(heads)])


class Attention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads, self.head_dim = heads, hidden // heads
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.dense = nn.Linear(hidden, hidden)
        self.register_buffer("slopes", slopes_of(heads))

    def forward(self, x):
        b, t, d = x.shape
        fused = self.query_key_value(x).view(b, t, self.heads, 3, self.head_dim)
        q, k, v = (fused[..., i, :].transpose(1, 2) for i in range(3))
        place = torch.arange(t)
        distance = (place[:, None] - place[None, :]).to(x.dtype)
        alibi = -self.slopes[:, None, None] * distance
        scores = torch.baddbmm(
            alibi.repeat(b, 1, 1),
            q.reshape(b * self.heads, t, -1),
            k.reshape(b * self.heads, t, -1).transpose(1, 2),
            alpha=1 / math.sqrt(self.head_dim),
        ).view(b, self.heads, t, t)
        scores = scores.masked_fill(distance < 0, torch.finfo(x.dtype).min)
        probs = F.softmax(scores, dim=-1)
        context = torch.bmm(probs.flatten(0, 1), v.reshape(b * self.heads, t, -1))
        context = context.view(b, self.heads, t, -1).permute(0, 2, 1, 3).reshape(b, t, d)
        return self.dense(context)


class Block(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.dense_h_to_4h = nn.Linear(hidden, 4 * hidden)
        self.dense_4h_to_h = nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        y = self.norm(x)
        feedforward = self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(y)))
        return x + self.attention(y) + feedforward


class GPT(nn.Module):
    def __init__(self, vocab=61, hidden=32, heads=4, layers=2):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, hidden)
        self.word_embeddings_layernorm = nn.LayerNorm(hidden)
        self.h = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, targets=None):
        x = self.word_embeddings_layernorm(self.word_embeddings(tokens))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return {"logits": logits}
        return {"logits": logits, "loss": F.cross_entropy(logits.transpose(1, 2), targets)}
