"""llama.cpp, if llama-cpp-python is installed: its logits for a GGUF file, and its tokens."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

REASON = "llama-cpp-python is not installed: files are not compared with llama.cpp"
F32 = 0  # the type of keys and values in the cache


@contextmanager
def opened(path: Path, context: int = 0, **options: Any) -> Iterator[Any]:
    """A file opened in llama.cpp, in fp32; skips the test if llama-cpp-python is not installed."""
    llama_cpp = pytest.importorskip("llama_cpp", reason=REASON)
    exact = {
        "type_k": F32,
        "type_v": F32,
        "flash_attn": False,
        "n_threads": 1,
        "n_threads_batch": 1,
        "logits_all": True,
        "verbose": False,
    }
    model = llama_cpp.Llama(str(path), n_ctx=context, **{**exact, **options})
    try:
        yield model
    finally:
        model.close()


def quantize(path: Path, out: Path, dtype: str) -> None:
    """Quantize a file as llama-quantize does."""
    llama_cpp = pytest.importorskip("llama_cpp", reason=REASON)
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread = {"q8_0": 7, "q4_0": 2, "q4_k_m": 15, "q5_k_m": 17, "q6_k": 18}[dtype], 1
    assert llama_cpp.llama_model_quantize(bytes(path), bytes(out), ctypes.byref(options)) == 0


def logprobs(path: Path, tokens: Sequence[int], context: int = 0, **options: Any) -> Tensor:
    """The log-probabilities (T, V) of the next token after each of T tokens; computed in chunks of 8 tokens."""
    with opened(path, context, n_batch=8, n_ubatch=8, **options) as model:
        model.eval(list(tokens))
        return torch.tensor(np.array(model.scores[: len(tokens)])).log_softmax(-1)


PARTS = [
    *("the", " cat", "Hello", " World", "don't", "I'LL", " we've", "HTTPServer", "snake_case", "camelCase", "x=1;"),
    *(
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        " ",
        "  ",
        "   ",
        "     \n",
        "\n  ",
        "1",
        "23",
        "456",
        "7890",
        "3.14",
        "1,000",
        "١٢٣",
    ),
    *(
        "é",
        "e\u0301",
        "ñ",
        "日本語",
        "中文。",
        "한국어",
        "Привет",
        "العربية",
        "हिन्दी",
        "ไทย",
        "ខ្មែរ",
        "🙂",
        "👩\u200d👩\u200d👧",
        "🇩🇪",
        "👍🏽",
    ),
    *(
        "!",
        "?!",
        "...",
        "(a)",
        "{}",
        "<s>",
        "</s>",
        "<|endoftext|>",
        "<0x0A>",
        "\u2581",
        "\u00a0",
        "\u200b",
        "\ufeff",
        "\x00"[:0],
    ),
    *("→", "∑", "½", "²", "Ⅷ", "ﬁ", "Ｆｕｌｌ", "#", "//", "def f(x):\n    return x", "'s", "’s", "_", "-", "—"),
]


def awkward_texts(count: int = 500) -> list[str]:
    """Texts of words, digits, white space, scripts, emoji with joiners, combining marks and control tokens as text."""
    draw = random.Random(0)
    texts = ["", " ", "  ", "\n", " a", "a ", "a  b", *PARTS]
    while len(texts) < count:
        texts.append("".join(draw.choices(PARTS, k=draw.randint(1, 9))))
    return texts[:count]
