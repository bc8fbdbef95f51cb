"""README, docs/ and CONTRIBUTING are executed: every Python block, and the `onward` and `torchrun` commands in the
shell blocks, shortened, except `onward quickstart` and `onward data get`. Chapters of the course run unchanged, and
print the outputs shown on their pages."""

import html
import io
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

import onward
from onward import Attention, Block, FeedForward, Norm, Position
from onward.cli import main
from onward.data import embedded
from onward.data.tokens import is_prepared
from onward.families import families
from onward.learn.cells import cells, difference, output
from onward.learn.chapters import Chapter, chapters
from onward.learn.interactive.figure import InteractiveFigure, read_figure

from support.hub import put_in_cache
from support.server import started

families()  # register all parts before the first page is read
ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
IMAGE = re.compile(r"^!\[.*\]\((\w+\.svg)\)$", re.MULTILINE)
PICTURE = re.compile(r"^!\[.+\]\(([\w-]+\.svg)\)$", re.MULTILINE)
TOLD = r'<text class="(?:title|caption{more})"[^>]*>(.*?)</text>|<tspan class="([\w-]+)"[^>]*>([^<]*[a-z][^<]*)<'
ADDRESS = "http://127.0.0.1:8000"  # address of the server on a page
BEGINNING = ["train", "mybook.txt", "--out", "runs/mybook"]  # first command of many pages, with or without --time
KINDS = {"python", "sh", "text", "toml"}  # text: the output of a command


def told(picture: Path, more: str = "") -> list[str]:
    """The words of the title, caption and legends of a picture, and the styles of its curves; not the numbers, which
    depend on the machine that trained the model."""
    found = re.findall(TOLD.format(more=more), picture.read_text("utf-8"))
    words = html.unescape(" ".join(" ".join(groups) for groups in found)).split()
    return [word for word in words if re.fullmatch(r"\D*[a-z]\D*", word)]


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the parts that a page defines."""
    for slot in Attention, Block, FeedForward, Norm, Position:
        monkeypatch.setattr(slot, "kinds", dict(slot.kinds))


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the files that the pages mention; the hub cache contains their models."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("onward.cli.shared.training.examine", lambda *_: None)  # tested in inspection/test_doctor.py
    # tested in test_calibration.py
    monkeypatch.setattr("onward.training.clock.calibration.precisions_of", lambda _: ["fp32"])
    text = "\n\n".join(embedded().documents[:16])
    Path("mybook.txt").write_text(text, encoding="utf-8")
    Path("other.txt").write_text(text[:4000], encoding="utf-8")
    Path("examples").symlink_to(ROOT / "examples")
    tokenizer = onward.train_tokenizer("byte", [])
    model = onward.Decoder(
        onward.DecoderConfig(tokenizer.vocab_size, d_model=32, n_layers=2, n_heads=2, context_length=64)
    )
    onward.save(onward.LanguageModel(model, tokenizer), tmp_path / "published")
    caches = [put_in_cache(name, tmp_path / "published") for name in ("gpt2", "openai-community/gpt2")]
    yield tmp_path
    for cache in caches:
        shutil.rmtree(cache)


def shortened(words: list[str]) -> list[str]:
    """A shorter version of a command: training takes three steps of a tiny model (a resumed run repeats the last one),
    an evaluation ten questions per task, a comparison one seed of three steps, a grid the smallest runs, an inspection
    that trains one second."""
    if "--resume" in words:
        run = Path(words[-1])  # as if the run had been killed before its end
        (run / "result.json").unlink()
        shutil.rmtree(max((run / "checkpoints").glob("step-*")))
    elif words[0] in ("train", "finetune") and "--show" not in words:
        for flag in "--time", "--steps", "--epochs":
            if flag in words:
                del words[words.index(flag) : words.index(flag) + 2]
        words += ["--steps", "3"]
        for flag, value in ("--validation-tokens", "500"), ("--validate-every", "3"):
            words += [] if flag in words else [flag, value]
        if words[0] == "train" and "--from" not in words:
            words += ["--preset", "tiny", *([] if any(map(is_prepared, words)) else ["--tokenizer", "byte"])]
    elif words[0] == "evaluate" and "--limit" not in words and {"--tasks", "--choices", "--answers"} & {*words}:
        words += ["--limit", "10"]
    elif words[0] in ("compare", "sweep"):
        for flag in "--time", "--tokens", "--steps":
            if flag in words:
                words[words.index(flag) : words.index(flag) + 2] = ["--steps", "3"]
        words += ["--seeds", "1", "--preset", "tiny", "--tokenizer", "byte", "--validate-every", "3"]
        words += ["--validation-tokens", "500", "--evaluation-tokens", "500"]
    elif words[:2] == ["scaling", "run"]:
        at = words.index("--budget")
        words[at : at + 2] = ["--grid-flops", "1.2e10", "--model.n-layers", "1", "--model.context-length", "16"]
        words += ["--validation-tokens", "64", "--evaluation-tokens", "500", "--precision", "fp32"]
    elif words[0] == "inspect" and {"features", "--tuned"} & {*words}:
        words += ["--time", "1s"]
    return words


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder that many pages start from; the first page that needs it trains the run."""
    return tmp_path_factory.mktemp("kept") / "mybook"


