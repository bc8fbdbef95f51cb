"""Mistakes: one sentence, exit status 2, no traceback, and nothing half-written on disk."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from onward.checkpoint.weights import read_tensors
from onward.cli import main, sentence

from support.disk import with_room_for


@pytest.fixture
def place(story_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with texts and config files, most of them faulty."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(story_file, "story.txt")
    Path("empty.txt").write_text("")
    Path("binary.txt").write_bytes(b"ab\0c")
    Path("latin.txt").write_bytes("café".encode("latin-1"))
    Path("short.txt").write_text("Too short.")
    Path("rows.jsonl").write_text('{"body": "x"}\n')
    Path("bad.toml").write_text("steps = = 3")
    Path("unknown.toml").write_text("learning_rat = 1.0")
    Path("model.toml").write_text("[model]\nd_modell = 3")
    Path("folder").mkdir()
    return tmp_path


def files() -> dict[Path, int]:
    """All files with their modification times, except the lock of a run, which names its last holder."""
    return {p: p.stat().st_mtime_ns for p in Path().rglob("*") if p.is_file() and p.name != "train.lock"}


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on standard error of a command that must fail."""
    before = files()
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("onward: ")
    assert captured.err.count("\n") == 1, captured.err
    assert len(captured.err) < 1100, "long values are shortened"
    assert files() == before, "nothing is written"
    return captured.err


TRAIN = {
    "gone.txt": "gone.txt does not exist",
    "*.nothing": "*.nothing does not exist",
    "empty.txt": "empty.txt is empty",
    "folder": "folder contains no text files",
    "binary.txt": "binary.txt is binary (a zero byte at offset 2)",
    "latin.txt": "byte offset 3",
    "latin.txt --encoding klingon": "--encoding klingon is unknown",
    "rows.jsonl": "rows.jsonl line 1 has no text under 'text'",
    "": "no text to train on",
    "--from nothere": "no text to train nothere on: it is not a run with its own tokens",
    "story.txt --stepz 3": "did you mean --steps",
    "story.txt --model.positon learned": "did you mean --model.position",
    "story.txt --model.position lerned": "did you mean learned",
    "story.txt --model.position rotary(theat=3)": "did you mean theta",
    "story.txt --model.mlp experts(experts=4)": "--model.mlp: experts.experts is not a known option: did you mean cou",
    "story.txt --model.rope 1": "--model.rope is not an option of onward train: did you mean --model.position rotary",
    "story.txt --qqq 1": "--qqq is not an option of onward train: see onward train --help",
    "story.txt -lr": "did you mean --learning-rate? Or put -- before an argument that begins with -",
    "https://example.com/a.txt": "https://example.com/a.txt is an address: download the text into a file",
    "--resume runs/nope": "there is no folder runs/nope: name the folder of a run",
    "--resume story.txt": "story.txt is a file: name the folder of a run",
    "story.txt --steps three": "--steps is 'three'",
    "story.txt --steps": "--steps",
    "story.txt --steps 3 --time 5s": "choose one of",
    "story.txt --time soon": "--time is 'soon'",
    "story.txt --preset huge": "preset is 'huge'",
    "story.txt --preset llama2-7b": "did you mean llama-2-7b",
    "story.txt --preset gemma-2-2b --model.attention.window 8": "model.attention consists of several parts",
    "story.txt --device tpu": "--device is 'tpu': choose auto",
    "story.txt --tokenizer nope": "tokenizer is 'nope'",
    "story.txt --tokenizer bpe:3": "above 256",
    "story.txt --validation gone.txt": "gone.txt does not exist",
    "story.txt --validation 2": "validation is 2",
    "--config gone.toml": "there is no file gone.toml",
    "--config bad.toml": "cannot be read as TOML",
    "story.txt --config unknown.toml": "did you mean learning_rate",
    "--resume folder": "there is no run.json in folder",
    "--resume folder --steps 3": "leave out steps",
    "short.txt --tokenizer byte": "give it more text",
    "story.txt --config model.toml": "did you mean d_model",
    "story.txt --model.d-model 30": "--model.d-model 30 is not divisible by n_heads 4",
    "story.txt --model.d-head 9": "rotate",
    "story.txt --model.n-kv-heads 3": "not a multiple of n_kv_heads 3",
    "story.txt --model.d-model -8": "--model.d-model is -8",
    "story.txt --model.context-length 1000000": "give it more text",
}


@pytest.mark.parametrize("words", TRAIN)
def test_train_refuses(words: str, place: Path, capsys) -> None:
    assert TRAIN[words] in refused(["train", *words.split()], capsys)


