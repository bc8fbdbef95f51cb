"""Unusual but correct decoders, in which the doctor must find no mistake: variants of the styles and others.

A change is a style and its substitutions, as for mutants.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from support.styles import STYLES, edited, made
from support.substitutions import AND

EDITS: dict[str, tuple[str, str]] = {
    **{style: (style, "") for style in STYLES},
    "no positions": (
        "functional",
        'x = x + p["positions"][: tokens.shape[1]] => pass'
        + AND
        + ', "positions": torch.randn(CONTEXT, WIDTH) * std => ',
    ),
    "width 4": ("config_class", "n_embd: int = 32 => n_embd: int = 4" + AND + "n_head: int = 4 => n_head: int = 1"),
    "width 4, recurrent norms": (
        "complex_rotary",
        "dim: int = 32 => dim: int = 4"
        + AND
        + "n_heads: int = 4 => n_heads: int = 1"
        + AND
        + "n_kv_heads: int = 2 => n_kv_heads: int = 1",
    ),
    "context 6": (
        "buffer_mask",
        "self.block_size = => self.limit ="
        + AND
        + "t <= self.block_size => t <= self.limit"
        + AND
        + "block_size=32 => block_size=6",
    ),
    "context 6 without a sentence": (
        "one_head_each",
        "self.block_size = block_size => pass"
        + AND
        + "n_layer, block_size, vocab_size, dropout = 32, 4, 2, 32 => n_layer, block_size, vocab_size, dropout = 32, 4, 2, 6",
    ),
    "one layer": (
        "model_output",
        "self.num_hidden_layers, self.num_attention_heads, self.num_key_value_heads = 2"
        + " => self.num_hidden_layers, self.num_attention_heads, self.num_key_value_heads = 1",
    ),
    "one head": (
        "one_head_each",
        "n_embd, n_head, n_layer, block_size, vocab_size, dropout = 32, 4"
        + " => n_embd, n_head, n_layer, block_size, vocab_size, dropout = 32, 1",
    ),
    "multi-query": ("complex_rotary", "n_kv_heads: int = 2 => n_kv_heads: int = 1"),
    "sinks": (
        "model_output",
        "attn_weights = F.softmax(attn_weights, dim=-1, dtype=torch.float32).to(q.dtype)"
        + " => sink = self.sinks[None, :, None, None].expand(b, -1, t, 1)\n"
        + "        attn_weights = F.softmax(torch.cat([attn_weights, sink], -1), dim=-1)[..., :-1]"
        + AND
        + "self.head_dim = config => self.sinks = nn.Parameter(torch.zeros(4)); self.head_dim = config",
    ),
    "softmax with one more in its sum": (
        "functional",
        "weights = torch.softmax(logits, dim=-1)"
        + " => weights = torch.softmax(F.pad(logits, (1, 0)), dim=-1)[..., 1:]",
    ),
    "soft caps": (
        "model_output",
        "attn_weights = attn_weights + attention_mask"
        + " => attn_weights = 50.0 * torch.tanh(attn_weights / 50.0) + attention_mask"
        + AND
        + "logits = self.lm_head(self.norm(hidden_states)) => logits = 30 * torch.tanh(self.lm_head(self.norm(hidden_states)) / 30)",
    ),
    "low soft cap": (
        "functional",
        "weights = torch.softmax(logits => weights = torch.softmax(torch.where(visible, 5 * torch.tanh(logits / 5), -1e9)",
    ),
    "windows": (
        "complex_rotary",
        "triu(diagonal=1).type_as(h) => triu(diagonal=1).type_as(h)\n"
        + "        mask = mask + torch.full((seqlen, seqlen), float('-inf')).tril(diagonal=-4).type_as(h)",
    ),
    "windows in every second layer": (
        "functional",
        "visible = torch.arange(t)[:, None] >= torch.arange(t)[None, :]"
        + " => visible = torch.ones(t, t, dtype=torch.bool).tril() & ~torch.ones(t, t, dtype=torch.bool).tril(-3 if name == 'l0' else -t)",
    ),
    "parallel": (
        "complex_rotary",
        "return h + self.feed_forward(self.ffn_norm(h)) => return h + self.feed_forward(self.ffn_norm(x))",
    ),
    "sandwich": (
        "model_output",
        "hidden_states = residual + hidden_states => hidden_states = residual + self.after1(hidden_states)"
        + AND
        + "return residual + hidden_states => return residual + self.after2(hidden_states)"
        + AND
        + "self.mlp = MLP(config) => self.mlp = MLP(config); self.after1 = RMSNorm(config.hidden_size, 1e-6); self.after2 = RMSNorm(config.hidden_size, 1e-6)",
    ),
    "norms of branches alone": (
        "complex_rotary",
        "self.attention(self.attention_norm(x), freqs_cis, mask) => self.attention_norm(self.attention(x, freqs_cis, mask))"
        + AND
        + "self.feed_forward(self.ffn_norm(h)) => self.ffn_norm(self.feed_forward(h))",
    ),
    "tied": (
        "complex_rotary",
        "self.freqs_cis = => nn.init.normal_(self.tok_embeddings.weight, std=0.02)\n"
        + "        self.output.weight = self.tok_embeddings.weight\n        self.freqs_cis =",
    ),
    "one block, used twice": (
        "functional",
        "    for i in range(LAYERS):\n        x => "
        + "    for i in [0] * LAYERS:\n        x"
        + AND
        + "        for i in range(LAYERS):\n => "
        + "        for i in range(1):\n",
    ),
    "one block in all layers of a list": (
        "complex_rotary",
        "for _ in range(args.n_layers): => block = TransformerBlock(args)\n        for _ in range(args.n_layers):"
        + AND
        + "self.layers.append(TransformerBlock(args)) => self.layers.append(block)",
    ),
    "normed queries and keys": (
        "complex_rotary",
        "xq, xk = apply => xq, xk = F.rms_norm(xq, (8,)), F.rms_norm(xk, (8,))\n        xq, xk = apply",
    ),
    "cosine attention": (
        "functional",
        "logits = logits / q.shape[-1] ** 0.5 => logits = logits / (q.norm(dim=-1)[..., None] * k.norm(dim=-1)[:, :, None] + 1e-6) * 10",
    ),
    "bilinear": ("complex_rotary", "F.silu(self.w1(x)) * self.w3(x) => self.w1(x) * self.w3(x)"),
    "squared ReLU": (
        "config_class",
        "x = self.gelu(x) => x = F.relu(x).square()" + AND + "        self.gelu = nn.GELU()\n => ",
    ),
    "learned biases for distance": (
        "linear_bias",
        "alibi = -self.slopes[:, None, None] * distance => alibi = self.table[:, distance.abs().long().clamp(max=7)]"
        + AND
        + 'self.register_buffer("slopes", slopes_of(heads)) => self.table = nn.Parameter(torch.zeros(heads, 8))',
    ),
    "branches that begin at zero": (
        "one_head_each",
        "x + self.sa( => x + self.alpha * self.sa("
        + AND
        + "self.ln1 = => self.alpha = nn.Parameter(torch.zeros(1)); self.ln1 ="
        + AND
        + "x + self.ffwd( => x + self.alpha * self.ffwd(",
    ),
    "matrices of zeros": (
        "model_output",
        "std=0.02) => std=0.02)\n        for name, p in self.named_parameters():\n"
        + "            if 'o_proj' in name or 'down' in name or 'lm_head' in name:\n                nn.init.zeros_(p)",
    ),
    "partial rotation": (
        "layers_of_pairs",
        "rotate_pairs(q, freqs), rotate_pairs(k, freqs)"
        + " => torch.cat([rotate_pairs(q[..., :4], freqs), q[..., 4:]], -1), torch.cat([rotate_pairs(k[..., :4], freqs), k[..., 4:]], -1)"
        + AND
        + "torch.arange(0, 8, 2).float() / 8 => torch.arange(0, 4, 2).float() / 4",
    ),
    "rotation that decays": (
        "layers_of_pairs",
        "rotate_pairs(q, freqs), rotate_pairs(k, freqs)"
        + " => rotate_pairs(q, freqs) * 0.98 ** torch.arange(n)[:, None], rotate_pairs(k, freqs) / 0.98 ** torch.arange(n)[:, None]",
    ),
    "scores that grow with the text": (
        "layers_of_pairs",
        "q = q * self.scale => q = q * self.scale * (2 + torch.arange(n)).float().log()[:, None]",
    ),
    "rotation in one layer alone": (
        "layers_of_pairs",
        "for norm, layer in self.layers:\n => for i, (norm, layer) in enumerate(self.layers):\n"
        + AND
        + "layer(norm(x), freqs) => layer(norm(x), freqs if i > 1 else 0 * freqs)",
    ),
    "rotation of interpolated positions": (
        "model_output",
        "position_ids[..., None].float() => (position_ids / 4)[..., None].float()",
    ),
    "positions added to queries and keys": (
        "functional",
        'x = x + p["positions"][: tokens.shape[1]] => pass'
        + AND
        + 'p[f"{name}_wv"]) => p[f"{name}_wv"])\n    place = p["positions"][: x.shape[1]].unflatten(-1, (HEADS, -1)).transpose(0, 1)\n    q, k = q + place, k + place',
    ),
    "heads that talk": (
        "functional",
        "mixed = torch => weights = torch.einsum('bhqk,hg->bgqk', weights, p['talk'])\n    mixed = torch"
        + AND
        + 'p["scale"], p["shift"] = => p["talk"] = torch.eye(HEADS)\n        p["scale"], p["shift"] =',
    ),
    "difference of two attentions": (
        "functional",
        "mixed = torch => weights = weights - 0.3 * weights.flip(1)\n    mixed = torch",
    ),
    "values of the first layer": (
        "functional",
        'p[f"{name}_wv"]) => p[f"{name}_wv"])\n    v = v if name == "l0" else (v + p["l0_wv"].mean()) / 2',
    ),
    "residual over the root of two": (
        "functional",
        "    x = x + mlp(p => x = x / 2**0.5 + mlp(p".replace("    x", "x"),
    ),
    "gated branches": (
        "functional",
        "return torch.einsum(\"bqhe,hed->bqd\", mixed => mixed = mixed * torch.sigmoid(torch.einsum('btd,dhe->bthe', x, p[f'{name}_wq']))\n    return torch.einsum(\"bqhe,hed->bqd\", mixed",
    ),
    "shifted keys": (
        "functional",
        "    logits = torch.einsum( =>     k = (k + F.pad(k, (0, 0, 1, 0))[:, :, :-1]) / 2\n    logits = torch.einsum(",
    ),
    "attention alone": (
        "one_head_each",
        "        x = x + self.ffwd(self.ln2(x))\n => "
        + AND
        + "        self.ffwd = FeedForward(n_embd)\n => "
        + AND
        + "        self.ln2 = nn.LayerNorm(n_embd)\n => ",
    ),
    "norms without gains": (
        "config_class",
        "nn.LayerNorm(config.n_embd) => nn.LayerNorm(config.n_embd, elementwise_affine=False)",
    ),
    "norms before with PyTorch's layers": ("torch_encoder", "batch_first=True) => batch_first=True, norm_first=True)"),
    "embeddings of low rank": (
        "complex_rotary",
        "self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)"
        + " => self.tok_embeddings = nn.Sequential(nn.Embedding(args.vocab_size, 8), nn.Linear(8, args.dim, bias=False))",
    ),
    "matrices of low rank": (
        "complex_rotary",
        "self.wq = nn.Linear(args.dim, args.n_heads * self.head_dim, bias=False)"
        + " => self.wq = nn.Sequential(nn.Linear(args.dim, 6), nn.Linear(6, args.dim))",
    ),
    "loss with a part for balance": (
        "buffer_mask",
        "targets.reshape(-1)) => targets.reshape(-1)) + 0.01 * x.square().mean()",
    ),
    "several exits": (
        "buffer_mask",
        "return logits, loss => return logits, [self.head(x)], loss"
        + AND
        + "def forward(self, idx, targets=None) => def forward(self, idx)"
        + AND
        + "        if targets is not None:\n            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))\n => ",
    ),
    "skips over the layers": (
        "functional",
        "    for i in range(LAYERS):\n        x = =>     first = x\n    for i in range(LAYERS):\n        x = x + p['skip'][i] * first\n        x ="
        + AND
        + 'p["scale"], p["shift"] = => p["skip"] = torch.zeros(LAYERS)\n        p["scale"], p["shift"] =',
    ),
}


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], residual: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(61, 32), nn.Linear(32, 61)
        self.layers = nn.ModuleList(kind(32, 32, batch_first=True) for _ in range(2))
        self.residual = residual
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            y, _ = layer(x)
            x = x + y if self.residual else y
        return self.head(x)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(61, 32), nn.Linear(32, 61)
        self.layers = nn.ModuleList(nn.Conv1d(32, 64, 3) for _ in range(3))
        self.norm = nn.LayerNorm(32)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens):
        x = self.embed(tokens).transpose(1, 2)
        for layer in self.layers:
            a, b = layer(F.pad(x, (2, 0))).chunk(2, 1)
            x = x + a * b.sigmoid()
        return self.head(self.norm(x.transpose(1, 2)))


class Scan(nn.Module):
    """A diagonal state-space model with learned decays, computed as a scan over time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(61, 32), nn.Linear(32, 61, bias=False)
        self.into, self.out = nn.Linear(32, 64), nn.Linear(32, 32)
        self.log_a = nn.Parameter(torch.log(torch.arange(1, 9).float()).expand(32, 8).clone())
        self.b, self.c = nn.Linear(32, 8), nn.Linear(32, 8)
        self.norm, self.last = nn.RMSNorm(32), nn.RMSNorm(32)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens):
        x = self.embed(tokens)
        u, gate = self.into(self.norm(x)).chunk(2, -1)
        decay, state, ys = torch.exp(-0.1 * self.log_a.exp()), torch.zeros(len(x), 32, 8).to(x), []
        b, c = self.b(u), self.c(u)
        for t in range(x.size(1)):
            state = state * decay + u[:, t, :, None] * b[:, t, None]
            ys.append((state * c[:, t, None]).sum(-1))
        return self.head(self.last(x + self.out(torch.stack(ys, 1) * F.silu(gate))))


