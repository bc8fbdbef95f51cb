"""Evaluation with a tensor axis: losses, scores and answers equal those of one process (to 1e-9 in fp64), and no
process holds the whole model."""

import gc
import json
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import astuple, replace
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import onward
from onward import (
    Decoder,
    DecoderConfig,
    Experts,
    GenerationOptions,
    LanguageModel,
    LoRA,
    RunConfig,
    UserError,
    add_lora,
)
from onward.base.files import read_json
from onward.checkpoint.divided import load_divided
from onward.checkpoint.peft.adapters import save_adapter
from onward.checkpoint.peft.bases import BaseModel, weights_checksum
from onward.cli.commands.evaluate import Options, arranged, evaluate
from onward.cli.commands.evaluate.divided import load_alike
from onward.cli.shared.output import console
from onward.compiled.fingerprint import fingerprint
from onward.evaluation import continuations
from onward.evaluation.answers import write_answers
from onward.evaluation.continuations import Pair, score_continuations
from onward.evaluation.kept import kept_for
from onward.evaluation.outputs import outputs
from onward.evaluation.text import evaluate_texts
from onward.generation.engine import engine
from onward.parallel.replicas import Replicas
from onward.planning import choice
from onward.transforms import add_head
from onward.transforms.heads import head_labels
from onward.transforms.lora import adapters_of

from support.decoders import DECODERS, decoder
from support.finetuning import TEXT, tokenizer
from support.heap import HeapPeak
from support.ranks import Ranks

VOCABULARY = -(-tokenizer().vocab_size // 4) * 4  # divisible by four processes
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "context_length": 24}
MODELS = {name: replace(DECODERS[name], **SIZES) for name in ("llama", "gpt2", "deepseek", "olmo2")}
QUICK = "experts"
MODELS[QUICK] = replace(MODELS["llama"], n_kv_heads=4, mlp=Experts(count=4, top_k=2, d_ff=8, d_shared=4))
MODELS["fewer heads of keys than processes"] = replace(MODELS["llama"], n_kv_heads=1)
MODELS["a vocabulary that is not divided"] = replace(MODELS["llama"], vocab_size=VOCABULARY + 1)
MESHES = "tensor=2", "tensor=4", "replicate=2 tensor=2"
PAIRS = [Pair((1, 5, *range(2, 2 + i % 9)), (3 + i, *range(i % 3))) for i in range(50)]
OPTIONS = GenerationOptions(max_new_tokens=5, temperature=0.8, seed=0)


def adapter_in(folder: Path, base: Path) -> Path:
    """The folder of an adapter of the model in `base`, with trained values."""
    lm = onward.load(base)
    add_lora(lm.model, LoRA(rank=2))
    for _, _, adapter in adapters_of(lm.model, "default"):
        torch.nn.init.normal_(adapter.b, std=0.1)
    save_adapter(lm.model, folder, read_json(base / "config.json"), BaseModel(str(base), weights_checksum(base)))
    return folder


def model_in(folder: Path, config: DecoderConfig, labels: Sequence[str] = ()) -> Path:
    """The folder of a model in which every parameter matters."""
    model = decoder(config).cpu()
    if labels:
        add_head(model, labels)
    onward.save(LanguageModel(model, tokenizer()), folder)
    return folder


def options(mesh: str) -> Options:
    return Options(model="", device="cpu", mesh=mesh)


def loaded(folder: Path, mesh: str) -> tuple[LanguageModel, Replicas]:
    """A model in fp64, loaded in the processes of a mesh."""
    replicas = arranged(options(mesh))
    lm = load_alike(str(folder), options(mesh), replicas)
    lm.model.double()
    return lm, replicas


