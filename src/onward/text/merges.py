"""Vocabularies of vocab.json and merges.txt, for which each model family splits texts in its own way. Does not import
torch.

The two files specify neither how a text is normalized nor how it is split before merging: this follows from a class of
transformers, see `class_name`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from onward.base.errors import UserError
from onward.text.patterns import QWEN2, QWEN35

END = "<|endoftext|>"  # GPT-2's control token, which begins and ends a text
Tables = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class TokenizerClass:
    """The rules by which a class of transformers reads vocab.json and merges.txt."""

    split: str = ""  # regular expression that splits texts; "" for GPT-2's
    digits: bool = False  # whether digits are split one by one before GPT-2's splits
    composed: bool = False  # whether a text is normalized to NFC
    names: Mapping[str, str] = field(default_factory=dict)  # control tokens by name, such as bos_token


GPT2_NAMES = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END)
QWEN_NAMES = dict.fromkeys(("eos_token", "unk_token", "pad_token"), END)
COHERE_NAMES = {
    "bos_token": "<BOS_TOKEN>",
    "eos_token": "<|END_OF_TURN_TOKEN|>",
    "unk_token": "<UNK>",
    "sep_token": "<SEP>",
    "pad_token": "<PAD>",
    "cls_token": "<CLS>",
    "mask_token": "<MASK_TOKEN>",
}
CLASSES = {
    "GPT2Tokenizer": TokenizerClass(names=GPT2_NAMES),
    "CodeGenTokenizer": TokenizerClass(names=GPT2_NAMES),
    "GPTNeoXTokenizer": TokenizerClass(composed=True, names=GPT2_NAMES | {"pad_token": "<|padding|>"}),
    "Qwen2Tokenizer": TokenizerClass(QWEN2, composed=True, names=QWEN_NAMES),
    "Qwen3_5Tokenizer": TokenizerClass(QWEN35, composed=True, names=QWEN_NAMES),
    "CohereTokenizer": TokenizerClass(digits=True, composed=True, names=COHERE_NAMES),
    "OpenAIGPTTokenizer": TokenizerClass(names={"unk_token": "<unk>"}),  # words of lower-case letters, not bytes
}
OF_MODELS = {
    "GPT2Tokenizer": "gpt2 gpt_neo gptj opt phi starcoder2 codegen dbrx jais2",
    "GPTNeoXTokenizer": "gpt_neox mpt olmo olmoe falcon_mamba mamba mamba2 rwkv xlstm",
    "Qwen2Tokenizer": "qwen2 qwen2_moe qwen2_vl qwen2_5_vl qwen3 qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe",
    "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text",
    "CohereTokenizer": "cohere cohere2",
    "OpenAIGPTTokenizer": "openai-gpt",
}
OF_MODEL = {model_type: name for name, types in OF_MODELS.items() for model_type in types.split()}
MISNAMED = {"qwen2", *OF_MODELS["Qwen3_5Tokenizer"].split()}  # published with the names of other classes
GENERIC = "PreTrainedTokenizer", "TokenizersBackend"  # these classes do not determine how texts are split


def class_name(tables: Tables) -> str:
    """The class of transformers that reads a folder's vocab.json and merges.txt: the named one or, if the name is
    missing, generic or known to be wrong, that of the model_type. GPT-2's if the folder names neither; the result may
    be unknown to CLASSES."""
    config, given = tables.get("config.json", {}), tables.get("tokenizer_config.json", {})
    model_type = str(config.get("model_type") or "")
    named = str(given.get("tokenizer_class") or config.get("tokenizer_class") or "").removesuffix("Fast")
    own = OF_MODEL.get(model_type, "")
    if named in ("", *GENERIC) or (own and model_type in MISNAMED):
        return own or named or (f"model_type {model_type!r}" if model_type else "GPT2Tokenizer")
    return named


def read_merges(folder: Path, tables: Tables) -> tuple[tokenizers.Tokenizer, Mapping[str, str]]:
    """The tokenizer of a folder's vocab.json and merges.txt, and its control tokens by name, such as bos_token; other
    files of the folder may name different ones."""
    name = class_name(tables)
    if name not in CLASSES:
        raise UserError(
            f"Cannot read vocab.json and merges.txt in {folder}, because Onward does not know how {name} splits texts: "
            f"add a tokenizer.json, or set tokenizer_class in tokenizer_config.json to one of {', '.join(CLASSES)}"
        )
    kind = CLASSES[name]
    if name == "OpenAIGPTTokenizer":
        inner = tokenizers.Tokenizer(read_bpe(folder, unk_token="<unk>", end_of_word_suffix="</w>"))
        inner.normalizer, inner.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        inner.decoder = decoders.BPEDecoder("</w>")
        return inner, kind.names
    prefixed = bool(tables.get("tokenizer_config.json", {}).get("add_prefix_space"))
    bytes_of: Any = pre_tokenizers.ByteLevel(add_prefix_space=prefixed, use_regex=not kind.split)
    first: list[Any] = [pre_tokenizers.Split(Regex(kind.split), "isolated")] if kind.split else []
    first += [pre_tokenizers.Digits(individual_digits=True)] if kind.digits else []
    inner = tokenizers.Tokenizer(read_bpe(folder))
    inner.pre_tokenizer = pre_tokenizers.Sequence([*first, bytes_of]) if first else bytes_of
    inner.decoder = decoders.ByteLevel()
    if kind.composed:
        inner.normalizer = normalizers.NFC()
    return inner, kind.names


def read_bpe(folder: Path, **options: Any) -> models.BPE:
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if not merges.exists():
        raise UserError(f"there is no merges.txt in {folder}, but {vocab.name} needs it: copy or download it")
    try:
        return models.BPE.from_file(str(vocab), str(merges), **options)
    except Exception as error:  # the library raises no narrower class
        raise UserError(f"{vocab} and merges.txt are not a tokenizer ({error}): copy or download both again") from None
