"""Names of models on the Hugging Face hub, and of the files that a model needs. Does not import torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from onward.base.errors import UserError

ADDRESS = re.compile(r"(?:hf:/+|https?:/+(?:www\.)?(?:huggingface\.co|hf\.co)/)(.+)")  # `Path` drops a slash
NAME = re.compile(r"([\w-][\w.-]*(?:/[\w.-]+)?)(?:@([\w./-]+)|/tree/([\w./-]+))?/?")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER = (
    r"config\.json|tokenizer(_config)?\.json|special_tokens_map\.json|added_tokens\.json|vocab\.json|merges\.txt"
    r"|tokenizer\.model|tekken\.json|\w+\.tiktoken|chat_template\.\w+|additional_chat_templates/[\w.-]+\.jinja"
)
FILES = {  # no code, no second copy of the weights in another format
    "": re.compile(rf"{TOKENIZER}|generation_config\.json|model\.safetensors(\.index\.json)?"),
    "pickles": re.compile(rf"{TOKENIZER}|generation_config\.json|pytorch_model(-\d+-of-\d+)?\.bin"),
    "tokenizer": re.compile(TOKENIZER),
    "config": re.compile(r"config\.json"),
}
WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")  # the files that hold a model's weights
CARD = "README.md"
ADVICE = "name the folder of a model, such as runs/mybook, or a model on the Hugging Face hub, such as gpt2"


@dataclass(frozen=True)
class HubName:
    """A model on the Hugging Face hub, org/name, and a revision; the oldest models, such as gpt2, have no
    organization."""

    name: str
    revision: str  # a branch, a tag or a commit

    @classmethod
    def of(cls, text: str, revision: str = "") -> HubName | None:
        """Parse org/name, name or org/name@revision, with or without hf://, or the URL of a model's page. Returns None
        for any other text. `revision` (default: main) is used if the text names no revision. Raises a UserError if both
        are given and differ."""
        address = ADDRESS.fullmatch(text)
        match = NAME.fullmatch(address[1] if address else text)
        if not match or len(match[1]) > 96 or re.search(r"--|\.\.|\.git$|[.-]$|/[.-]", match[1]):
            return None
        named = match[2] or match[3] or ""
        if named and revision and named != revision:
            raise UserError(f"Cannot use the revision {revision!r}, because {text} names another: give one of them")
        return cls(match[1], named or revision or "main")

    def __str__(self) -> str:
        return self.name if self.revision == "main" else f"{self.name}@{self.revision}"


def size_of(count: int) -> str:
    """A number of bytes as readable text, such as 2.2 GB."""
    for unit, factor in ("GB", 1e9), ("MB", 1e6), ("kB", 1e3):
        if count >= factor:
            return f"{count / factor:.3g} {unit}" if count < 1000 * factor else f"{count / factor:,.0f} {unit}"
    return f"{count} bytes"