def figures(folder: Path, mesh: str = "") -> list[Any]:
    """The loss of a text, scores of continuations, outputs of the model's head (if it has one), written answers, and
    the number of answers stored in the file."""
    lm, replicas = loaded(folder, mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continuations, "ROWS", 8)
        patch.setattr(continuations, "SAME", 2)
        patch.setattr(engine, "perf_counter", Random(replicas.rank).random)  # the processes measure different times
        kept = kept_for(lm.model, lm.text(), folder / f"answers {mesh}", replicas)
        loss = evaluate_texts(lm.model, lm.text(), [TEXT], 7, replicas)
        scores = score_continuations(lm.model, PAIRS, kept=kept)
        prompts = [[1, 2, 3 + i, *range(i)] for i in range(7)]
        answers = write_answers(lm.engine(rows=4, prefill_budget=2), lm.text(), prompts, OPTIONS, kept=kept)
    kept.close()
    head = outputs(lm.model, prompts).flatten().tolist() if head_labels(lm.model) else []
    replicas.together("the file of answers", lambda: None)
    count = sum(map(bool, kept.file.read_text().splitlines())) if kept.file else 0
    tokens = [[one.tokens for one in some] for some in answers]
    return [*astuple(loss), *(value for one in scores for value in astuple(one)), *head, tokens, count]


def assert_evaluates_as_one(ranks: Ranks, folder: Path, mesh: str) -> None:
    """The shared assertion: every process of a mesh gets the same figures as a single process."""
    *expected, tokens, count = figures(folder)
    assert count == len(PAIRS) + 7
    for *got, its_tokens, its_count in ranks.run(figures, folder, mesh):
        assert (its_tokens, its_count) == (tokens, count)
        assert got == pytest.approx(expected, rel=1e-9)


def cases() -> list[Any]:
    """The models and meshes; all but one are `long`."""
    quick = QUICK, MESHES[0]
    able = [(name, mesh) for name in MODELS for mesh in MESHES if not (name == "olmo2" and mesh == "tensor=4")]
    return [pytest.param(*one, marks=() if one == quick else pytest.mark.long) for one in able]


