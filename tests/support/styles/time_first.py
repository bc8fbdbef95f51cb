"""Time as the first axis (T, B, D), PyTorch's multi-head attention, and norms after each branch."""

import torch
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.attn = nn.MultiheadAttention(width, heads, dropout=dropout, batch_first=False)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask):
        a, _ = self.attn(x, x, x, attn_mask=mask, need_weights=False)
        x = self.norm1(x + self.dropout(a))
        f = self.fc2(F.relu(self.fc1(x)))
        x = self.norm2(x + self.dropout(f))
        return x


class GPT(nn.Module):
    def __init__(self, vocab=61, width=32, heads=4, depth=2, max_length=32, dropout=0.1):
        super().__init__()
        self.max_length = max_length
        self.tokens = nn.Embedding(vocab, width)
        self.position = nn.Embedding(max_length, width)
        self.stack = nn.ModuleList([Layer(width, heads, dropout) for _ in range(depth)])
        self.out = nn.Linear(width, vocab)
        nn.init.normal_(self.out.weight, std=0.02)

    def forward(self, ids):
        ids = ids.t()
        T = ids.size(0)
        x = self.tokens(ids) + self.position(torch.arange(T))[:, None]
        mask = torch.triu(torch.ones(T, T, dtype=torch.bool), diagonal=1)
        for layer in self.stack:
            x = layer(x, mask)
        return self.out(x).transpose(0, 1)
