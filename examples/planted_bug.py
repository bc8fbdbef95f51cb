"""A GPT in one file with one bug that training does not show: its loss falls faster than that of a correct GPT.

onward doctor examples/planted_bug.py:GPT
"""

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dropout = heads, kv_heads, dropout
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width // heads * kv_heads)
        self.v = nn.Linear(width, width // heads * kv_heads)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: dict[str, Tensor] | None = None) -> Tensor:
        B, T, D = x.shape
        q = self.q(x).view(B, T, self.heads, -1).transpose(1, 2)
        k = self.k(x).view(B, T, self.kv_heads, -1).transpose(1, 2)
        v = self.v(x).view(B, T, self.kv_heads, -1).transpose(1, 2)
        if memory is not None:
            if "k" in memory:
                k, v = torch.cat([memory["k"], k], 2), torch.cat([memory["v"], v], 2)
            memory["k"], memory["v"] = k, v
        past = k.size(2) - T
        k = k.repeat_interleave(self.heads // self.kv_heads, 1)
        v = v.repeat_interleave(self.heads // self.kv_heads, 1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
        query, key = torch.arange(past, past + T)[:, None], torch.arange(past + T)
        scores = scores.masked_fill(key > query + 1, float("-inf"))
        weights = F.dropout(scores.softmax(-1), self.dropout, self.training)
        return self.out((weights @ v).transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, kv_heads, dropout)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, memory: dict[str, Tensor] | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), memory)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocab_size: int = 61, context_length: int = 32, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.context_length, self.tied = context_length, True
        self.embed = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(context_length, width)
        self.blocks = nn.ModuleList(Block(width, 4, 2, 0.1) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.apply(self.initialize)
        self.head.weight = self.embed.weight

    def initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def new_cache(self) -> list[dict[str, Tensor]]:
        return [{} for _ in self.blocks]

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, cache: list[dict[str, Tensor]] | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        past = cache[0]["k"].size(2) if cache and cache[0] else 0
        x = self.embed(tokens) + self.position(torch.arange(past, past + tokens.size(1)))
        for layer, block in enumerate(self.blocks):
            x = block(x, cache[layer] if cache else None)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(steps + 1):
        tokens = torch.randint(61, (8, 33))  # random tokens: no model can predict the next token
        _, loss = model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.2f}; guessing costs {math.log(61):.2f}")


if __name__ == "__main__":
    main()
