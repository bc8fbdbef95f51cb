"""Steps compiled before the first token give the tokens of plain steps, which machines without a compiler use."""

import pwd
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from onward import Decoder, Engine, Request, Sampling
from onward.cli import main
from onward.compiled import linking

from support.decoders import DECODERS
from support.grids import first


def test_steps_compiled_ahead_give_the_tokens_of_plain_steps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Decoder(DECODERS["llama"]).eval()
    found = []
    for ahead in (False, True):
        engine = Engine(model, rows=2, compile_after=None if not ahead else 16)
        if ahead:
            assert engine.compile(1, tmp_path) == ""
        request = engine.add(Request([1, 2, 3], Sampling(temperature=0), 8))
        list(engine.run())
        compiled = engine.runner.compiled
        assert bool(compiled and any(compiled.pool.free.values())) == ahead
        found.append(request.tokens)
    assert found[0] == found[1]


def test_compile_says_how_long_it_took_or_why_steps_stay_plain(
    tiny_run: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ["generate", str(tiny_run), "the", "--max-new-tokens", "4", "--temperature", "0"]
    assert main(words) == 0
    plain = capsys.readouterr().out
    assert main([*words, "--compile"]) == 0
    captured = capsys.readouterr()
    assert captured.out == plain
    assert "decoding steps compiled in" in captured.err
    assert str(tmp_path) in captured.err.replace("\n", "")


def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])  # as for a user without a name in a container


# change of the environment, expected number of warnings
HOMES: dict[str, tuple[Callable[[pytest.MonkeyPatch], object], int]] = {
    "none": (no_home, 0),
    "no folder": (lambda monkeypatch: monkeypatch.setenv("HOME", "/dev/null"), 1),
    "relative": (lambda monkeypatch: monkeypatch.setenv("HOME", "home"), 0),
}


@pytest.mark.parametrize("name", first(2, HOMES))
def test_compile_without_a_home_to_write_to_gives_the_same_answer(
    name: str, tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    words = ["generate", str(tiny_run), "the", "--max-new-tokens", "4", "--temperature", "0"]
    assert main(words) == 0
    plain = capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    take_away, count = HOMES[name]
    take_away(monkeypatch)
    monkeypatch.setattr(linking, "KERNELS", {})  # compiled anew
    assert main([*words, "--compile"]) == 0
    captured = capsys.readouterr()
    assert captured.out == plain
    assert captured.err.count("is not kept") == count
    assert not list(tmp_path.iterdir())


# llvmlite is missing, does not support the processor, or cannot load the compiled code
BROKEN = {
    "no library": "sys.modules['llvmlite'] = None",
    "no target": "import llvmlite.binding as llvm; llvm.Target.from_default_triple = lambda: broken()",
    "no engine": "import llvmlite.binding as llvm; llvm.create_mcjit_compiler = lambda *_: broken()",
}


@pytest.mark.long
@pytest.mark.parametrize("name", first(1, BROKEN))
def test_where_nothing_can_be_compiled_the_plain_steps_give_the_same_tokens(
    name: str, tiny_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(tiny_run), "the", "--max-new-tokens", "20", "--temperature", "0", "--compile"]
    start = "import sys\ndef broken(): raise RuntimeError('no machine code here')\n"
    code = f"{start}{BROKEN[name]}\nfrom onward.cli import main\nsys.exit(main({words!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "decoding steps are not compiled" in done.stderr.replace("\n", " "), done.stderr
    assert "Traceback" not in done.stderr
    assert main(words[:-1]) == 0
    assert done.stdout == capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("name", first(1, BROKEN))
def test_where_nothing_can_be_compiled_a_server_starts_and_a_draft_head_guesses_by_plain_steps(name: str) -> None:
    code = f"""import sys
def broken(): raise RuntimeError('no machine code here')
{BROKEN[name]}
import onward.serving.models
from onward.generation.drafts.head_draft import COMPILE_AFTER, HeadDraft
from onward.serving.last_words import say_at_bus_error
from onward.transforms.draft_head import add_draft_head, draft_head_of
from onward import Decoder, DecoderConfig, Engine, Request, Sampling

say_at_bus_error()
model = Decoder(DecoderConfig(vocab_size=23, d_model=16, n_layers=2, n_heads=2, context_length=256))
add_draft_head(model, 16)
options = dict(sampling=Sampling(temperature=1.0), max_new_tokens=6 * COMPILE_AFTER, seed=1)
request, plain = (Request([1, 2, 3], **options) for _ in range(2))
for one, draft in ((request, HeadDraft(model, draft_head_of(model), 1)), (plain, None)):
    engine = Engine(model, draft=draft)
    engine.add(one)
    engine.finish()
assert request.num_drafted > COMPILE_AFTER and request.tokens == plain.tokens
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
