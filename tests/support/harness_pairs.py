"""Small models of published families with tokenizers of several kinds, as Onward and transformers models for
lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, processors

import onward
from onward import train_tokenizer

from support.parity import publish

TEXT = "The cat sat on the mat. One day a dog came to the park, and the cat ran home.\nQuestion: Answer: é 猫 A B\n"
LENGTH = 48  # context length in tokens
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
NO_SYSTEM = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "[{{ m.role }}] {{ m.content | trim }} {% endfor %}{% if add_generation_prompt %}[model] {% endif %}"
)


def byte_level(*controls: str) -> tokenizers.Tokenizer:
    inner = train_tokenizer("bpe:330", [TEXT * 9]).inner
    inner.add_special_tokens(list(controls))
    inner.encode_special_tokens = False
    return inner


def marked() -> tokenizers.Tokenizer:
    """A tokenizer like SentencePiece's: words begin with a mark, unknown characters become bytes, texts begin with
    <s>."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *sorted(set(TEXT) - {" ", "猫"}), "▁"]
    merges = [("▁", "c"), ("a", "t"), ("▁c", "at"), ("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁"), ("s", "at")]
    ids = {piece: i for i, piece in enumerate([*pieces, *map("".join, merges)])}
    inner = tokenizers.Tokenizer(models.BPE(ids, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", 1)])
    return inner


MARKED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": LENGTH}
GATED = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
# configuration class, sizes, function that makes a tokenizer, names of its control tokens
CASES: dict[str, tuple[type, dict[str, Any], Callable[[], tokenizers.Tokenizer], dict[str, str]]] = {
    "gpt2, bytes, one token begins and ends texts": (
        transformers.GPT2Config,
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH},
        byte_level,
        {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    ),
    "llama, pieces, texts begin with <s>": (transformers.LlamaConfig, GATED, marked, MARKED),
    "gemma, pieces, texts begin with <s>": (
        transformers.GemmaConfig,
        {**GATED, "head_dim": 8},
        marked,
        {**MARKED, "chat_template": NO_SYSTEM},
    ),
    "qwen2, bytes, no token begins texts": (
        transformers.Qwen2Config,
        GATED,
        lambda: byte_level("<|im_start|>", "<|im_end|>"),
        {"eos_token": "<|im_end|>", "chat_template": CHATML},
    ),
}


@cache
def folder_of(name: str, root: Path) -> Path:
    """Save the model and the tokenizer of a case, and return their folder."""
    config, sizes, make, names = CASES[name]
    folder, inner = root / name.split(",")[0], make()
    ids = {f"{key}_id": inner.token_to_id(value) for key, value in names.items() if key.endswith("os_token")}
    publish(config(vocab_size=inner.get_vocab_size(), **{"bos_token_id": None, **ids}, **sizes), folder)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, clean_up_tokenization_spaces=False, **names
    )
    tokenizer.save_pretrained(folder)
    return folder


@cache
def models_of(name: str, root: Path) -> tuple[Any, Any]:
    """The model of a case as lm-evaluation-harness models of Onward and of transformers, both in fp32."""
    from lm_eval.models.huggingface import HFLM

    from onward.harness import HarnessModel

    folder = folder_of(name, root)
    theirs = HFLM(pretrained=str(folder), device="cpu", batch_size=3, dtype="float32", softmax_dtype="float32")
    return HarnessModel(onward.load(folder)), theirs
