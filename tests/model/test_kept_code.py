"""Machine code of decoding steps is kept for the next start, and damaged code is compiled anew."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from llvmlite import ir

from onward.cli import main
from onward.generation.engine import Engine
from onward.generation.request import Request
from onward.generation.sampling import Sampling
from onward.model.decoder import Decoder
from onward.model.kernels.compiler import INT, add_kernel, load

from support.decoders import DECODERS
from support.grids import first


def doubling() -> ir.Module:
    """A kernel that writes twice its argument."""
    module = ir.Module()

    def emit(code, arguments, first, end) -> None:
        source, target = arguments
        code.store(code.mul(code.scalar(source, "int64", 0), INT(2)), code.at(target, "int64", 0))

    add_kernel(module, "kernel", 2, emit)
    return module


def doubled(folder: Path, number: int) -> int:
    import ctypes

    engine = load(doubling(), folder=folder)
    x, y = ctypes.c_int64(number), ctypes.c_int64()
    fields = (ctypes.c_int64 * 4)(ctypes.addressof(x), ctypes.addressof(y), 1, 1)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(engine.get_function_address("kernel"))(ctypes.addressof(fields))
    return y.value


def test_code_is_read_from_its_file_and_compiled_anew_where_it_is_damaged(tmp_path: Path) -> None:
    assert doubled(tmp_path, 21) == 42
    [path] = tmp_path.iterdir()
    written, time = path.read_bytes(), path.stat().st_mtime_ns
    assert doubled(tmp_path, 4) == 8
    assert path.stat().st_mtime_ns == time, "it was not written again"
    for damage in written[: len(written) // 2], b"", written[:40] + b"?" + written[41:]:
        path.write_bytes(damage)
        assert doubled(tmp_path, 5) == 10
        assert path.read_bytes() == written


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
        assert any(engine.runner.steps.programs.free.values()) == ahead
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


# llvmlite is missing, finds no processor that it knows, or cannot load what it compiled
BROKEN = {
    "no library": "sys.modules['llvmlite'] = None",
    "no target": "import llvmlite.binding as llvm; llvm.Target.from_default_triple = lambda: broken()",
    "no engine": "import llvmlite.binding as llvm; llvm.create_mcjit_compiler = lambda *_: broken()",
}


@pytest.mark.parametrize("name", first(1, BROKEN))
def test_where_nothing_can_be_compiled_the_plain_steps_give_the_same_tokens(
    name: str, tiny_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(tiny_run), "the", "--max-new-tokens", "20", "--temperature", "0", "--compile"]
    start = "import sys\ndef broken(): raise RuntimeError('no machine code here')\n"
    code = f"{start}{BROKEN[name]}\nfrom onward.cli import main\nsys.exit(main({words!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "steps stay plain" in done.stderr.replace("\n", " "), done.stderr
    assert "Traceback" not in done.stderr
    assert main(words[:-1]) == 0
    assert done.stdout == capsys.readouterr().out
