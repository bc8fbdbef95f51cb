"""Translates tokenizers from and to the keys of a GGUF file. Source: src/llama-vocab.cpp of llama.cpp."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from onward.base.errors import UserError
from onward.base.fields import nearest
from onward.checkpoint.gguf.ends import ANY_TOKEN, CONTROLS, end_ids, token_id
from onward.checkpoint.gguf.header import Header
from onward.checkpoint.gguf.splits import APPROXIMATED, PRE, RAW, name_of
from onward.text.patterns import GPT2, byte_level_bpe, patterns_of
from onward.text.pieces import (
    BYTE,
    BYTE_PIECE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Piece,
    add_tokens,
    bpe_of_pieces,
)
from onward.text.tokenizer import BYTE_OF, Tokenizer
from onward.text.tokenizer import UNKNOWN as UNKNOWN_CHARACTER
from onward.text.training import char_level

SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}  # steps of a normalizer
LINES = r"[^\n]+|[\n]+"
PREFIX = {"type": "Prepend", "prepend": SPACE}
NO_SPLITS = {"String": " "}, {"Regex": LINES}  # no effect: no spaces are left, and no merge crosses lines
MERGED = "sarvam-moe"  # tokenizer.ggml.pre for merges over the text itself
KEPT = {"<unk>", "<s>", "<|endoftext|>"}  # tokens of Phi 3 after which white space is kept
PHI3 = {*KEPT, "</s>"}
END_OF_TURN = "<end_of_turn>"  # of Gemma, whose files name it even if its configuration has other end tokens
OUT_OF_REACH = -10_000.0  # the score of tokens that are never formed by merges


def read_tokenizer(header: Header) -> Tokenizer | None:
    keys = {name.removeprefix("tokenizer.ggml."): value for name, value in header.keys.items()}
    kind, tokens = keys.get("model", "none"), keys.get("tokens")
    if kind == "none" or tokens is None:
        return None
    rows = header.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in header.tensors else len(tokens)
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens) or len(tokens) > rows:
        raise UserError(f"{header.path} has {len(tokens):,} tokens and {rows:,} rows of embeddings: get the file again")
    types = keys.get("token_type") or [NORMAL] * len(tokens)
    scores = keys.get("scores") or [0.0] * len(tokens)
    if len({len(tokens), len(types), len(scores), len(set(tokens))}) > 1:
        raise UserError(
            f"{header.path} has {len(set(tokens)):,} different tokens of {len(tokens):,}, {len(types):,} "
            f"types and {len(scores):,} scores, which must be equal numbers: get the file again"
        )
    ends = end_ids(keys, tokens)
    named_ends = {tokens[i] for i in ends} & CONTROLS
    typed = [(text, CONTROL if text in named_ends else type_) for text, type_ in zip(tokens, types)]
    if kind == "gemma4" or (kind == "gpt2" and keys.get("pre") in RAW):
        inner = raw_text(header, keys, typed)
        add_bos = keys.get("pre") != "sarvam-moe" or keys.get("add_bos_token", False)
    elif kind == "gpt2":
        inner = byte_level(header, keys, typed)
        add_bos = keys.get("add_bos_token", PRE[keys.get("pre") or "default"].bos)
    elif kind == "llama":
        squeeze = bool(keys.get("remove_extra_whitespaces", False))
        pieces = [Piece(text, score, type_) for (text, type_), score in zip(typed, scores)]
        inner = bpe_of_pieces(pieces, prefix=bool(keys.get("add_space_prefix", True)), squeeze=squeeze)
        add_bos = keys.get("add_bos_token", True)
    else:
        raise UserError(
            f"Cannot read the tokenizer of {header.path}, because its kind {kind!r:.40} is not gpt2, llama or gemma4"
        )
    ids = {name: token_id(keys, name, tokens) for name in ("bos", "eos", "padding")}
    named = {name: None if i is None else tokens[i] for name, i in ids.items()}
    around = [named["bos"] if add_bos else None, named["eos"] if keys.get("add_eos_token") else None]
    if any(around):
        shape = " ".join(filter(None, [around[0], "$A", around[1]]))
        inner.post_processor = processors.TemplateProcessing(
            shape, None, [(text, tokens.index(text)) for text in around if text]
        )
    template = header.keys.get("tokenizer.chat_template")
    more = {
        name.removeprefix("tokenizer.chat_template."): value
        for name, value in header.keys.items()
        if name.startswith("tokenizer.chat_template.") and isinstance(value, str)
    }
    templates = ({"default": template} if isinstance(template, str) else {}) | more
    return Tokenizer(
        inner,
        named["bos"],
        named["eos"],
        pad=named["padding"],
        ends=ends,
        templates=templates,
    )


def byte_level(header: Header, keys: Mapping[str, Any], typed: list[tuple[str, int]]) -> Any:
    """Return the byte-level tokenizer of a file; `typed` lists (token, type code) in the order of the ids."""
    pre = keys.get("pre") or "default"
    if pre not in PRE:
        raise UserError(
            f"Cannot read the tokenizer of {header.path}, because Onward does not know how {pre!r:.40} splits texts: "
            f"{nearest(str(pre), PRE)}"
        )
    if not keys.get("pre"):
        warnings.warn(
            f"{header.path} has no tokenizer.ggml.pre: texts are split as llama.cpp splits them by default, which may "
            "not be how the model was trained; get a newer file",
            TokenizerNotice,
            stacklevel=2,
        )
    merges = merges_of(header, keys, typed)
    if single := characters_of(typed):
        inner = char_level(single)
        add_tokens(inner, [(token, kind) for token, kind in typed if kind == CONTROL])
        return inner
    vocab = {token: i for i, (token, _) in enumerate(typed)}
    splits = PRE[pre]
    inner = byte_level_bpe(models.BPE(vocab, merges, ignore_merges=splits.lookup), splits.patterns)
    add_tokens(inner, typed)
    return inner


def raw_text(header: Header, keys: Mapping[str, Any], typed: list[tuple[str, int]]) -> Any:
    """The tokenizer of a file whose merges apply to the text itself, not to its bytes; spaces are written as U+2581,
    and lines are split from each other."""
    vocab = {token: i for i, (token, _) in enumerate(typed)}
    unknown = typed[i][0] if (i := token_id(keys, "unknown", list(vocab))) is not None else None
    merges = merges_of(header, keys, typed)
    inner = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    inner.normalizer = normalizers.Replace(" ", SPACE)
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(LINES), "isolated")
    inner.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    add_tokens(inner, typed)
    return inner


def merges_of(header: Header, keys: Mapping[str, Any], typed: list[tuple[str, int]]) -> list[tuple[str, str]]:
    """The merges of a file whose two parts and result are all in the vocabulary."""
    merges, vocab = keys.get("merges"), {token for token, _ in typed}
    if not isinstance(merges, list):
        raise UserError(f"{header.path} has no tokenizer.ggml.merges: get the file again")
    cuts = ((merge, merge.find(" ", 1)) for merge in map(str, merges))  # a token may begin with a space
    pairs = ((merge[:cut], merge[cut + 1 :]) for merge, cut in cuts)
    return [(left, right) for left, right in pairs if {left, right, left + right} <= vocab]


def characters_of(typed: Sequence[tuple[str, int]]) -> dict[str, int]:
    """{character: id} if the vocabulary consists of single characters, among them U+FFFD, and control tokens, else
    {}."""
    ids = {}
    for i, (token, kind) in enumerate(typed):
        if kind in (NORMAL, UNKNOWN):
            raw = bytes(BYTE_OF.get(symbol, 0xFF) for symbol in token)
            text = raw.decode("utf-8", "replace")
            if len(text) != 1 or text.encode() != raw:
                return {}
            ids[text] = i
    return ids if UNKNOWN_CHARACTER in ids else {}


# ---------------------------------------------------------------- from a tokenizer to keys


class TokenizerNotice(UserWarning):
    """Warning that texts may be split, or answers ended, differently than in llama.cpp or in training."""


def tokenizer_keys(tokenizer: Tokenizer, rows: int) -> dict[str, Any]:
    """Metadata keys for a tokenizer and a model with `rows` rows of embeddings."""
    table = json.loads(tokenizer.inner.to_str())
    if tokenizer.vocab_size > rows:
        raise UserError(
            f"Cannot write the tokenizer, because it has {tokenizer.vocab_size:,} ids and the model only {rows:,} rows "
            "of embeddings"
        )
    model, added = table["model"], {token["id"]: token for token in table["added_tokens"]}
    if model["type"] == "WordLevel":
        kind, spelled = "gpt2", characters(table)
    elif model["type"] == "BPE" and patterns_of(table["pre_tokenizer"]) is not None:
        kind, spelled = "gpt2", byte_level_keys(tokenizer, table)
    elif model["type"] == "BPE" and model.get("byte_fallback"):
        spelled = piece_keys(table)
        kind = "llama" if "scores" in spelled.keys else "gpt2"
    else:
        raise UserError(f"llama.cpp has no tokenizer of this kind ({model['type']}): write the model without one")
    tokens, types = list[str](), list[int]()
    for i in range(rows):
        text = tokenizer.inner.id_to_token(i)
        own = added[i]["content"].replace(SPACE, " ") if i in added else spelled.own(text or "")
        tokens.append(f"[PAD{i}]" if text is None else own)
        types.append(UNUSED if text is None else spelled.type(i, text, added))
    if len(set(tokens)) < rows:
        raise UserError("two tokens of the vocabulary have the same text, which llama.cpp does not allow")
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id, "unknown": tokenizer.unknown_id}
    ids |= {"padding": tokenizer.inner.token_to_id(tokenizer.pad) if tokenizer.pad else None}
    ids |= {"eot": tokenizer.inner.token_to_id(END_OF_TURN)}
    other_ends = sorted((i for i in tokenizer.end_ids if i != tokenizer.eos_id), key=lambda i: "eom" in tokens[i])
    ids |= dict(zip(("eot", "eom"), other_ends))
    around = tokenizer.encode("a")
    plain = tokenizer.encode("a", special=False)
    front = around[: len(around) - len(plain)] if around[-len(plain) :] == plain else None
    if front not in ([], [tokenizer.bos_id]):
        raise UserError(
            "Cannot write the tokenizer, because it adds control tokens other than a beginning-of-text token"
        )
    values = {"model": kind, **spelled.keys, "tokens": tokens, "token_type": types}
    if "scores" in values:
        values["scores"] = [values["scores"].get(i, OUT_OF_REACH) for i in range(rows)]
    values |= {f"{name}_token_id": i for name, i in ids.items() if i is not None}
    values |= {"add_bos_token": bool(front), "add_eos_token": False}
    compare_ends(values, tokens, tokenizer)
    keys = {f"tokenizer.ggml.{name}": value for name, value in values.items()}
    for name, template in tokenizer.templates.items():
        keys[f"tokenizer.chat_template{'' if name == 'default' else '.' + name}"] = template
    return keys


def compare_ends(keys: Mapping[str, Any], tokens: Sequence[str], tokenizer: Tokenizer) -> None:
    """Warn of tokens that end answers only in llama.cpp, which recognizes some by name, or only in Onward, since a file
    has keys for only three end tokens."""
    theirs, ours = end_ids(keys, tokens), tokenizer.end_ids
    if keys["model"] == "gpt2" and tokenizer.eos_id is None and len(tokens) > ANY_TOKEN:
        theirs.append(ANY_TOKEN)
    for those, others, where in (theirs, ours, "in llama.cpp but not in Onward"), (ours, theirs, "not in llama.cpp"):
        if names := ", ".join(repr(tokens[i]) for i in those if i not in others):
            warnings.warn(f"Tokens that end answers {where}: {names}", TokenizerNotice, stacklevel=2)


def general_name(name: str, tokenizer: Tokenizer) -> str:
    """Return `name`, changed if necessary: based on the name, llama.cpp decides whether control tokens absorb the white
    space after them, as in Phi 3. Warns if no name gives the tokenizer's behavior."""
    added = tokenizer.inner.get_added_tokens_decoder().values()
    strips = {token.content: (token.lstrip, token.rstrip) for token in added}
    if strips.keys() >= PHI3 and strips == {text: (False, text not in KEPT) for text in strips}:
        return name if re.search("phi-?3", name, re.IGNORECASE) else f"{name} phi-3"
    if any(map(any, strips.values())):
        notice = "llama.cpp keeps white space around control tokens, but some control tokens here absorb it"
        warnings.warn(notice, TokenizerNotice, stacklevel=2)
    return re.sub("(phi(?=-?3)|modern(?=-bert))-?", r"\1 ", name, flags=re.IGNORECASE)


