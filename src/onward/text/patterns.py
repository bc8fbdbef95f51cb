"""The regular expressions with which byte-level tokenizers split texts before merging. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = (
    rf"{CONTRACTION}|"
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
CL100K = (  # unlike LLAMA3, keeps white space at the end of a text in one piece
    rf"{CONTRACTION}|"
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s+\z|\s*[\r\n]|\s+(?!\S)|\s"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN35 = QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_END = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = rf"{CONTRACTION}?"
_WORD = r"[^\r\n\p{L}\p{N}]?"
O200K = rf"{_WORD}{_UPPER}*{_LOWER}+{_SHORT}|{_WORD}{_UPPER}+{_LOWER}*{_SHORT}|\p{{N}}{{1,3}}|{_END}"  # GPT-4o, GPT-OSS
TEKKEN = rf"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*|\p{{N}}|{_END}"
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
DIGIT, DIGITS = r"\p{N}", r"\p{N}+"
PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)


def byte_level_bpe(model: models.BPE, patterns: Sequence[str]) -> tokenizers.Tokenizer:
    """A byte-level tokenizer that splits texts by the regular expressions, one after the other, before merging."""
    inner = tokenizers.Tokenizer(model)
    first: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [*first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    inner.decoder = decoders.ByteLevel()
    return inner


def patterns_of(pre_tokenizer: Any) -> tuple[str, ...] | None:
    """The regular expressions by which the `pre_tokenizer` of a tokenizer.json splits texts; () if it does not split,
    None if it is not byte-level or splits in another way."""
    inner = pre_tokenizer.get("pretokenizers") if isinstance(pre_tokenizer, dict) else None
    patterns, in_bytes = list[str](), False
    for part in [pre_tokenizer] if inner is None else inner:
        match part:
            case {"type": "Digits", "individual_digits": bool(single)}:
                patterns.append(DIGIT if single else DIGITS)
            case {"type": "Punctuation", "behavior": "Contiguous"}:
                patterns.append(PUNCTUATION)
            case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
                patterns.append(pattern)
            case {"type": "ByteLevel", "add_prefix_space": False, **rest} if not in_bytes:
                in_bytes = True
                patterns += [GPT2] if rest.get("use_regex", True) else []
            case _:
                return None
    return tuple(patterns) if in_bytes else None


def byte_symbols() -> dict[str, int]:
    """The byte of each symbol of GPT-2's byte-level alphabet: printable bytes have their own characters as symbols, the
    others the remaining symbols in order."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    own = {chr(b): b for b in range(256) if chr(b) in alphabet}
    return own | dict(zip(sorted(alphabet - own.keys()), sorted(set(range(256)) - set(own.values()))))


BYTE_OF = byte_symbols()
