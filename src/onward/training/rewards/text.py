"""Rewards that read the text of a completion."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.base.errors import UserError
from onward.config.ranges import SizeOrZero
from onward.text.numbers import same_number
from onward.text.regular import compiled, matches
from onward.training.rewards.reward import Completion, Reward, Scorer

if TYPE_CHECKING:
    from onward.text.tokenizer import Tokenizer

TAG = re.compile(r"<[^<>\s]+>")
ANSWER = frozenset({"answer"})


@dataclass(frozen=True)
class Exact(Reward, kind="exact"):
    """1 if the completion equals the record's answer, up to surrounding spaces; else 0."""

    @property
    def needs(self) -> frozenset[str]:
        return ANSWER

    def score(self, completion: Completion) -> float:
        return float(completion.text.strip() == completion.answer.strip())


@dataclass(frozen=True)
class Number(Reward, kind="number"):
    """1 if the last number in the completion equals the last number in the record's answer; else 0."""

    @property
    def needs(self) -> frozenset[str]:
        return ANSWER

    def score(self, completion: Completion) -> float:
        return float(same_number(completion.text, completion.answer))


@dataclass(frozen=True)
class Contains(Reward, kind="contains"):
    """1 if the completion contains a text; else 0."""

    text: str = ""  # text to compare with; default: the record's answer

    @property
    def needs(self) -> frozenset[str]:
        return frozenset() if self.text else ANSWER

    def score(self, completion: Completion) -> float:
        return float((self.text or completion.answer.strip()) in completion.text)


@dataclass(frozen=True)
class Regex(Reward, kind="regex"):
    """1 if a regular expression matches the whole completion, up to surrounding spaces; else 0. Also 0 if matching
    takes longer than a second."""

    pattern: str  # regular expression in Python's syntax; a dot also matches line breaks

    def __post_init__(self) -> None:
        super().__post_init__()
        compiled(self.pattern, "reward.regex.pattern")

    def score(self, completion: Completion) -> float:
        return float(matches(self.pattern, completion.text.strip()))


@dataclass(frozen=True)
class Length(Reward, kind="length"):
    """max(0, 1 - |n - N| / N) for a completion of n characters or tokens, where N is the desired number: 1 at n = N,
    falling to 0 at n = 0 and n = 2 N."""

    characters: SizeOrZero = 0  # target number of characters; 0: count tokens instead
    tokens: SizeOrZero = 0  # target number of tokens, including the end token; 0: count characters instead

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.characters) == bool(self.tokens):
            raise UserError("reward.length takes either characters or tokens: write length(characters=100)")

    def score(self, completion: Completion) -> float:
        length = len(completion.text) if self.characters else len(completion.tokens)
        wanted = self.characters or self.tokens
        return max(0.0, 1 - abs(length - wanted) / wanted)


@dataclass(frozen=True)
class Format(Reward, kind="format"):
    """1 if the whole completion, up to surrounding spaces, follows a template; else 0.

    Each {} of the template matches one or more characters; spaces match any number of spaces and line breaks. Each tag
    of the template, such as <answer>, must occur in the completion as often as in the template.
    """

    template: str  # format of the completion, such as "<think>{}</think> <answer>{}</answer>"

    def __post_init__(self) -> None:
        super().__post_init__()
        if "{}" not in self.template:
            raise UserError(f"reward.format.template is {self.template!r:.99}: write {{}} in the place of the text")

    @cached_property
    def pieces(self) -> list[re.Pattern[str]]:
        """Regular expressions for the parts of the template that its {} separate, in order; the last one matches only
        at the end of a completion."""
        parts = [r"\s*".join(map(re.escape, re.split(r"\s+", piece))) for piece in self.template.strip().split("{}")]
        return [re.compile(part) for part in parts[:-1]] + [re.compile(parts[-1] + r"\Z")]

    def score(self, completion: Completion) -> float:
        text = completion.text.strip()
        tags, wanted = Counter(TAG.findall(text)), Counter(TAG.findall(self.template))
        return float(all(tags[tag] == count for tag, count in wanted.items()) and self.matches(text))

    def matches(self, text: str) -> bool:
        """Return whether the `pieces` occur in `text` in order, the first one at its start, with at least one character
        between two pieces. Each piece is matched at its leftmost occurrence, which leaves the most room for the next
        piece."""
        first, *others = self.pieces
        match = first.match(text)
        for piece in others:
            match = match and piece.search(text, match.end() + 1)
        return match is not None


@dataclass(frozen=True)
class JsonSchema(Reward, kind="json_schema"):
    """1 for JSON that conforms to a schema, 0.1 for other JSON, else 0."""

    file: str  # file that contains the JSON schema (draft 2020-12)

    def open(self, tokenizer: Tokenizer | None = None, device: str = "auto") -> Scorer:
        import jsonschema
        import jsonschema_specifications
        import referencing.exceptions

        from onward.base.files import read_json

        if not Path(self.file).is_file():
            raise UserError(f"there is no file {self.file}: give json_schema(file=...) a JSON schema")
        schema = read_json(Path(self.file))
        try:
            jsonschema.Draft202012Validator.check_schema(schema)
        except jsonschema.SchemaError as error:
            raise UserError(f"{self.file} is not a JSON schema ({error.message:.99}): correct it") from None

        def pattern(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
            if isinstance(value, str) and not matches(pattern, value, f"{self.file}: pattern", full=False):
                yield jsonschema.ValidationError("another text")

        bounded = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": pattern})
        validator = bounded(schema, registry=jsonschema_specifications.REGISTRY)  # does not download schemas

        def conforms(value: Any) -> bool:
            try:
                return bool(validator.is_valid(value))
            except RecursionError:  # deeply nested values
                return False
            except referencing.exceptions.Unresolvable as error:
                raise UserError(f"{self.file} is not a JSON schema ({error!s:.99}): correct it") from None

        conforms(None)  # resolves the schema's references, to find errors now
        return lambda completions: [json_score(conforms, completion.text) for completion in completions]


def json_score(conforms: Callable[[Any], bool], text: str) -> float:
    """Return 1 if `text` is JSON and `conforms` returns true for the parsed value, 0.1 for other JSON, 0 for text that
    is not JSON."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return 0.0
    return 1.0 if conforms(value) else 0.1