OTHERS = {
    "trane": "did you mean train",
    "--hlep": "is not a command",
    "data get tinyshakespear": "did you mean tinyshakespeare",
    "data get": "takes the name of a corpus",
    "data frobnicate": "choose from get, join, list",
    "models gtp2": "did you mean gpt2",
    "models qqqq": "onward models lists the releases",
    "models folder": "there is no config.json in folder",
    "models gpt2 llama-2-7b": "onward models diff A B",
    "models diff gpt2": "takes two releases or folders",
    "models diff gpt2 folder": "there is no config.json in folder",
    "evaluate": "required: model (see",
    "generate": "required: model (see",
    "data": "required: action (see",
    "report RUN other": "is one argument too many: onward report takes folder; to compare with it: --compare other",
    "generate RUN -Once": "-Once is not an option of onward generate: put -- before an argument that begins with -",
    "generate RUN Once --logit-bias 5": "--logit-bias is 5: it takes a table, such as {5: 1.5}",
    "generate https://huggingface.co/gpt2 Once": "hf://gpt2: name the folder of a model",
    "generate hf://openai/gpt2 Once": "HF_HUB_OFFLINE is set, and the cache has no openai/gpt2",
    "evaluate nowhere story.txt": "there is no folder nowhere: name the folder of a model",
    "evaluate RUN gone.txt": "gone.txt does not exist",
    "evaluate RUN story.txt --stride 999": "stride is 999",
    "inspect RUN story.txt names": "the view names takes no text: write onward inspect",
    "inspect RUN story.txt features": "the view features takes a file to train on",
    "evaluate RUN story.txt --mesh tensor=2": "--mesh 'tensor=2' takes 2 processes, but there is 1",
    "evaluate RUN story.txt --stide 9": "did you mean --stride",
    "generate nowhere Once": "there is no folder nowhere: name the folder of a model",
    "generate folder Once": "there is no config.json in folder: name a folder that holds a model",
    "generate story.txt Once": "story.txt is a file: name its folder",
    "generate folder Once --revision main": "but folder is a path on this machine: name hf://folder instead",
    "generate openai-community/gpt2@v1 Once": "there is no folder openai-community/gpt2@v1: name the folder",
    "generate a/b@v1 Once --revision v2": "Cannot use the revision 'v2', because a/b@v1 names another",
    "generate a/b/c Once": "there is no folder a/b/c: name the folder of a model",
    "report openai-community/gpt2": "HF_HUB_OFFLINE is set",
    "generate folder/gone Once": "there is no folder folder/gone: name the folder of a model, such as runs/mybook",
    "generate https://example.org/gpt2 Once": "https://example.org/gpt2 is a URL and not the name of a model on",
    "generate gpt2 Once": "the cache has no gpt2",
    "models openai-community/gpt2": "the cache has no openai-community/gpt2",
    "generate RUN Once --temperature -1": "temperature is -1",
    "generate RUN Once --temperature hot": "temperature is 'hot'",
    "generate RUN Once --temperature " + "9" * 2000: "--temperature is inf",
    "generate RUN Once --top-k " + "x" * 2000: "it takes a whole number",
    "generate RUN Once --frequency-penalty -1e39": "--frequency-penalty is -1e+39",
    "generate RUN Once --beams 100000000": "--beams is 100000000: it must be from 1 to 10000",
    "generate RUN Once --top-p 0": "--top-p is 0",
    "generate RUN Once --top-k -2": "--top-k is -2",
    "generate RUN Once --max-new-tokens -2": "--max-new-tokens is -2",
    "generate RUN Once --max-new-tokens 999": "maximum context length is 32",
    "generate RUN Once --temprature 1": "did you mean --temperature",
    "train --resume RUN": "has finished its 60 steps",
    "train story.txt --out RUN --steps 3": "already contains a run",
}


@pytest.mark.parametrize("words", OTHERS, ids=lambda words: words[:99])
def test_the_other_commands_refuse(words: str, place: Path, tiny_run: Path, capsys) -> None:
    shutil.copytree(tiny_run, "RUN")
    assert OTHERS[words] in refused(words.split(), capsys)


def broken(kind: str, folder: Path) -> None:
    """Damage the weights of a model in one way."""
    path = folder / "model.safetensors"
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
        return
    if kind == "missing file":
        path.unlink()
        return
    if kind == "no safetensors":
        path.write_bytes(os.urandom(1000))
        return
    tensors = {name: tensor.clone() for name, tensor in read_tensors(path).items()}
    if kind == "missing":
        del tensors["model.layers.1.mlp.up_proj.weight"]
    elif kind == "extra":
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(3)
    elif kind == "shape":
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 4)
    path.unlink()
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("truncated", "cut off"),
        ("no safetensors", "cut off or not a safetensors file"),
        ("missing file", "there is no model.safetensors"),
        ("missing", "no tensor model.layers.1.mlp.up_proj.weight"),
        ("extra", "a tensor model.layers.7.mlp.up_proj.weight"),
        ("shape", "tensor model.layers.1.mlp.up_proj.weight has shape [3, 4]"),
    ],
)
def test_a_broken_checkpoint_is_refused_by_name(
    kind: str, message: str, tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_run, "RUN")
    broken(kind, Path("RUN"))
    for words in ["generate", "RUN", "The"], ["evaluate", "RUN"]:
        assert message in refused(words, capsys)


FULL = {  # free disk space, options, expected message
    "the model": (20_000, "--steps 4 --preset tiny", "onward: saving step 0 in runs/full failed"),
    "the metrics, which wait, and then the report": (
        20_000,
        "--steps 400 --validate-every 400 --model.d-model 8 --model.n-layers 1 --model.n-heads 1",
        "onward: cannot write runs/full/report.html",
    ),
}


@pytest.mark.parametrize("case", FULL)
def test_a_full_disk_is_one_sentence_and_nothing_is_half_written(case: str, place: Path, capsys) -> None:
    room, words, said = FULL[case]
    words += " --batch-size 1 --tokenizer char --precision fp32 --model.context-length 8 --out runs/full"
    with with_room_for(room):
        assert main(["train", "story.txt", *words.split()]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith(said)
    assert all(read_tensors(path) for path in Path("runs").rglob("*.safetensors")), "each written file is complete"
    assert not list(Path("runs").rglob(".*"))


def test_memory_that_runs_out_is_one_sentence_and_other_errors_are_no_mistakes_of_the_user() -> None:
    for error in MemoryError(), RuntimeError("can't allocate memory"), RuntimeError("CUDA out of memory."):
        assert sentence(error, ["train"]).endswith("memory: choose smaller sizes or a smaller --batch-size")
        assert sentence(error, ["chat"]).endswith("memory: choose a smaller model, or shorter texts")
    assert sentence(RuntimeError("a shape is wrong"), []) is None