@dataclass(frozen=True)
class SpelledVocabulary:
    """The keys for a vocabulary, and how the file spells a token's text."""

    keys: dict[str, Any]
    own: Callable[[str], str] = lambda text: text
    unknown: str | None = None
    bytes: bool = False  # tokens such as <0x0A> are bytes

    def type(self, i: int, text: str, added: Mapping[int, Any]) -> int:
        if text == self.unknown:
            return UNKNOWN
        if i in added:
            return CONTROL if added[i]["special"] else USER_DEFINED
        return BYTE if self.bytes and BYTE_PIECE.fullmatch(text) else NORMAL


def byte_level_keys(tokenizer: Tokenizer, table: Mapping[str, Any]) -> SpelledVocabulary:
    """The name of the split patterns, and the merges."""
    model, patterns = table["model"], patterns_of(table["pre_tokenizer"])
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    if patterns == () and not merges:
        patterns = (GPT2,)  # bytes that are never merged may be split anywhere
    match table["normalizer"]:
        case None:
            pass
        case {"type": "NFC"}:
            warnings.warn(
                "llama.cpp does not normalize texts (NFC): texts with combining marks may have other tokens",
                TokenizerNotice,
                stacklevel=2,
            )
        case other:
            raise UserError(f"the tokenizer normalizes texts ({other['type']}), which llama.cpp does not")
    name = name_of(patterns or (), bool(model.get("ignore_merges")))
    if name is None:
        shown = " then ".join(patterns or ("nothing",))
        raise UserError(
            f"llama.cpp has no name for the pattern by which the tokenizer splits texts, {shown:.200}: "
            "train one with bpe:N"
        )
    if name in APPROXIMATED:
        warnings.warn(
            "llama.cpp splits texts differently at combining marks, such as U+FE0F, and at capitals other than A to Z: "
            "these texts may have other tokens",
            TokenizerNotice,
            stacklevel=2,
        )
    return SpelledVocabulary({"pre": name, "merges": merges or [NO_MERGE]})


