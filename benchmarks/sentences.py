"""Draws random sentences of a project for a reader who judges whether they are clear.

    python -m benchmarks.sentences                                   100 sentences of this project
    python -m benchmarks.sentences --seed 7 --number 20              20 others
    python -m benchmarks.sentences .venv/lib/python3.11/site-packages/torch     of another project, for comparison

The sentences are drawn from paragraphs and table cells of Markdown pages, and from docstrings, comments and messages of
Python files, each with its file, its line, and the sentences before and after it.
"""

import argparse
import ast
import io
import random
import re
import subprocess
import tokenize
from collections.abc import Iterator
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

END = re.compile(r"(?<!e\.g)(?<!i\.e)(?<!al)[.!?:][\")*`_]*\s+(?=[\"(`*\[A-Z0-9])|\n\s*\n")
WORD = re.compile(r"(?<![\w./{-])[A-Za-z]{2,}(?![\w/({=\[-]|\.\w)")  # no part of a path or of code


class Passage(NamedTuple):
    """A text and the line on which it begins."""

    line: int
    text: str


def of_markdown(source: str) -> Iterator[Passage]:
    code = False
    paragraph, first = list[str](), 0
    for number, line in enumerate([*source.splitlines(), ""], 1):
        item = re.match(r"\s*([-*]|\d+\.|#+)\s", line)
        table, fence = line.startswith("|"), line.lstrip().startswith("```")
        if paragraph and (item or table or fence or not line.strip()):
            yield Passage(first, "\n".join(paragraph))
            paragraph = []
        code ^= fence
        if code or fence or not line.strip():
            continue
        if table:
            yield from (Passage(number, cell) for cell in line.strip("|").split(" | "))
        else:
            first = first if paragraph else number
            paragraph.append(line[item.end() :] if item else line)


def of_python(source: str) -> Iterator[Passage]:
    try:
        tree = ast.parse(source)
    except SyntaxError:  # of a later version of Python
        return
    inside = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            literal = [part.value if isinstance(part, ast.Constant) else "{...}" for part in node.values]
            yield Passage(node.lineno, "".join(map(str, literal)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside:
            yield Passage(node.lineno, node.value)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = enumerate(token for token in tokens if token.type == tokenize.COMMENT)
    # a comment beside code is a passage, and so are the comments on consecutive lines of their own
    own = lambda pair: pair[1].start[0] - (pair[0] if pair[1].line.lstrip().startswith("#") else 0)
    for _, block in groupby(comments, own):
        lines = [token for _, token in block]
        yield Passage(lines[0].start[0], "\n".join(token.string.lstrip("#: ") for token in lines))


def sentences(passage: Passage) -> list[Passage]:
    places = [0, *(match.end() for match in END.finditer(passage.text)), len(passage.text)]
    parts = [(start, " ".join(passage.text[start:end].split())) for start, end in pairwise(places)]
    return [
        Passage(passage.line + passage.text.count("\n", 0, start), text)
        for start, text in parts
        if len(WORD.findall(re.sub("`[^`]*`", "", text))) >= 4
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, default=100)
    options = parser.parse_args()
    listed = subprocess.run(["git", "ls-files", "."], cwd=options.folder, capture_output=True, text=True, check=False)
    files = [options.folder / name for name in listed.stdout.splitlines()] or sorted(options.folder.rglob("*"))
    found = list[str]()
    for path in files:
        if path.suffix in {".md", ".py"}:
            source = path.read_text("utf-8")
            for passage in of_markdown(source) if path.suffix == ".md" else of_python(source):
                own = sentences(passage)
                texts = ["", *(text for _, text in own), ""]
                for (line, text), before, after in zip(own, texts, texts[2:]):
                    found.append(f"{path}:{line} {text}\n  < {before[-160:]}\n  > {after[:160]}")
    print(f"{options.number} of {len(found):,} sentences, drawn with seed {options.seed}")
    for number, one in enumerate(random.Random(options.seed).sample(found, min(options.number, len(found))), 1):
        print(f"\n{number}. {one}")


if __name__ == "__main__":
    main()
