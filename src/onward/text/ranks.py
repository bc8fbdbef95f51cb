"""Byte-level vocabularies by rank: tiktoken's files and Mistral's tekken.json. Does not import torch.

A rank is the place of a token in the order of merges and, in tiktoken's files, its id. A tiktoken file has neither the
pattern that splits texts nor the control tokens; both are inferred from the number of ranks.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

from onward.base.errors import UserError
from onward.text.patterns import BYTE_OF, CL100K, GPT2, LLAMA3, O200K, QWEN2, byte_level_bpe

SYMBOLS = {byte: symbol for symbol, byte in BYTE_OF.items()}
TEKKEN_SPECIALS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


@dataclass(frozen=True)
class PublishedVocabulary:
    """The settings of a known vocabulary that its tiktoken file lacks."""

    pattern: str
    specials: Mapping[str, int]
    bos: str
    eos: str


def numbered(names: Sequence[str], first: int) -> dict[str, int]:
    return {name: first + number for number, name in enumerate(names)}


END = "<|endoftext|>"
RESERVED = "<|reserved_special_token_{}|>"
LLAMA3_SPECIALS = (
    *("<|begin_of_text|>", "<|end_of_text|>", *(RESERVED.format(number) for number in range(4))),
    *("<|start_header_id|>", "<|end_header_id|>", RESERVED.format(4), "<|eot_id|>"),
    *(RESERVED.format(number) for number in range(5, 251)),
)
FIM = "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"
PUBLISHED = {  # published vocabularies by number of ranks
    50_256: PublishedVocabulary(GPT2, {END: 50_256}, END, END),
    100_256: PublishedVocabulary(CL100K, numbered((END, *FIM), 100_257) | {"<|endofprompt|>": 100_276}, END, END),
    128_000: PublishedVocabulary(LLAMA3, numbered(LLAMA3_SPECIALS, 128_000), "<|begin_of_text|>", "<|end_of_text|>"),
    151_643: PublishedVocabulary(QWEN2, numbered((END, "<|im_start|>", "<|im_end|>"), 151_643), END, END),
    199_998: PublishedVocabulary(O200K, {END: 199_999, "<|endofprompt|>": 200_018}, END, END),
}


def read_ranks(path: Path) -> dict[bytes, int]:
    """{bytes of a token: rank} of a tiktoken file, whose lines have a token in base64 and its rank."""
    ranks: dict[bytes, int] = {}
    try:
        for line in path.read_bytes().splitlines():
            if line.strip():
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
    except ValueError as error:
        raise UserError(f"{path} is not a tiktoken file of ranks ({error}): copy or download it again") from None
    return ranks


def is_ranks(path: Path) -> bool:
    with path.open("rb") as file:
        first = file.readline(1000).split()
    return len(first) == 2 and first[1].isdigit()


def load_ranks(path: Path, pattern: str = "") -> tuple[tokenizers.Tokenizer, str | None, str | None, str | None]:
    """(tokenizer, beginning-of-text, end-of-text and padding token) of a tiktoken file; unknown ones are None.

    `pattern` is the regular expression that splits texts; if "", the published one of GPT-2, GPT-4, GPT-4o, Llama 3 or
    Qwen is used, chosen by the number of tokens."""
    ranks = read_ranks(path)
    known = PUBLISHED.get(len(ranks))
    if not pattern and known is None:
        raise UserError(
            f"Cannot read {path}, because Onward knows no vocabulary of {len(ranks):,} ranks, nor its pattern: "
            "use the model's tokenizer.json instead"
        )
    inner = ranked_bpe(ranks, pattern or known.pattern, path)  # type: ignore[union-attr]
    if known is None:
        return inner, None, None, None
    add_specials(inner, known.specials)
    return inner, known.bos, known.eos, None


def ranked_bpe(ranks: Mapping[bytes, int], pattern: str, path: Path, first: int = 0) -> tokenizers.Tokenizer:
    """A BPE tokenizer that merges the pair with the lowest rank first; the id of a token is its rank plus `first`."""
    if not all(bytes([byte]) in ranks for byte in range(256)) or sorted(ranks.values()) != list(range(len(ranks))):
        raise UserError(f"{path} does not have every byte and every rank: copy or download it again")
    order = sorted(ranks, key=ranks.__getitem__)
    text = {token: "".join(map(SYMBOLS.__getitem__, token)) for token in order}
    merges = [
        (text[token[:cut]], text[token[cut:]])
        for token in order
        for cut in range(1, len(token))
        if ranks.get(token[:cut], len(ranks)) < ranks[token] > ranks.get(token[cut:], len(ranks))
    ]
    vocab = {text[token]: first + rank for token, rank in ranks.items()}
    return byte_level_bpe(models.BPE(vocab, merges, ignore_merges=True), [pattern])


def add_specials(inner: tokenizers.Tokenizer, specials: Mapping[str, int]) -> None:
    """Add control tokens {text: id}; unused ids before and between them get placeholder tokens."""
    size = inner.get_vocab_size()
    names = {i: name for name, i in specials.items()}
    wanted = [names.get(i, f"<|unused_{i}|>") for i in range(size, max(names) + 1)]
    inner.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in wanted])


def load_tekken(path: Path) -> tuple[tokenizers.Tokenizer, str | None, str | None, str | None]:
    """(tokenizer, beginning-of-text, end-of-text and padding token) of Mistral's tekken.json, in which control tokens
    have the first ids."""
    try:
        table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        config = table["config"]
        count, size = int(config["default_num_special_tokens"]), int(config["default_vocab_size"])
        listed = {one["rank"]: one["token_str"] for one in table.get("special_tokens") or ()}
        ranks = {base64.b64decode(one["token_bytes"]): int(one["rank"]) for one in table["vocab"][: size - count]}
        pattern = str(config["pattern"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise UserError(f"{path} is not a tekken.json ({what}): copy or download it again") from None
    listed = listed or dict(enumerate(TEKKEN_SPECIALS))
    if not 0 <= count <= size:
        raise UserError(f"{path} has {count} control tokens in a vocabulary of {size}: copy or download it again")
    if not all(isinstance(name, str) for name in listed.values()):
        raise UserError(f"{path} has a control token that is not a text: copy or download it again")
    inner = ranked_bpe(ranks, pattern, path, count)
    specials = [listed.get(i, f"<SPECIAL_{i}>") for i in range(count)]
    state = json.loads(inner.to_str())  # the library gives new tokens ids after all others
    state["model"]["vocab"] |= {name: i for i, name in enumerate(specials)}
    inner = tokenizers.Tokenizer.from_str(json.dumps(state))
    inner.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in specials])
    bos, eos, pad = (name if name in specials else None for name in ("<s>", "</s>", "<pad>"))
    return inner, bos, eos, pad
