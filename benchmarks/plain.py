"""The baseline: GPT-2 in plain PyTorch."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PlainBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class PlainGPT(nn.Module):
    """Learned positions, pre-norm blocks, GELU, tied head: tokens (B, T) -> logits (B, T, V)."""

    def __init__(self, vocab: int, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(PlainBlock(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.size(1)))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)

    @torch.no_grad()
    def copy(self, theirs: dict[str, Tensor]) -> None:
        """Copy the weights of an Onward decoder of the same shape from its state_dict."""
        names = {"ln_1": "attn_norm", "ln_2": "mlp_norm", "proj": "attn.out", "up": "mlp.up", "down": "mlp.down"}
        top = {"wte.weight": "embed.weight", "wpe.weight": "position.weight"}
        for name, parameter in self.named_parameters():
            if name.startswith("blocks."):
                _, i, module, leaf = name.split(".")
                ours = [f"attn.{x}" for x in "qkv"] if module == "qkv" else [names[module]]
                parameter.copy_(torch.cat([theirs[f"blocks.{i}.{our}.{leaf}"] for our in ours]))
            else:
                parameter.copy_(theirs[top.get(name, name.replace("ln_f", "norm"))])
