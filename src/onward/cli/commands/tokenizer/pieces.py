"""`onward tokenizer show`: the tokens of a text under several tokenizers, in colors."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from onward.base.errors import UserError
from onward.cli.shared.output import Output, print_table
from onward.hub.folder import locate
from onward.text.tokenizer import Tokenizer

COLORS = "black on bright_cyan", "black on bright_yellow", "black on bright_green", "black on bright_magenta"
VISIBLE = str.maketrans({" ": "\u00b7", "\n": "\u23ce", "\t": "\u21e5", "\r": "\u240d"})


def show(names: Sequence[str]) -> dict[str, Any]:
    """Tokenize the text `names[-1]` with the tokenizer of each model in `names[:-1]`; return the text and each
    tokenizer's tokens (id, piece, bytes) as a JSON object. The text "-" is read from standard input. Raises a UserError
    for fewer than two names."""
    *models, text = names or ("",)
    if not models:
        raise UserError("onward tokenizer show takes models and a text: onward tokenizer show gpt2 runs/mybook 'Hello'")
    text = sys.stdin.read() if text == "-" else text
    return {"text": text, "tokenizers": [{"name": name, "tokens": pieces(opened(name, text), text)} for name in models]}


def opened(name: str, text: str) -> Tokenizer:
    """Load the tokenizer of a model: `name` is a folder, a tokenizer file, a GGUF file, or a name on the hub, of which
    only the tokenizer's files are downloaded. A new tokenizer (char, byte, bpe:N) is trained on `text`."""
    from onward.checkpoint.load import open_source
    from onward.text.training import train_tokenizer

    if name.partition(":")[0] in ("char", "byte", "bpe") and not Path(name).exists():
        return train_tokenizer(name, iter((text,)))
    return open_source(Path(name) if Path(name).exists() else locate(name, only="tokenizer")).required_tokenizer()


def pieces(tokenizer: Tokenizer, text: str) -> list[dict[str, Any]]:
    """Return the tokens of a text as table rows with the keys id, piece (the token's text) and bytes (in hexadecimal);
    part of a character is shown as U+FFFD."""
    return [
        {"id": i, "piece": tokenizer.piece(i), "bytes": tokenizer.token_bytes(i).hex(" ")}
        for i in tokenizer.encode(text)
    ]


def print_pieces(result: dict[str, Any], ids: bool) -> None:
    """Print the result of `show`: for each tokenizer, its numbers of tokens and of bytes per token, a line with the
    colored tokens and, with `ids`, a table of the tokens."""
    output = Output(file=sys.stdout, highlight=False)
    for one in result["tokenizers"]:
        tokens = one["tokens"]
        count = f"{len(tokens):,} tokens, {len(result['text'].encode()) / max(1, len(tokens)):.2f} bytes per token"
        output.print(f"{one['name']}: {count}", markup=False, soft_wrap=True)
        line = Text()
        for number, token in enumerate(tokens):
            line.append(token["piece"].translate(VISIBLE), COLORS[number % len(COLORS)])
            line.append("" if output.is_terminal else "|")
        output.print(line, soft_wrap=not output.is_terminal)
        if ids and tokens:
            print_table([{**token, "piece": token["piece"].translate(VISIBLE)} for token in tokens])
