"""An exercise that can be checked: a function that the reader writes, its answer and the usual mistakes."""

import ast
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from random import Random
from textwrap import fill, indent
from typing import Any

import torch

CASES = 20
COLUMNS = 92  # width of a chapter in characters
HEADER = "import math\n\nimport torch\nfrom torch import Tensor\n"  # all that an answer may use


@dataclass(frozen=True)
class Mistake:
    """A common mistake, as an edit of the answer, and the hint for the reader."""

    old: str  # a part of the answer's code
    new: str  # the mistaken code that replaces it
    what: str  # one sentence: the mistake, and the remedy after a colon


@dataclass(frozen=True)
class Exercise:
    """A function that readers of a chapter write. The docstring of `answer` is the task, with all shapes; its code uses
    nothing but HEADER. `draw` makes the arguments of one small random case, with a generator for choices and sizes;
    torch's own generator is seeded. The answer must not depend on rounding in any case that can be drawn."""

    chapter: int
    answer: Callable[..., Any]
    draw: Callable[[Random], tuple[Any, ...]]
    mistakes: Sequence[Mistake]

    @property
    def name(self) -> str:
        return self.answer.__name__

    @property
    def about(self) -> str:
        """The docstring of the exercise's file."""
        return inspect.getdoc(inspect.getmodule(self.answer)) or ""

    @cached_property
    def source(self) -> str:
        return inspect.getsource(self.answer)

    @cached_property
    def node(self) -> ast.FunctionDef:
        [node] = ast.parse(self.source).body
        assert isinstance(node, ast.FunctionDef)
        return node

    @property
    def signature(self) -> str:
        assert self.node.returns
        return f"{self.name}({ast.unparse(self.node.args)}) -> {ast.unparse(self.node.returns)}"

    @property
    def task(self) -> str:
        return inspect.getdoc(self.answer) or ""

    @property
    def shown(self) -> str:
        """The signature and the task, in lines that fit a chapter."""
        call = fill(self.signature, COLUMNS, subsequent_indent=" " * 8)
        return "\n".join([call, *(indent(fill(text, COLUMNS - 4), " " * 4) for text in self.task.split("\n\n"))])

    @property
    def head(self) -> str:
        """The answer's first lines, up to the end of the docstring."""
        return "".join(self.source.splitlines(keepends=True)[: self.node.body[0].end_lineno])

    @property
    def starter(self) -> str:
        """The function without its code."""
        return f"{self.head}    raise NotImplementedError\n"

    def cases(self) -> list[tuple[Any, ...]]:
        """Return the arguments of the random cases, the same at each call."""
        drawn = []
        with torch.random.fork_rng(devices=[]):
            for seed in range(CASES):
                torch.manual_seed(seed)
                drawn.append(self.draw(Random(seed)))
        return drawn

    def variants(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """Yield (explanation, function) for the answer with each mistake, then with each pair of independent ones."""
        for count in 1, 2:
            for chosen in combinations(self.mistakes, count):
                if (code := edited(self.source.removeprefix(self.head), chosen)) is not None:
                    names = dict(self.answer.__globals__)
                    exec(self.head + code, names)
                    yield "; and ".join(mistake.what for mistake in chosen), names[self.name]


def edited(code: str, mistakes: Sequence[Mistake]) -> str | None:
    """Apply `mistakes` to code. Returns None if an earlier mistake has replaced the code that a later one changes."""
    for mistake in mistakes:
        if mistake.old not in code:
            return None
        code = code.replace(mistake.old, mistake.new, 1)
    return code
