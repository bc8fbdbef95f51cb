"""A tiny base model, conversations about sums, and runs of fine-tuning on them."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

import onward
from onward import Decoder, DecoderConfig, FinetuneConfig, Method, SelfAttention, Tokenizer, train_tokenizer
from onward.training.finetuning.base import base_of
from onward.training.methods.method import Base

from support.devices import device

TEXT = "User: Assistant: System: what is the sum of these numbers? It is eleven, or 0123456789. Be brief! " * 3
SETTINGS: dict[str, Any] = {"steps": 6, "batch_size": 4, "precision": "fp32", "validate_every": 3, "template": "plain"}
SETTINGS |= {"device": str(device()), "learning_rate": 1e-2}


def sums(count: int = 24) -> list[dict[str, Any]]:
    """Conversations of different lengths, some of two turns."""
    rows = []
    for i in range(count):
        turns = [("user", f"{i} + {i % 7}?"), ("assistant", f"It is {i + i % 7}." + " Brief!" * (i % 3))]
        turns = [("system", "Be brief!")] * (i % 4 == 0) + turns * (1 + (i % 5 == 0))
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    return rows


def pairs(count: int = 8) -> list[dict[str, Any]]:
    """Sums with a right and a wrong answer, of different lengths."""
    rows = []
    for i in range(count):
        wrong, right = f"It is {i}{i}!" + " Brief!" * (i % 3), f"It is {i + 3}."
        rows.append({"prompt": f"{i} + 3?", "chosen": right, "rejected": wrong})
    return rows


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def tokenizer() -> Tokenizer:
    return train_tokenizer("bpe:300", [TEXT])


def base_model(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A folder with a random decoder, one layer of which has a window."""
    torch.manual_seed(0)
    names = tokenizer()
    attention = (SelfAttention(window=5), SelfAttention())
    sizes: dict[str, Any] = {
        "d_model": 16,
        "n_layers": 2,
        "n_heads": 2,
        "context_length": 96,
        "attention": attention,
        "dropout": 0.1,
    }
    model = Decoder(DecoderConfig(names.vocab_size, **sizes | changes)).to(dtype)
    onward.save(onward.LanguageModel(model, names), folder)
    return folder


def method(name: str, **fields: Any) -> Any:
    """A fine-tuning method of this kind."""
    return Method.kinds[name](**fields)


def base_in(folder: Path | str) -> Base:
    """The model in a folder, as a run passes it to the loss of a method."""
    return base_of(FinetuneConfig(base=str(folder)))


def config(base: Path, data: Path, out: Path, **changes: Any) -> FinetuneConfig:
    return FinetuneConfig.of(base=str(base), sources=(str(data),), out=str(out), **SETTINGS | changes)
