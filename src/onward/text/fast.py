"""Fast encoding of many texts, by `tiktoken` if it is installed and gives the same ids, else by `tokenizers`.

Does not import torch. Encoders cannot be pickled: worker processes build theirs from the tokenizer's folder.
"""

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import Regex, models, pre_tokenizers

from onward.text.patterns import BYTE_OF, GPT2, LLAMA3, patterns_of
from onward.text.tokenizer import END, PIECE, Tokenizer

Encoder = Callable[[Sequence[str]], list[np.ndarray]]

PATTERNS = {  # the tested patterns, each with an equivalent that backtracks less and is faster in `tiktoken`
    GPT2: r"'(?:[stmd]|re|ve|ll)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s+(?!\S)|\s",
    LLAMA3: (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"
        r"\s*[\r\n]+|\s+(?!\S)|\s"
    ),
}
# letters, numbers and ideographs new in Unicode 14 to 17, and characters whose category changed or differs by library
NEW = (
    "\u0870\U0001dfe5\U00011f04\U00011f50\U00031350\U0002ebf0\u1c89\U00010d40\U00016ea0\U00011de0\U000323b0"
    "\u1734\u180e\u2028\ufeff\x85\x1c"
)
RUN = PIECE  # length of a run without a word boundary that `tiktoken` can encode
GROUP = 64 * PIECE  # characters encoded at a time, to bound memory
WORD = re.compile(r"[^\S\x1c-\x1f][\S\x1c-\x1f]")  # the beginning of a word; only Python takes \x1c-\x1f as space


def encoder(tokenizer: Tokenizer) -> Encoder:
    """The fastest function that encodes texts to arrays (T,) of uint32 ids, as `Tokenizer.encode_batch` does."""
    return named_encoder(tokenizer)[1]


def named_encoder(tokenizer: Tokenizer) -> tuple[str, Encoder]:
    fast = by_tiktoken(tokenizer)
    return ("tiktoken", fast) if fast else ("tokenizers", by_library(tokenizer))


def by_library(tokenizer: Tokenizer, group_size: int = GROUP) -> Encoder:
    """An encoder by `tokenizers`, on all cores unless TOKENIZERS_PARALLELISM is false."""

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        parts: list[list[np.ndarray]] = [[] for _ in texts]
        for group in text_groups(tokenizer, texts, group_size):
            for (n, _), ids in zip(group, tokenizer.encode_batch([piece for _, piece in group])):
                parts[n].append(np.array(ids, np.uint32))
        return list(map(np.concatenate, parts))

    return encode


def text_groups(tokenizer: Tokenizer, texts: Sequence[str], group_size: int) -> Iterator[list[tuple[int, str]]]:
    """Pieces of texts in groups of about `group_size` characters: (index of the text, piece)."""
    group: list[tuple[int, str]] = []
    size = 0
    for n, text in enumerate(texts):
        for piece in tokenizer.pieces(text):
            group.append((n, piece))
            size += len(piece)
            if size >= group_size:
                yield group
                group, size = [], 0
    yield group


def by_tiktoken(tokenizer: Tokenizer) -> Encoder | None:
    """An encoder by `tiktoken`, on one core; None if it is not installed or could give other ids.

    Texts with surrogates, and long pieces without a word boundary, for which `tiktoken` overflows its stack, are
    encoded by `tokenizers`."""
    try:
        import tiktoken
    except ImportError:
        return None
    table = json.loads(tokenizer.inner.to_str())
    pattern, ranked = PATTERNS.get(split_pattern(table)), ranked_tokens(table)
    if not pattern or not ranked or not same_characters():
        return None
    ids = np.fromiter(ranked.values(), np.uint32)
    ranks = {token: rank for rank, token in enumerate(ranked)}
    core = tiktoken.Encoding("", pat_str=pattern, mergeable_ranks=ranks, special_tokens={END: len(ranks)})
    slow = by_library(tokenizer)

    def encode_piece(piece: str) -> np.ndarray:
        if not unbroken(piece):
            try:
                return ids[core.encode_to_numpy(piece, disallowed_special=())]
            except UnicodeEncodeError:
                pass
        return slow([piece])[0]

    def encode(texts: Sequence[str]) -> list[np.ndarray]:
        return [np.concatenate([encode_piece(piece) for piece in tokenizer.pieces(text)]) for text in texts]

    texts = [text for group in samples().values() for text in group.values()]
    return encode if all(map(np.array_equal, encode(texts), slow(texts))) else None


def samples() -> dict[str, dict[str, str]]:
    return tomllib.loads(Path(__file__).with_name("samples.toml").read_text(encoding="utf-8"))


def split_pattern(table: dict[str, Any]) -> str:
    """The regular expression that splits texts; "" if there are further steps, which `tiktoken` lacks."""
    if table["normalizer"] or not all(token["special"] for token in table["added_tokens"]):
        return ""  # added tokens other than control tokens are matched in texts
    patterns = patterns_of(table["pre_tokenizer"])
    return patterns[0] if patterns and len(patterns) == 1 else ""


def ranked_tokens(table: dict[str, Any]) -> dict[bytes, int]:
    """Token ids by the bytes of the token, in the order of the merges; {} if `tiktoken` could encode a text
    differently.

    `tiktoken` merges any two neighbors that form a token, `tokenizers` only the pairs on its list. They give the same
    ids if each token is formed by one merge or by consecutive merges, from tokens formed before, and if its own bytes
    encode to that token. The two neighbors that form it are then always the last two of its own merges."""
    model = table["model"]
    options = "dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"
    if model["type"] != "BPE" or any(map(model.get, options)):
        return {}
    vocab, merges = model["vocab"], model["merges"]
    order = {symbol: n for n, symbol in enumerate(BYTE_OF)}
    for left, right in merges:
        known = left in order and right in order
        if not known or order.setdefault(left + right, len(order)) != len(order) - 1:
            return {}
    plain = tokenizers.Tokenizer(models.BPE(vocab, list(map(tuple, merges))))
    encodings = plain.encode_batch_fast(list(order))
    unmade = vocab.keys() - order.keys() - {token["content"] for token in table["added_tokens"]}
    if unmade or any(one.ids != [vocab.get(token)] for one, token in zip(encodings, order)):
        return {}
    return {bytes(map(BYTE_OF.__getitem__, token)): vocab[token] for token in order}


def same_characters(characters: str = NEW) -> bool:
    """Whether both libraries agree on which of these characters are letters, numbers and spaces."""
    import tiktoken

    every = {bytes([byte]): byte for byte in range(256)}
    for kind in r"\p{L}", r"\p{N}", r"\s":
        core = tiktoken.Encoding("", pat_str=kind, mergeable_ranks=every, special_tokens={})
        split = pre_tokenizers.Split(Regex(kind), "removed", invert=True)
        expected = "".join(part for part, _ in split.pre_tokenize_str(characters))
        if bytes(core.encode_ordinary(characters)).decode() != expected:
            return False
    return True


def unbroken(text: str) -> bool:
    """Whether a text may have RUN or more characters without a word boundary, which `tiktoken` cannot encode; True for
    some texts without such a run."""
    block = RUN // 2  # a run of RUN characters contains a whole block
    return any(not WORD.search(text, start, start + block) for start in range(0, len(text) - block, block))
