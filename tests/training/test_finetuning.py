"""Fine-tuning: the same run as in pre-training, with other inputs and another loss."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import onward
from onward import Batch, Decoder, Method, Run, UserError
from onward.cli import main
from onward.data.examples import Examples
from onward.data.packing import batch_of
from onward.model.decoder import without_dropout
from onward.training import PolicyMethod
from onward.training.finetuning.base import with_vocabulary
from onward.training.losses.answers import REFERENCE
from onward.transforms import add_head
from onward.transforms.heads import head_of

from support.decoders import DECODERS, assert_close, decoder
from support.finetuning import SETTINGS, base_in, config
from support.finetuning import method as method_of
from support.runs import assert_same_run, metrics
from support.runs import config as text_config


@pytest.fixture(scope="module")
def whole(base: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    list(Run.start(config(base, chats, folder)).train())
    return folder


def test_a_run_of_fine_tuning_learns_and_is_a_model_that_chats(whole: Path) -> None:
    steps = [row for row in metrics(whole) if "loss" in row]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert [row["step"] for row in metrics(whole) if "validation_loss" in row] == [3, 6]
    lm = onward.load(whole)
    assert lm.tokenizer.templates
    assert isinstance(lm.chat("2 + 3?", 5), str)


def test_a_stopped_run_of_fine_tuning_resumes_exactly(whole: Path, base: Path, chats: Path, tmp_path: Path) -> None:
    run = Run.start(config(base, chats, tmp_path / "run"))
    for _ in run.train(stop=lambda: run.step == 2):
        pass
    torch.manual_seed(99)
    list(Run.resume(tmp_path / "run").train())
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.long
def test_a_killed_run_of_fine_tuning_resumes_exactly(whole: Path, base: Path, chats: Path, tmp_path: Path) -> None:
    program = f"""
import os, signal
from onward.training.run.run import Run
from onward.training.finetuning.config import FinetuneConfig
values = dict(base={str(base)!r}, sources=({str(chats)!r},), out={str(tmp_path / "run")!r})
for event in Run.start(FinetuneConfig.of(**values, **{SETTINGS})).train():
    if event.step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    list(Run.resume(tmp_path / "run").train())
    assert_same_run(tmp_path / "run", whole)


def test_changed_examples_are_one_sentence(whole: Path, base: Path, chats: Path, tmp_path: Path) -> None:
    run = Run.start(config(base, chats, tmp_path / "run"))
    table = run.folder / "data/train.safetensors"
    table.write_bytes(table.read_bytes()[:-1] + b"\0\0")
    with pytest.raises(UserError, match=r"have changed since it was started: the tokens in data/train\.safetensors"):
        Run.resume(run.folder)


@pytest.mark.long
def test_a_finished_run_is_made_longer_on_its_own_tokens_or_others(story_file: Path, tmp_path: Path) -> None:
    base = Run.start(text_config(story_file, tmp_path / "base", steps=2))
    list(base.train())
    argv = ["train", "--from", str(base.folder), "--steps", "2", "--learning-rate", "0", "--device", SETTINGS["device"]]
    for name, more in {"longer": [], "more": [str(story_file)]}.items():
        assert main([*argv, *more, "--out", str(tmp_path / name)]) == 0
        longer = onward.load(tmp_path / name)
        assert longer.tokenizer.inner.to_str() == base.tokenizer.inner.to_str()
        for one, other in zip(longer.model.parameters(), onward.load(base.folder).model.parameters()):
            assert torch.equal(one, other), "it begins from the weights, and learns nothing at a learning rate of 0"
    assert main([*argv, "--preset", "tiny", "--out", str(tmp_path / "bad")]) == 2
    assert main(["train", "--from", str(story_file), "--steps", "2", "--out", str(tmp_path / "bad")]) == 2


def test_finetune_from_python_returns_the_model(base: Path, chats: Path, tmp_path: Path) -> None:
    seen: list[Any] = []
    options: Any = {**SETTINGS, "steps": 1, "validate_every": 0}
    lm = onward.finetune(base, chats, tmp_path / "run", seen.append, **options)
    assert isinstance(lm, onward.LanguageModel)
    assert seen[0].step == 1
    assert json.loads((tmp_path / "run/result.json").read_text())["loss"] > 0


