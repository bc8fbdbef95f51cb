"""Measures the amount of code behind one operation of Onward: the files in which functions are called, and their lines.

    PYTHONPATH=src:tests python -m support.walks

A file counts, with all of its lines, if one of its functions was called; a function counts with its docstring and
comments. Only public names are used, so that releases can be compared.
"""

import io
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import onward
from onward.cli import main as command_line
from onward.families import express, preset, read

SOURCE = Path(onward.__file__).parent
SHARED = "base", "__init__.py"  # shared by all folders


def entered(walk: Callable[[], object]) -> dict[Path, set[int]]:
    """The files of Onward in which `walk()` calls a function, except those shared by all folders, and for each file the
    lines of the called functions."""
    codes = set[CodeType]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and not frame.f_code.co_name.startswith("<module"):
            codes.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        walk()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # which the stubs of Python 3.11 do not allow
    called = defaultdict[Path, set[int]](set)
    for code in codes:
        path, lines = Path(code.co_filename), [line for *_, line in code.co_lines() if line]
        if path.is_relative_to(SOURCE) and path.relative_to(SOURCE).parts[0] not in SHARED:
            called[path] |= {*range(code.co_firstlineno, max(lines) + 1)}
    return dict(sorted(called.items()))


Walk = Callable[[], object]


def walks(folder: Path) -> Iterator[tuple[str, tuple[str, ...], Callable[[], Walk]]]:
    """Yield a name, folders that are not counted because another walk covers them, and a function that prepares
    the walk."""
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "d_model": 32,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "context_length": 64,
    }
    config = onward.DecoderConfig(**sizes)
    tokens, decoder = torch.arange(8)[None], ("config", "model", "kernels")
    model, llama = onward.Decoder(config), preset("llama-3.2-1b").config
    text = folder / "text.txt"
    text.write_text("The cat sat on the mat. " * 400)

    def forward() -> None:
        config = onward.DecoderConfig(**sizes)
        cache = onward.KVCache(config, 1, 32, 8)
        with torch.no_grad():
            onward.Decoder(config)(tokens, positions=torch.arange(8)[None], cache=cache)

    def without_kernels() -> None:
        torch.set_default_dtype(torch.float64)  # no kernel supports fp64
        try:
            forward()
        finally:
            torch.set_default_dtype(torch.float32)

    def engine() -> Walk:
        engine = onward.Engine(model, rows=4, compile_after=None)
        for start in range(4):
            engine.add(onward.Request([start, 1, 2], max_new_tokens=8, sampling=onward.Sampling(temperature=1.0)))
        return lambda: [engine.step(), engine.step()]  # prefill, then one token of each request

    def training() -> Walk:
        out = tempfile.mkdtemp(dir=folder)
        options: dict[str, Any] = {"sources": (str(text),), "preset": "mini", "steps": 4, "device": "cpu"}
        events = onward.Run.start(onward.RunConfig(out=f"{out}/run", **options)).train()
        return lambda: next(event for event in events if isinstance(event, onward.Step))

    def loss() -> Walk:
        batch = onward.Batch(tokens[:, :-1], tokens[:, 1:], torch.arange(7)[None])
        return lambda: onward.mean_loss(model, [batch])

    tokenizer, saved = onward.train_tokenizer("byte", []), folder / "saved"
    lm = onward.LanguageModel(onward.Decoder(replace(config, vocab_size=tokenizer.vocab_size)), tokenizer)
    onward.save(lm, saved)

    def command() -> None:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            assert command_line(["generate", str(saved), "Once upon", "--max-new-tokens", "4"]) == 0

    yield "forward pass", (), lambda: forward
    yield "forward pass, kernels off", (), lambda: without_kernels
    yield "engine step", decoder, engine
    yield "lm.generate", (), lambda: lambda: lm.generate("Once upon", 4)
    yield "onward generate", (), lambda: command
    yield "training step", decoder, training
    yield "loss", decoder, loss
    yield "sampler", (), lambda: lambda: onward.next_token_distribution(torch.zeros(1, 64), onward.Sampling(top_k=4))
    yield "family", decoder, lambda: lambda: read(express(llama))


def counted(folder: Path) -> Iterator[tuple[str, dict[str, int], int]]:
    """Yield the name of each walk, the number of lines by file, and the number of lines of the called functions."""
    for name, left_out, prepare in walks(folder):
        prepare()()  # a first run, since some modules are imported at first use
        found = entered(prepare())
        own = {path for path in found if path.relative_to(SOURCE).parts[0] not in left_out}
        lines = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in sorted(own)}
        yield name, lines, sum(len(found[path]) for path in own)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, lines, called in counted(Path(folder)):
            print(f"{name}: {sum(lines.values()):,} lines in {len(lines)} files; {called:,} in the functions called")
            for file, count in lines.items():
                print(f"    {count:5} {file}")


if __name__ == "__main__":
    main()