def run_command(words: list[str], first_run: Path) -> int:
    """Run an `onward` command; the training command that many pages start with runs only once."""
    options = words[4:]
    if words[:4] != BEGINNING or (options and options[0] != "--time"):
        return main(shortened(words))
    if first_run.exists():
        shutil.copytree(first_run, "runs/mybook")
        return 0
    status = main(shortened(words))
    shutil.copytree("runs/mybook", first_run)
    return status


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_runs_and_makes_its_pictures(
    page: Path, reader: Path, first_run: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    text = page.read_text(encoding="utf-8")
    blocks = BLOCK.findall(text)
    assert {kind for kind, _ in blocks} <= KINDS
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    address, parser = ADDRESS, get_args_parser()
    for kind, body in blocks:
        body = body.replace(ADDRESS, address)
        assert kind != "text" or not body.startswith(("onward ", "torchrun ")), body
        if kind == "python":
            exec(compile(body, str(page), "exec"), names)
        for line in body.splitlines() if kind == "sh" else ():
            words = shlex.split(line, comments=True)
            targets = [word for word in words[1:] if "=" not in word]
            match words[:1]:
                case ["make"]:
                    assert all(f"\n{target}:" in makefile for target in targets), line
                case ["onward"] if words[1:2] == ["serve"]:
                    server, address = started(*words[2:])
                    request.addfinalizer(server.kill)
                case ["curl"] if shutil.which("curl"):
                    assert subprocess.run([*words, "--fail", "--silent"]).returncode == 0, line
                case ["onward"] if words[1:2] != ["quickstart"] and words[1:3] != ["data", "get"]:
                    found = words[1:2] == ["doctor"]  # the example has a bug
                    assert run_command(words[1:], first_run) == found, line
                case ["echo"]:
                    echo, *command = line.split(" | onward ")
                    stdin = io.TextIOWrapper(io.BytesIO(shlex.split(echo)[1].encode() + b"\n"))
                    monkeypatch.setattr("sys.stdin", stdin)
                    assert main(shlex.split(command[0])) == 0, line
                case ["torchrun"]:
                    at = words.index("onward") + 1
                    parser.parse_args(words[1:at])
                    if "--mesh" in words:
                        words[words.index("--mesh") + 1] = "replicate=1"
                    assert run_command(words[at:], first_run) == 0, (
                        line
                    )  # training/test_launchers.py runs several processes
    for name in IMAGE.findall(text):
        if (reader / name).exists():
            assert told(reader / name) == told(page.parent / name), f"draw {name} again, as {page.name} says"
        else:
            assert f"--out docs/{name}\n" in text, f"no command of {page.name} makes {name}"


LONG = {True: (pytest.mark.long,), False: ()}


@pytest.mark.parametrize("chapter", [pytest.param(c, id=c.path.stem, marks=LONG[c.minutes]) for c in chapters()])
def test_chapter_prints_what_its_page_shows(chapter: Chapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for run in {*re.findall(r"runs/\w+", chapter.text)}:
        (tmp_path / run / "checkpoints/step-1").mkdir(parents=True)  # left by an earlier run
    names: dict[str, object] = {}
    differences = []
    for cell in cells(chapter.text):
        differences.append(difference(cell, output(cell, names, main)))
        if cell.figure:
            figure = names["_"]
            assert isinstance(figure, InteractiveFigure)
            stored, drawn = (asdict(one) for one in (read_figure(chapter.path.parent / cell.figure), figure))
            differences.append(difference(replace(cell, output=json.dumps(stored)), json.dumps(drawn)))
            assert stored["title"] == drawn["title"]
            assert {*stored["data"]} == {*drawn["data"]}
    assert not [*filter(None, differences)]
    for name in PICTURE.findall(chapter.text):
        assert (tmp_path / name).exists(), f"no command of chapter {chapter.number} makes {name}"
        made, kept = (told(folder / name, "|name") for folder in (tmp_path, chapter.path.parent))
        assert made == kept, f"python -m docs.site.outputs docs/learn/{chapter.path.name}"