NO_MERGE = "\u00ff \u00fe"  # bytes that do not occur in UTF-8; the key must not be empty


def characters(table: Mapping[str, Any]) -> SpelledVocabulary:
    """A character tokenizer written as byte-level BPE: merges make one token of the bytes of each character. llama.cpp
    drops a character outside the vocabulary, which is an unknown token in Onward."""
    if table["pre_tokenizer"] != {
        "type": "Split",
        "pattern": {"Regex": r"[\s\S]"},
        "behavior": "Isolated",
        "invert": False,
    }:
        raise UserError("llama.cpp has no tokenizer of this kind (WordLevel): write the model without one")
    symbols = {byte: symbol for symbol, byte in BYTE_OF.items()}
    spell = lambda text: "".join(symbols[byte] for byte in text.encode())
    merges: dict[str, None] = {}
    for text in table["model"]["vocab"]:
        spelled = spell(text)
        if len(text) == 1:
            merges |= dict.fromkeys(f"{spelled[:i]} {spelled[i]}" for i in range(1, len(spelled)))
    return SpelledVocabulary({"pre": "gpt-2", "merges": list(merges) or [NO_MERGE]}, spell, table["model"]["unk_token"])


def piece_keys(table: Mapping[str, Any]) -> SpelledVocabulary:
    """A SentencePiece tokenizer, written with scores that follow the order of the merges or, if scores cannot express
    this order, with the merges."""
    model, normalizer, first = table["model"], table["normalizer"] or {}, table["pre_tokenizer"] or {}
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    scheme = first.get("prepend_scheme", "") if first.get("split") is False else ""
    prefix = False
    if steps == [PREFIX, SPACES] and not first:
        prefix = True
    elif not steps and first.get("type") == "Metaspace" and scheme:
        prefix = scheme != "never"
        if prefix:
            notice = "llama.cpp puts a space before a text that begins with one, and this tokenizer does not"
            warnings.warn(notice, TokenizerNotice, stacklevel=2)
    elif steps != [SPACES] or first.get("pattern") not in (None, *NO_SPLITS):
        raise UserError("llama.cpp cannot prepare texts as this tokenizer does: write the model without one")
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    order: dict[str, int] = {}
    for merge in merges:
        order.setdefault(merge.replace(" ", "", 1), len(order) + 1)
    vocab, own = model["vocab"], {token["content"] for token in table["added_tokens"]}
    unmerged = (text for text in vocab.keys() - order.keys() - own if not BYTE_PIECE.fullmatch(text))
    apart = next(
        (text for text in unmerged if any(text[:i] in vocab and text[i:] in vocab for i in range(1, len(text)))), None
    )
    if apart is None and first.get("pattern") != {"Regex": LINES}:
        scores = {i: -float(order.get(text, 0)) for text, i in vocab.items()}
        values = {"pre": "default", "scores": scores, "add_space_prefix": prefix}
        return SpelledVocabulary(values, unknown=model["unk_token"], bytes=True)
    if prefix:
        raise UserError(f"the tokenizer never merges {apart!r}, but llama.cpp would: write the model without it")
    return SpelledVocabulary({"pre": MERGED, "merges": merges or [NO_MERGE]}, unknown=model["unk_token"], bytes=True)
