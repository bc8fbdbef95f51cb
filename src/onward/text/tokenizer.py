"""Converts text to token ids and back, with the `tokenizers` library. Does not import torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import tokenizers
from tokenizers import decoders, pre_tokenizers

from onward.base.arguments import Range, checked, explained, shown, unchecked
from onward.base.errors import UserError
from onward.base.files import atomic_write, write_json
from onward.text.added_tokens import add_published
from onward.text.boundaries import continuing
from onward.text.formats import OTHER_NAMES, OTHER_SUFFIXES, add_ends, read_other
from onward.text.media import media_tokens
from onward.text.merges import END
from onward.text.patterns import BYTE_OF

UNKNOWN = "\ufffd"
SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which UTF-8 cannot encode
BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # a byte token of SentencePiece's byte fallback
CUT = re.compile(r"(?<=\S)\n(?=\S)")
ACROSS = re.compile(r"[\nĊ][^\sĊĉčĠ]")  # a token with text right after a line break, in characters or in byte symbols
CONTROL_FILES = "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json"
TokenId = Annotated[int, Range(0, 2**32 - 1)]
PIECE = 1 << 16  # characters encoded at a time; the library is slow on very long strings and parallel over many


class Tokenizer:
    """A tokenizer of the library `tokenizers` (`inner`) with its control tokens: `bos` begins a text, `eos` ends it,
    `pad` pads; None if there is none.

    Control tokens written in a text are encoded as plain text. `ends` are the ids of all tokens that end an answer, of
    which `eos` is the usual one; `templates` are chat templates by name, see `text.chat`.
    """

    @checked
    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        bos: str | None = END,
        eos: str | None = END,
        *,
        pad: str | None = None,
        ends: Iterable[int] = (),
        templates: Mapping[str, str] | None = None,
    ) -> None:
        self.inner = inner
        self.inner.encode_special_tokens = True  # control tokens written in a user's text stay plain text
        self.inner.no_truncation()
        self.inner.no_padding()
        self.bos, self.eos, self.pad = bos, eos, pad
        self.bos_id: int | None = inner.token_to_id(bos) if bos else None
        self.eos_id: int | None = inner.token_to_id(eos) if eos else None
        self.prefix_id = self.eos_id if self.bos_id is None else self.bos_id  # token before a text that has no context
        self.end_ids = list(dict.fromkeys([*([] if self.eos_id is None else [self.eos_id]), *ends]))
        self.templates = dict(templates or {})
        unknown = getattr(inner.model, "unk_token", None)
        self.unknown_id: int | None = inner.token_to_id(unknown) if unknown else None
        self.vocab_size = max(inner.get_vocab().values(), default=-1) + 1
        self.special = {i for i, token in inner.get_added_tokens_decoder().items() if token.special}
        self.cuttable = cuttable(inner)
        self.of_bytes = isinstance(inner.decoder, decoders.ByteLevel)
        self.media = dict[int, str]()  # tokens for images, video and sound, by id: see `text.media`

    @classmethod
    @checked
    def load(cls, path: str | Path) -> Tokenizer:
        """Load the tokenizer in a folder or a file: tokenizer.json, vocab.json with merges.txt, Mistral's
        tekken.json, SentencePiece's tokenizer.model, or a .tiktoken file of ranks. Raises a UserError if there is none,
        or the file is damaged."""
        path = Path(path)
        file = (tokenizer_file(path) or path / "tokenizer.json") if path.is_dir() else path
        if not file.exists():
            raise UserError(f"there is no tokenizer in {path}: name a tokenizer file or a folder with one")
        tables = published(file.parent)
        inner, names = read_inner(file, tables)
        add_published(inner, tables, names, file.name)
        end = END if inner.token_to_id(END) is not None else None
        bos = special_name(tables, "bos_token", inner) or names.get("bos_token") or end
        eos = special_name(tables, "eos_token", inner) or names.get("eos_token") or end
        if file.name != "tokenizer.json" and inner.post_processor is None:
            add_ends(inner, tables.get("tokenizer_config.json", {}), bos, eos)
        ends = [i for table in tables.values() for i in known_ids(table.get("eos_token_id"), inner)]
        pad = special_name(tables, "pad_token", inner) or names.get("pad_token")
        tokenizer = cls(inner, bos, eos, pad=pad, ends=ends, templates=chat_templates(file.parent, tables))
        if names_no_bos(tables):
            tokenizer.prefix_id = tokenizer.eos_id
        tokenizer.media = media_tokens(tables, inner)
        return tokenizer

    @checked
    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json to a folder, and the tokenizer_config.json from which transformers loads it."""
        folder = Path(folder)
        with atomic_write(folder / "tokenizer.json") as new:
            self.inner.save(str(new))
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        first = self.inner.pre_tokenizer
        if first is not None and b'"add_prefix_space":true' in first.__getstate__():
            config["add_prefix_space"] = True  # some classes of transformers do not take it from tokenizer.json
        if self.templates:
            named = [{"name": name, "template": template} for name, template in self.templates.items()]
            config["chat_template"] = named if self.templates.keys() - {"default"} else self.templates["default"]
        write_json(folder / "tokenizer_config.json", config | self.names)

    @property
    def names(self) -> dict[str, str]:
        """The texts of the control tokens by their names in transformers, such as {"bos_token": "<s>"}; tokens that the
        vocabulary lacks are left out, since a reader would add them."""
        unknown = None if self.unknown_id is None else self.inner.id_to_token(self.unknown_id)
        names = {"bos_token": self.bos, "eos_token": self.eos, "unk_token": unknown, "pad_token": self.pad}
        return {name: token for name, token in names.items() if token and self.inner.token_to_id(token) is not None}

    @explained
    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a text. With `special`, the control tokens that this tokenizer adds before and after
        a text are included."""
        if special and not self.cuttable:  # `cuttable` is False if the tokenizer adds control tokens
            return self.encoded(self.inner.encode_batch, [utf8(text)])[0].ids  # encode_batch lets other threads run
        return unchecked(Tokenizer.encode_batch)(self, [text])[0]

    @explained
    def continuation(self, before: str, text: str) -> list[int]:
        """Return the token ids of a text that continues the text `before`: appended to the tokens of `before`, they
        decode to `before + text`, with no space added in between."""
        first, whole = self.encode_batch([before, before + text])
        return whole[len(first) :] if whole[: len(first)] == first else self.encode_inside(text)

    @checked
    def encode_inside(self, text: str) -> list[int]:
        """Return the token ids of a text from within a longer text, such as one after a line break: no space is added
        before it, although some tokenizers add one before the first word of a text."""
        return self.encoded(self.continuing.encode, utf8(text), add_special_tokens=False).ids

    @cached_property
    def continuing(self) -> tokenizers.Tokenizer:
        return continuing(self.inner)

    @checked
    def begin(self, tokens: list[int]) -> list[int]:
        """Return the tokens of a document with the beginning-of-text token in front, if the tokenizer has one and the
        document does not begin with it."""
        if self.bos_id is None or tokens[:1] == [self.bos_id]:
            return tokens
        return [self.bos_id, *tokens]

    @checked
    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """Encode each text to token ids, on all cores, without adding control tokens; return one list per text."""
        cut = [self.pieces(utf8(text)) for text in texts]
        pieces_of_all = [piece for pieces in cut for piece in pieces]
        encodings = iter(self.encoded(self.inner.encode_batch_fast, pieces_of_all, add_special_tokens=False))
        return [[i for _ in pieces for i in next(encodings).ids] for pieces in cut]

    def encoded(self, encode: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return encode(*args, **kwargs)
        except Exception as error:  # the library raises no narrower class
            unknown = getattr(self.inner.model, "unk_token", None)
            if unknown and self.unknown_id is None:
                raise UserError(f"the vocabulary lacks the unknown token {unknown!r}: repair tokenizer.json") from None
            raise UserError(f"the tokenizer cannot encode this text: {' '.join(str(error).split())}") from None

    def pieces(self, text: str, size: int = PIECE) -> list[str]:
        """Cut a long text into pieces of at least `size` characters (the last may be shorter) that, encoded separately,
        give the same tokens as the whole text: each cut is after a line break between two characters that are not white
        space. A text without such a place, or of a tokenizer that is not `cuttable`, is one piece."""
        if len(text) <= size or not self.cuttable:
            return [text]
        result, start = [], 0
        while match := CUT.search(text, start + size):
            result.append(text[start : match.end()])
            start = match.end()
        return [*result, text[start:]]

    @explained
    def decode(self, ids: Sequence[TokenId]) -> str:
        """Decode token ids to text, in which control tokens are left out."""
        return self.inner.decode([i for i in ids if i not in self.special], skip_special_tokens=False)

    @checked
    def byte_count(self, ids: Sequence[int]) -> int:
        """Return the number of bytes in UTF-8 of the text that these token ids decode to."""
        if self.of_bytes:
            lengths = {i: len(self.token_bytes(i)) for i in set(ids)}
            return sum(lengths[i] for i in ids)
        return len(self.decode(ids).encode())

    @explained
    def token_bytes(self, token_id: TokenId) -> bytes:
        """Return the bytes that a token contributes to a text, which may be part of a character; empty for a control
        token."""
        token = "" if token_id in self.special else self.inner.id_to_token(token_id) or ""
        if self.of_bytes and all(c in BYTE_OF for c in token):
            return bytes(BYTE_OF[c] for c in token)
        text = token if self.of_bytes or not token else self.piece(token_id)  # if of_bytes, this is an added token
        return bytes([int(token[3:5], 16)]) if BYTE.fullmatch(token) and text != token else text.encode()

    @explained
    def piece(self, token_id: TokenId) -> str:
        """Return one token as readable text, for tables: a control token by its name, part of a character as U+FFFD."""
        token = self.inner.id_to_token(token_id)
        if token is None or token_id in self.special:
            return token or f"<{token_id}>"
        # a decoder may strip the beginning of a text: decode after another token, and remove that token's text
        anchor = next(k for k in range(self.vocab_size) if k not in self.special and self.inner.id_to_token(k))
        return self.decode([anchor, token_id]).removeprefix(self.decode([anchor]))

    @checked
    def textless(self, size: int) -> list[int]:
        """Return the ids below `size`, the number of a model's logits, that have no token: padding and unused ids,
        which must not be generated."""
        return [i for i in range(size) if self.inner.id_to_token(i) is None]


def cuttable(inner: tokenizers.Tokenizer) -> bool:
    """Whether a text always encodes like its pieces when cut after line breaks between two visible characters."""
    first = inner.pre_tokenizer
    return (
        isinstance(first, pre_tokenizers.ByteLevel | pre_tokenizers.Split)
        and not getattr(first, "add_prefix_space", False)
        and inner.normalizer is None
        and inner.post_processor is None
        and not any(map(ACROSS.search, inner.get_vocab()))
    )


def utf8(text: str) -> str:
    """The text with U+FFFD for surrogates, which the library `tokenizers` does not accept."""
    if not isinstance(text, str):
        raise UserError(f"text is {shown(text)}: give a string")
    return SURROGATE.sub(UNKNOWN, text)


def tokenizer_file(folder: Path) -> Path | None:
    named = [folder / name for name in ("tokenizer.json", "vocab.json", "tekken.json", "tokenizer.model")]
    return next((file for file in [*named, *sorted(folder.glob("*.tiktoken"))] if file.exists()), None)


def read_inner(file: Path, tables: Mapping[str, Mapping[str, Any]]) -> tuple[tokenizers.Tokenizer, Mapping[str, str]]:
    """(tokenizer, its control tokens by name, such as bos_token) of a file of any format, in a folder with the other
    files `tables`."""
    if file.name in OTHER_NAMES or file.suffix in OTHER_SUFFIXES:
        return read_other(file, tables)
    try:
        return tokenizers.Tokenizer.from_file(str(file)), {}
    except Exception as error:  # the library raises no narrower class
        if file.suffix == ".gguf":
            raise UserError(
                f"{file} is a model and not a tokenizer: write its tokenizer with onward convert {file} FOLDER, and "
                "name that folder"
            ) from None
        raise UserError(f"{file} is not a tokenizer ({error}): restore or train it again") from None


def published(folder: Path) -> dict[str, dict[str, Any]]:
    """Parsed JSON files of a model's folder that may name control tokens, the most important first; unreadable files
    are left out."""
    tables = {}
    for file in (*CONTROL_FILES, "added_tokens.json", "chat_template.json"):  # chat_template.json: multimodal models
        try:
            table = json.loads((folder / file).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        tables[file] = table if isinstance(table, dict) else {}
    return tables


def special_name(tables: Mapping[str, Mapping[str, Any]], key: str, inner: tokenizers.Tokenizer) -> str | None:
    """Text of the control token called `key`, such as `bos_token`, in the first table that names it or its id."""
    for table in (tables.get(file, {}) for file in CONTROL_FILES):
        value = table.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str) and inner.token_to_id(value) is not None:
            return value
        if named := known_ids(table.get(f"{key}_id"), inner):
            return inner.id_to_token(named[0])  # the first of several end tokens is the usual one
    return None


def names_no_bos(tables: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether tokenizer_config.json says that texts have no beginning-of-text token, although config.json may name one,
    as in Qwen's folders."""
    table = tables.get("tokenizer_config.json", {})
    generic = table.get("tokenizer_class") in ("PreTrainedTokenizerFast", "TokenizersBackend")
    return table.get("bos_token", "" if generic or "bos_token" in table else "a class has its default") in (None, "")


def known_ids(value: Any, inner: tokenizers.Tokenizer) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [i for i in values if type(i) is int and 0 <= i < 1 << 32 and inner.id_to_token(i) is not None]


def chat_templates(folder: Path, tables: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Chat templates of a folder by name; a single one is named `default`."""
    value: Any = next(filter(None, (table.get("chat_template") for table in tables.values())), [])
    if isinstance(value, list):
        pairs: list[Any] = [(t.get("name"), t.get("template")) if isinstance(t, dict) else (t, None) for t in value]
    else:
        pairs = [*value.items()] if isinstance(value, dict) else [("default", value)]
    if not all(isinstance(text, str) for pair in pairs for text in pair):
        raise UserError(f"{folder}: chat_template is {shown(value)}: give a text, or a list of names and templates")
    templates = dict(pairs)
    for file in folder / "chat_template.jinja", *folder.glob("additional_chat_templates/*.jinja"):
        if file.is_file():
            try:
                templates["default" if file.parent == folder else file.stem] = file.read_text(encoding="utf-8")
            except ValueError:
                raise UserError(f"{file} is not UTF-8 text: save it as UTF-8") from None
    return templates