@pytest.mark.parametrize(("name", "mesh"), cases())
def test_divided_model_is_evaluated_as_by_one_process(
    name: str, mesh: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    labels = ["no", "yes"] if name == QUICK else []
    ranks: Ranks = request.getfixturevalue("two" if mesh == "tensor=2" else "four")
    assert_evaluates_as_one(ranks, model_in(tmp_path / "model", MODELS[name], labels), mesh)


def test_model_with_an_adapter_is_evaluated_as_by_one_process(two: Ranks, tmp_path: Path) -> None:
    folder = adapter_in(tmp_path / "adapter", model_in(tmp_path / "model", MODELS["llama"]))
    assert figures(folder)[0] != figures(tmp_path / "model")[0]
    assert_evaluates_as_one(two, folder, "tensor=2")


def peak(folder: Path) -> int:
    """The peak of allocated bytes while this process loads its part of a model and evaluates it."""
    replicas = arranged(options("tensor=2"))
    gc.collect()
    with HeapPeak() as heap:
        lm = load_alike(str(folder), options("tensor=2"), replicas)
        evaluate_texts(lm.model, lm.text(), [TEXT], 0, replicas)
    return heap.bytes


@pytest.mark.parametrize("preset", ["gpt2", pytest.param("mini", marks=pytest.mark.long)])
def test_process_holds_its_part_and_two_blocks_of_the_model(preset: str, two: Ranks, tmp_path: Path) -> None:
    sizes = {"d_model": 384, "n_layers": 12, "n_heads": 4, "context_length": 8}
    config = RunConfig(preset=preset, model=sizes).decoder(VOCABULARY)
    folder = model_in(tmp_path / "model", config)
    with torch.device("meta"):
        model = Decoder(config)
    weights, block = (sum(p.nbytes for p in m.parameters()) for m in (model, model.blocks[0]))
    small = RunConfig(preset=preset, model=sizes | {"n_layers": 1}).decoder(VOCABULARY)
    two.run(peak, model_in(tmp_path / "small", small))  # a first run, so that imports are not counted below
    assert max(two.run(peak, folder)) <= weights / 2 + 2 * block


def refusal(folder: Path, mesh: str, given: dict[str, Any]) -> str:
    """The message with which a process refuses to load a model."""
    try:
        load_alike(str(folder), Options(model="", device="cpu", **given), arranged(options(mesh)))
    except UserError as error:
        return str(error)
    return ""


def assert_refused(ranks: Ranks, folder: Path, mesh: str, sentence: str, **options: Any) -> None:
    """The shared assertion: all processes refuse to evaluate a model with the same message."""
    for its in ranks.run(refusal, folder, mesh, options):
        assert its == sentence.format(folder=folder)


QUANTIZE = "Cannot quantize a model that 'tensor=2' divides: leave quantize out, or use replicas only"
AXES = "mesh is '{}', but evaluation divides a model only by a tensor axis: give replicate and tensor"
REFUSED = {
    "bloom": "mesh 'tensor=2' cannot divide the decoder, because 2 does not divide n_heads 3: choose tensor among 1",
    "no-output": "blocks.0.attn, a SelfAttentionModule, has no rule for tensor parallelism: use tensor=1",
    "int8": "{folder} has quantized weights, which processes cannot divide: use replicas only",
}


def test_models_axes_and_options_without_a_division_are_refused(two: Ranks, tmp_path: Path) -> None:
    for name in "llama", "bloom", "no-output":
        model_in(tmp_path / name, replace(DECODERS[name], **SIZES))
    onward.save(onward.load(tmp_path / "llama", quantize="int8"), tmp_path / "int8")
    for name, sentence in REFUSED.items():
        assert_refused(two, tmp_path / name, "tensor=2", sentence)
    assert_refused(two, tmp_path / "llama", "tensor=2", QUANTIZE, quantize="int8")
    for mesh in "shard=2", "context=2", "pipeline=2":
        assert_refused(two, tmp_path / "llama", mesh, AXES.format(mesh))


def command(words: Sequence[str], memory: int) -> tuple[str, str]:
    """The output of `onward evaluate` and its messages, in a process whose device has `memory` bytes."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as said:
        patch.setattr(choice, "device_bytes", lambda device: memory)
        patch.setattr(console, "quiet", False)
        evaluate([*words, "--device", "cpu"])
    return out.getvalue(), said.getvalue()


def test_model_that_fits_no_device_is_divided_without_being_asked(two: Ranks, tmp_path: Path) -> None:
    folder, text = model_in(tmp_path / "model", MODELS[QUICK]), tmp_path / "text.txt"
    text.write_text(TEXT)
    words = [str(folder), str(text), "--json"]
    alone, _ = command(words, 0)
    for memory, mesh in (1 << 40, ""), (0, "tensor=2"):
        (out, said), (other, silent) = two.run(command, words, memory)
        assert (other, silent) == ("", "")
        assert [line.partition(":")[0] for line in said.splitlines() if "mesh" in line] == [f"mesh {mesh}"] * bool(mesh)
        assert json.loads(out) == pytest.approx(json.loads(alone), rel=1e-5)


def weights_of(folders: Sequence[Path]) -> str | None:
    """The hash of a model's weights; each process reads its part of them from its own folder."""
    replicas = arranged(options("tensor=2"))
    return fingerprint(load_divided(folders[replicas.rank], replicas.mesh, replicas.devices)[0])


def test_processes_that_read_different_weights_have_different_hashes(two: Ranks, tmp_path: Path) -> None:
    one = model_in(tmp_path / "one", MODELS["llama"])
    other = model_in(tmp_path / "other", replace(MODELS["llama"], n_layers=3))
    first, second = two.run(weights_of, [one, one])
    assert first == second
    assert len({first, *two.run(weights_of, [one, other]), *two.run(weights_of, [other, other])}) == 4