class LinearAttention(nn.Module):
    """Linear attention (Katharopoulos et al. 2020): causal scores of the features ELU + 1, divided by their sums."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(61, 32), nn.Linear(32, 61, bias=False)
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.norm, self.last = nn.LayerNorm(32), nn.LayerNorm(32)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens):
        x = self.embed(tokens)
        y = self.norm(x)
        q, k, v = F.elu(self.q(y)) + 1, F.elu(self.k(y)) + 1, self.v(y)
        weights = (q @ k.transpose(1, 2)).tril()
        mixed = weights @ v / weights.sum(-1, keepdim=True)
        return self.head(self.last(x + self.o(mixed)))


def of(change: tuple[str, str]) -> nn.Module:
    return made(edited(*change))


def in_bf16(style: str) -> nn.Module:
    return made(STYLES[style]).bfloat16()


# except model_output, whose masks and angles are always fp32
BF16 = [style for style in STYLES if style != "model_output"]
CORRECT: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(of, change) for name, change in EDITS.items()},
    **{f"{style} in bf16": partial(in_bf16, style) for style in BF16},
    "GRU": lambda: Recurrent(nn.GRU, True),
    "LSTM without residuals": lambda: Recurrent(nn.LSTM, False),
    "convolution": Convolution,
    "scan": Scan,
    "linear attention": LinearAttention,
}