def test_new_control_tokens_get_mean_embeddings() -> None:
    for tied in (True, False):
        model = decoder(replace(DECODERS["llama"], tied=tied, head_bias=True))
        size = model.config.vocab_size
        grown = with_vocabulary(model, size + 2)
        assert torch.equal(grown.embed.weight[:size], model.embed.weight)
        assert_close(grown.embed.weight[size:], model.embed.weight.mean(0).expand(2, -1))
        tokens = torch.tensor([[1, 2, 3]])
        before, after = model(tokens), grown.eval()(tokens)
        assert_close(after[..., :size], before)
        assert_close(after[..., size:], before.mean(-1, keepdim=True).expand(-1, -1, 2))


def table_of(method: Method, lengths: list[int], vocabulary: int) -> Examples:
    """Examples of random tokens, most of them trained; `lengths` are the lengths of the sequences."""
    generator = np.random.default_rng(0)
    ends, count = np.cumsum(lengths), 1 if method.kind in ("sft", "classify") else 2
    trained = generator.random(ends[-1]) < 0.7
    tokens = generator.integers(0, vocabulary, ends[-1]).astype(np.uint32)
    numbers: dict[str, np.ndarray] = {
        f"{REFERENCE}{i}": generator.normal(-20, 5, len(ends) // count) for i in range(count)
    }
    numbers["label"] = np.arange(len(ends) // count) % 2.0
    return Examples(tokens, trained, ends, count, numbers)


def headed(model: Decoder, method: str) -> Decoder:
    """The model with the head that the method trains, if any, with random weights."""
    if labels := Method.kinds[method].labels or ("no", "yes") * (method == "classify"):
        add_head(model, labels)
        torch.nn.init.normal_(head_of(model).weight)
    return model


def gradient(model: Decoder, method: Method, batches: Sequence[Batch]) -> dict[str, torch.Tensor]:
    """The gradient of the mean loss over the batches, as in the trainer."""
    model.zero_grad()
    loss = method.loss(base_in("base"))
    with without_dropout(model):
        for batch in batches:
            (loss(model, batch)[0] / sum(b.divisor for b in batches)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


ROWS = {
    "1x8": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "2x4": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "8x1": [[i] for i in range(8)],
}


ALONE = [  # methods without a second model and without sampling
    *(n for n, one in Method.choices().items() if n not in ("distill", "draft") and not issubclass(one, PolicyMethod))
]


@pytest.mark.parametrize("name", [name for name in ALONE if name != "kto"])  # kto's KL divergence is computed per batch
def test_gradients_do_not_depend_on_the_size_of_batches(name: str) -> None:
    method = method_of(name)
    model = headed(decoder(DECODERS["gemma2"]), name)
    table = table_of(method, [3, 9, 2, 12, 5, 7, 2, 8] * 2, model.config.vocab_size)
    wanted = None
    for each in ROWS.values():
        batches = [batch_of(table, [[i] for i in row], method.by_example) for row in each]
        got = gradient(model, method, batches)
        wanted = wanted or got
        for key in wanted:
            assert_close(got[key], wanted[key], 1e-6 * max(1.0, wanted[key].abs().max().item()))


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("kind", ["gemma2", "alibi in windows"])
def test_packed_examples_give_the_gradient_of_single_ones(name: str, kind: str) -> None:
    method = method_of(name)
    model = headed(decoder(DECODERS[kind]), name)
    table = table_of(method, [3, 9, 2, 12, 5, 7, 2, 8] * 2, model.config.vocab_size)
    single = gradient(model, method, [batch_of(table, [[i] for i in range(8)], method.by_example)])
    packed = gradient(model, method, [batch_of(table, [[4, 2, 0], [1, 6], [7, 3, 5]], method.by_example)])
    for key in single:
        assert_close(packed[key], single[key], 1e-5)


def test_sequences_without_a_trained_token_change_nothing(base: Path) -> None:
    method = method_of("sft")
    model = decoder(DECODERS["llama"])
    table = table_of(method, [5, 6, 7], model.config.vocab_size)
    table.trained[5:11] = False
    with_it = gradient(model, method, [batch_of(table, [[0, 1], [2]])])
    without = gradient(model, method, [batch_of(table, [[0], [2]])])
    for key in without:
        assert_close(with_it[key], without[key], 1e-6)
