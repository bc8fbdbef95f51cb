"""Bugs planted one at a time in the GPT of examples/planted_bug.py and in the Llama of single_file.py."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from onward.inspection.doctor import Finding

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/planted_bug.py"
GPT = EXAMPLE.read_text(encoding="utf-8").replace("key > query + 1", "key > query")
LLAMA = (ROOT / "tests/support/single_file.py").read_text(encoding="utf-8")
MASK = 'scores = scores.masked_fill(key > query, float("-inf"))'
CROSS_ENTROPY = "logits.flatten(0, 1), targets.flatten()"
ROUTED = "weights = weights / weights.sum(-1, keepdim=True)"
REPEATED = "k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)"
TILED = "k, v = k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1)"
# name: the model, the lines and their replacements, the check that finds the bug, and a part of its message
MUTANTS: dict[str, tuple[str, dict[str, str], str, str]] = {
    "no mask": (GPT, {MASK: "pass"}, "causal", "first in blocks.0.attention"),
    "mask off by one": (GPT, {"key > query": "key > query + 1"}, "causal", "first in blocks.0.attention"),
    "mask of the queries": (GPT, {"key > query": "key < query"}, "causal", "blocks.0.attention"),
    "softmax over the queries": (GPT, {"scores.softmax(-1)": "scores.softmax(-2)"}, "causal", "blocks.0.attention"),
    "mask that hides the query's own key": (GPT, {"key > query": "key >= query"}, "finite", "blocks.0.attention"),
    "logarithm of a negative number": (GPT, {"head(self.norm(x))": "head(self.norm(x).log())"}, "finite", "head"),
    "dropout in eval": (GPT, {"self.dropout, self.training)": "0.1)"}, "repeatable", "F.dropout"),
    "dropout that never acts": (GPT, {"self.dropout, self.training)": "self.dropout, False)"}, "modes", "nothing"),
    "norm over the batch": (
        GPT,
        {"head(self.norm(x))": "head(self.norm(self.batch(x.transpose(1, 2)).transpose(1, 2)))"}
        | {"self.norm = nn": "self.batch = nn.BatchNorm1d(width); self.norm = nn"},
        "modes",
        "BatchNorm1d",
    ),
    "attention that is never added": (
        GPT,
        {"x = x + self.attention(self.norm1(x), memory)": "self.attention(self.norm1(x), memory)"},
        "context",
        "changes later logits by 0.0e+00",
    ),
    "batch and heads mixed": (GPT, {".transpose(1, 2).reshape(B, T": ".transpose(0, 1).reshape(B, T"}, "rows", ""),
    "mean over the batch": (GPT, {"head(self.norm(x))": "head(self.norm(x + x.mean(0)))"}, "rows", ""),
    "padding attended to": (
        LLAMA,
        {"allowed = allowed & attention_mask[:, None, None].bool()": "pass"},
        "padding",
        "the ids of padding tokens change logits",
    ),
    "positions counted from the end": (
        GPT,
        {"torch.arange(past, past + tokens.size(1))": "torch.arange(past + tokens.size(1) - 1, past - 1, -1)"},
        "padding",
        "tokens appended to a text change its logits",
    ),
    "rotary on values": (
        LLAMA,
        {"q, k = rotate(q, places), rotate(k, places)": "q, k, v = (rotate(x, places) for x in (q, k, v))"},
        "positions",
        "first in layers.0.attention",
    ),
    "table of positions too short": (GPT, {"nn.Embedding(context_length,": "nn.Embedding(20,"}, "length", "IndexError"),
    "residual stream with a large offset": (
        GPT,
        {"for layer, block in": "x = x + 300\n        for layer, block in"},
        "precision",
        "blocks.0",
    ),
    "mask with the wrong offset in a cached chunk": (
        GPT,
        {"arange(past, past + T)[:": "arange(T)[:"},
        "cached",
        "in blocks.0.attention",
    ),
    "no mask for cached chunks": (GPT, {"key > query": "(key > query) & (past == 0)"}, "cached", "in chunks of 5"),
    "positions not advanced with the cache": (
        GPT,
        {"torch.arange(past, past + tokens.size(1))": "torch.arange(tokens.size(1))"},
        "cached",
        ", in position",
    ),
    "rotary positions restarted in the cache": (
        LLAMA,
        {"places = torch.arange(past, past + T,": "places = torch.arange(T,"},
        "cached",
        "in layers.0.attention",
    ),
    "cache that forgets": (GPT, {'torch.cat([memory["k"], k], 2)': 'torch.cat([memory["k"] * 0, k], 2)'}, "cached", ""),
    "values that are not removed": (
        LLAMA,
        {"v[:, :, :length] for v": "v[:, :, : length + 4] for v"},
        "rolled back",
        "",
    ),
    "repeated heads in the cache": (
        LLAMA,
        {
            REPEATED: "pass",
            "q, k = rotate(q, places), rotate(k, places)": "q, k = rotate(q, places), rotate(k, places)\n"
            "        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)",
        },
        "cache memory",
        "2 times",
    ),
    "cached step that reads the whole text": (
        LLAMA,
        {
            "x = self.embed(tokens)": "self.text = torch.cat([self.text, tokens], 1) if past else tokens\n"
            "        _ = self(self.text) if past else None\n        x = self.embed(tokens)"
        },
        "speed",
        "times as many activations",
    ),
    "embedding scaled twice": (
        LLAMA,
        {"math.sqrt(self.embed.embedding_dim)": "self.embed.embedding_dim"},
        "embedding",
        "5.657, applied twice",
    ),
    "norm missing on one branch": (
        LLAMA,
        {"self.mlp(self.mlp_norm(x))": "self.mlp(x)"},
        "norms",
        "layers.0.mlp",
    ),
    "norm that is created but not used": (
        LLAMA,
        {"self.mlp(self.mlp_norm(x))": "self.mlp(x)"},
        "gradients",
        "layers.0.mlp_norm.weight",
    ),
    "key/value heads repeated in the wrong order": (
        LLAMA,
        {REPEATED: TILED},
        "heads",
        r"[0, 1, 0, 1]; expected [0, 0, 1, 1]",
    ),
    "values repeated in a different order than keys": (
        LLAMA,
        {REPEATED: TILED.replace("k.repeat(1, groups, 1, 1)", "k.repeat_interleave(groups, 1)")},
        "heads",
        "the values of key/value heads [0, 1, 0, 1]",
    ),
    "scale missing": (LLAMA, {" / math.sqrt(k.size(-1))": ""}, "heads", "the scale is missing"),
    "scale of the full width": (GPT, {"math.sqrt(k.size(-1))": "math.sqrt(D)"}, "heads", "d_model instead of"),
    "router whose weights are not normalized": (LLAMA, {ROUTED: "pass"}, "experts", "layers.1.mlp"),
    "targets shifted twice": (
        GPT,
        {CROSS_ENTROPY: "logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten()"},
        "loss",
        "targets at offset 1",
    ),
    "targets not shifted": (
        LLAMA,
        {"logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()": "logits.flatten(0, 1), labels.flatten()"},
        "loss",
        "targets at offset 0",
    ),
    "loss over the wrong axis": (
        GPT,
        {CROSS_ENTROPY: "logits.reshape(len(tokens), -1, tokens.size(1)), targets"},
        "loss",
        "is the loss over the wrong axis",
    ),
    "sum instead of mean": (GPT, {"targets.flatten())": 'targets.flatten(), reduction="sum")'}, "loss", "the sum over"),
    "initialization far too large": (GPT, {"std=0.02": "std=1.0"}, "first loss", ""),
    "one layer initialized differently": (
        LLAMA,
        {"std=0.02)": 'std=0.4 if "layers.1.attention.wo" in name else 0.02)'},
        "initialization",
        "layers.1.attention.wo.weight",
    ),
    "detached layer": (GPT, {"self.mlp(self.norm2(x))": "self.mlp(self.norm2(x)).detach()"}, "gradients", "mlp"),
    "untied head that claims to be tied": (
        GPT,
        {"self.head.weight = self.embed.weight": "pass"},
        "tied",
        "two matrices",
    ),
    "residual stream cut": (GPT, {"return x + self.mlp(self.norm2(x))": "return 0 * x"}, "overfit", ""),
}


def model_of(source: str, **sizes: int) -> nn.Module:
    """The model defined in the source of a file."""
    names: dict[str, Any] = {"__name__": "patient"}
    exec(compile(source, "patient.py", "exec"), names)
    torch.manual_seed(0)
    model: nn.Module = names["GPT"](**sizes)
    return model


def planted(name: str, **sizes: int) -> nn.Module:
    """The model with this bug."""
    source, lines, _, _ = MUTANTS[name]
    for line, instead in lines.items():
        assert source.count(line) == 1, line
        source = source.replace(line, instead)
    return model_of(source, **sizes)


def failures(found: list[Finding]) -> dict[str, str]:
    """The failed checks, each with its message."""
    return {f.check: f"{f.what}; {f.where}; {f.why}; {f.mend}; {f.how}" for f in found if f.status == "failed"}
