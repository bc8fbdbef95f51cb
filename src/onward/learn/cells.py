"""Runs the code blocks of a page in order, and compares their output with the output that the page shows.

A block of ```python or ```sh may be followed by a block of ```text, its output. A comment between them loosens the
comparison: `<!-- within 10 % -->` for numbers of a training run, `<!-- varies -->` for times and sampled texts. A
comment `<!-- holds: kept < hacked -->` states a claim of the prose: an expression of the page's variables, and of the
printed `output`, that must be true. A comment `<!-- interactive: 09-samplers.json -->` marks an interactive figure,
which is the value of the block's last line; the file has its numbers.
"""

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO

Command = Callable[[Sequence[str]], int]  # runs `onward` with arguments; returns the exit status

CELL = re.compile(
    r"^```(?P<kind>python|sh)\n(?P<code>.*?)^```\n"
    r"(?P<notes>(?:\n*<!-- (?:within [\d.]+ %|varies|(?:holds|interactive): [^\n]+) -->\n)*)"
    r"(?:\n+```text\n(?P<output>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
WITHIN = re.compile(r"<!-- within ([\d.]+) % -->")
FIGURE = re.compile(r"<!-- interactive: ([\w-]+\.json) -->")
CLAIM = re.compile(r"<!-- holds: (.+) -->")
NUMBER = re.compile(r"([-+−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?)")
BAR = "▇"  # its length shows the adjacent number
PERCENT = 1.0  # tolerance of a number, unless a page gives another one


@dataclass(frozen=True)
class Cell:
    """A block of Python or shell code on a Markdown page of the documentation, and the output that the page shows for
    it."""

    kind: str  # python or sh
    code: str
    output: str | None = None  # None: the page shows no output
    percent: float = PERCENT  # tolerance of the numbers in the output, in percent
    varies: bool = False  # whether the output is one example of many
    claims: Sequence[str] = ()  # expressions that are true after the code
    figure: str = ""  # file of the numbers of an interactive figure

    @property
    def commands(self) -> list[str]:
        """One text per command; a line that ends in a backslash continues."""
        lines = self.code.replace("\\\n", " ").splitlines()
        return [line for line in lines if shlex.split(line, comments=True)]


def pieces(text: str) -> Iterator[str | Cell]:
    """The prose and the Cells of a page, in order."""
    end = 0
    for match in CELL.finditer(text):
        yield text[end : match.start()]
        notes = match["notes"]
        percent = float(within[1]) if (within := WITHIN.search(notes)) else PERCENT
        varies = "<!-- varies -->" in notes
        figure = drawn[1] if (drawn := FIGURE.search(notes)) else ""
        yield Cell(match["kind"], match["code"], match["output"], percent, varies, CLAIM.findall(notes), figure)
        end = match.end()
    yield text[end:]


def cells(text: str) -> list[Cell]:
    """Return the blocks of code of a Markdown page (`text`), in order."""
    return [piece for piece in pieces(text) if isinstance(piece, Cell)]


def run(cell: Cell, names: dict[str, object], onward: Command) -> int:
    """Run a block and return its status. Python code shares `names`, where `_` is the value of a block's last
    statement. In shell code, only the commands `onward` and `python` run, until one exits with status 2, a user
    error."""
    if cell.kind == "python":
        names["_"] = value(cell.code, names)
        return 0
    status = 0
    for line in cell.commands:
        match shlex.split(line, comments=True):
            case ["onward", *words]:
                status = onward(words)
            case ["python", *words]:
                done = subprocess.run([sys.executable, *words], stdout=subprocess.PIPE, text=True)
                print(done.stdout, end="")
                status = done.returncode
        if status == 2:
            break
    return status


def value(code: str, names: dict[str, object]) -> object:
    """Run Python code; return the value of its last statement, or None if the statement is not an expression."""
    last: ast.expr = ast.Constant(None)
    match ast.parse(code, "<page>").body:
        case [*body, ast.Expr(value=last)]:
            pass
        case body:
            pass
    exec(compile(ast.Module(body, []), "<page>", "exec", dont_inherit=True), names)
    expression = ast.fix_missing_locations(ast.Expression(last))
    return eval(compile(expression, "<page>", "eval", dont_inherit=True), names)


def fails(cell: Cell, status: int) -> bool:
    """Whether a block ended with status 2, a user error, although its page shows no output."""
    return status == 2 and not cell.output


def output(cell: Cell, names: dict[str, object], onward: Command) -> str:
    """Run a block of code from a page, with the arguments of `run`; return the text that it prints on standard output,
    and the error message of a user error that the page shows. Raises a RuntimeError for a user error if the page shows
    no output, and for a false claim after the block."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = run(cell, names, onward)
    if fails(cell, status):
        raise RuntimeError(f"{cell.code}{err.getvalue()}")
    for claim in cell.claims:
        if not eval(claim, {**names, "output": out.getvalue()}):
            raise RuntimeError(f"the page claims that {claim}, which is false after\n{cell.code}{out.getvalue()}")
    lines = (out.getvalue() + (err.getvalue() if status == 2 else "")).splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines)


def difference(cell: Cell, got: str) -> str:
    """The first difference between the output that a page shows and `got`, as a sentence. White space and bars may
    differ; numbers may differ by the block's `percent` or, if they have decimals, by one unit of their last digit."""
    if cell.output is None or cell.varies:
        return ""
    shown, printed = (NUMBER.split(" ".join(text.replace(BAR, "").split())) for text in (cell.output, got))
    for i, (one, other) in enumerate(zip(shown, printed)):
        if one != other and not (i % 2 and near(one, other, cell.percent)):
            return f"the page shows {one!r} after {''.join(shown[:i])[-60:]!r}, and the code prints {other!r}"
    if len(shown) != len(printed):
        return f"the page shows {len(shown) // 2} numbers, and the code prints {len(printed) // 2}:\n{got}"
    return ""


def near(shown: str, printed: str, percent: float) -> bool:
    one, other = (float(text.replace(",", "").replace("−", "-")) for text in (shown, printed))
    digits, _, exponent = shown.partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
    return abs(one - other) <= max(abs(one) * percent / 100, 1.01 * unit if unit < 1 else 0)


def rewritten(text: str, outputs: Sequence[str]) -> str:
    """Return the Markdown page `text` with its shown outputs replaced by `outputs`, one text per block of code in
    order; a block that shows no output still shows none."""
    rest = iter(outputs)

    def replaced(match: re.Match[str]) -> str:
        new = next(rest)
        if match["output"] is None:
            return match[0]
        start, end = (place - match.start() for place in match.span("output"))
        return match[0][:start] + new + match[0][end:]

    return CELL.sub(replaced, text)
