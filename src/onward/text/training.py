"""Training of tokenizers, by their specification. Does not import torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from onward.base.arguments import checked
from onward.base.errors import UserError
from onward.base.files import check_text
from onward.text.formats import byte_level
from onward.text.learning import learn_bpe
from onward.text.tokenizer import END, UNKNOWN, Tokenizer, utf8


def char_level(vocabulary: dict[str, int]) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    return inner


@checked
def train_tokenizer(spec: str, texts: Iterable[str]) -> Tokenizer:
    """Train or load a tokenizer by its specification `spec`: `char`, `byte`, `bpe:4096` or the path of a tokenizer.

    `char`: every character of the texts is a token; other characters are unknown and become U+FFFD. `byte`: the 256
    bytes. `bpe:N`: byte-level BPE with GPT-2's pattern and at most N ids, the control token included, learned from the
    texts. `texts` may be an iterator. Raises a UserError if an item of a list of texts is the path of a file.
    """
    for text in texts if isinstance(texts, Sequence) else ():
        check_text(text, "a text", "give Path({!r}).read_text()")
    kind, _, size = spec.partition(":")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if spec == "char":
        characters = {UNKNOWN}
        for text in texts:
            characters.update(utf8(text))
        inner = char_level({c: i for i, c in enumerate([UNKNOWN, *sorted(characters - {UNKNOWN})])})
        inner.add_special_tokens([END])
    elif spec == "byte":
        inner = byte_level(models.BPE({c: i for i, c in enumerate(alphabet)}, []), use_regex=False)
    elif kind == "bpe" and re.fullmatch("[0-9]{1,7}", size) and int(size) > len(alphabet):
        inner = byte_level(learn_bpe(map(utf8, texts), int(size), END), use_regex=True)
    elif kind == "bpe":
        raise UserError(f"tokenizer is {spec!r}: write bpe:N with N, the number of ids, above {len(alphabet)}")
    elif os.path.exists(spec):  # unlike Path.exists, never raises
        return Tokenizer.load(spec)
    else:
        raise UserError(f"tokenizer is {spec!r}: choose char, byte, bpe:4096 or a path to a tokenizer.json or folder")
    return Tokenizer(inner)
