"""Conversion of patterns in JSON schemas, regular expressions in ECMAScript's notation, to expressions of a grammar.
Does not import torch."""

from __future__ import annotations

import re

PIECE = re.compile(
    r"""(?P<escape>\\(?:u\{[0-9A-Fa-f]+\}|u[0-9A-Fa-f]{4}|[pP]\{[^}]*\}|k<[^>]*>|[1-9][0-9]*|.))
    |(?P<set>\[\^?(?:\\.|\[:\w+:\]|[^\]\\])*\])
    |(?P<look>\(\?<?[=!])
    |(?P<open>\((?:\?(?:P?<\w+>|[\w-]*:))?)
    |(?P<brace>\{(?!\d+(?:,\d*)?\}))
    |(?P<quantifier>(?:[*+?]|\{\d+(?:,\d*)?\})\??)
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
LITERALS = re.compile(
    r"\\.|\[:\w+:\]|[\[&~]", re.DOTALL
)  # parts of a set: escapes, and characters with a special meaning in Rust
ANYTHING = r"[\s\S]"
EVERY = {"[^]": ANYTHING, "[]": r"[^\s\S]"}
CLASSES = {  # meanings in ECMAScript; in `onward.text.regular`, classes are Unicode, and . matches line breaks
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[A-Za-z0-9_]",
    r"\W": "[^A-Za-z0-9_]",
    ".": r"[^\n]",
    "$": r"\Z",
}


def expressible(pattern: str) -> tuple[list[str], bool]:
    """Return (expressions, exact) for a pattern: a text that matches the pattern matches all expressions and, if
    `exact`, the reverse holds too. No expression has look-around, word boundaries or back-references.

    Positive lookahead after an initial ^ becomes a separate expression if the pattern has no alternatives outside
    groups. Other look-around and word boundaries are left out, and a back-reference becomes any text.
    """
    pieces = [(str(match.lastgroup), match[0]) for match in PIECE.finditer(pattern)]
    expressions, exact = list[str](), True
    if pieces[:1] == [("other", "^")] and not alternatives(pieces):
        while len(pieces) > 1 and pieces[1][1] == "(?=":
            end = group_end(pieces, 1)
            if pieces[end : end + 1] and pieces[end][0] == "quantifier":
                break
            inner, same = plain(pieces[2 : end - 1])
            expressions, exact = [*expressions, f"^(?:{inner})"], exact and same
            del pieces[1:end]
    rest, same = plain(pieces)
    return [rest, *expressions], exact and same


def plain(pieces: list[tuple[str, str]]) -> tuple[str, bool]:
    """Return (expression, exact), without look-around and word boundaries, for the `pieces` of a pattern, pairs (kind,
    text)."""
    result, exact, index = list[str](), True, 0
    while index < len(pieces):
        kind, text = pieces[index]
        index += 1
        if kind == "look" or text in (r"\b", r"\B"):
            index = group_end(pieces, index - 1) if kind == "look" else index
            if index < len(pieces) and pieces[index][0] == "quantifier":
                index += 1
            exact = False
        elif kind == "escape" and (text[1:2] == "k" or (text[1:2].isdigit() and text != r"\0")):
            result.append(f"{ANYTHING}*")
            exact = False
            if index < len(pieces) and pieces[index][0] == "quantifier":
                index += 1
        else:
            result.append(translated(kind, text))
    return "".join(result), exact


def translated(kind: str, text: str) -> str:
    """Return one piece of a pattern in the notation of Rust's regex crate."""
    match kind:
        case "escape":
            return {r"\Z": r"\z", r"\/": "/"}.get(text, text)
        case "set" if text in EVERY:
            return EVERY[text]
        case "set":
            inner = LITERALS.sub(lambda m: m[0] if len(m[0]) > 1 else "\\" + m[0], text[1:])
            return "[" + inner
        case "brace":
            return r"\{"
        case _:
            return text


def alternatives(pieces: list[tuple[str, str]]) -> bool:
    """Return whether `pieces` of a pattern, pairs (kind, text), contain a `|` outside of groups."""
    depth = 0
    for kind, text in pieces:
        depth += (kind in ("open", "look")) - (text == ")")
        if text == "|" and depth == 0:
            return True
    return False


def group_end(pieces: list[tuple[str, str]], start: int) -> int:
    """Return the index after the group that begins at index `start` of a pattern's `pieces`, pairs (kind, text)."""
    depth = 0
    for index in range(start, len(pieces)):
        kind, text = pieces[index]
        depth += (kind in ("open", "look")) - (text == ")")
        if depth == 0:
            return index + 1
    return len(pieces)


def searchable(pattern: str) -> str:
    """Convert a pattern to the equivalent in the notation of `onward.text.regular`."""
    result = ""
    for match in PIECE.finditer(pattern):
        text = match[0]
        if match["set"] and text not in EVERY:
            result += re.sub(r"\\[dw]", lambda m: CLASSES[m[0]][1:-1], text)
        elif text[:2] == r"\k":
            result += f"(?P={text[3:-1]})"
        elif text[:3] == r"\u{":
            result += f"\\U{int(text[3:-1], 16):08x}"
        else:
            result += (EVERY | CLASSES).get(text, text)
    return result
