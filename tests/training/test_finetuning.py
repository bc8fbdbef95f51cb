"""Fine-tuning: the run is that of training, with other inputs and another loss."""

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
from onward.cli import main
from onward.data.examples import Examples
from onward.data.packing import batch_of
from onward.data.windows import Batch
from onward.errors import UserError
from onward.model.decoder import Decoder, without_dropout
from onward.training.finetuning.base import with_vocabulary
from onward.training.losses.answers import REFERENCE
from onward.training.methods import Method
from onward.training.methods.policy import PolicyMethod
from onward.training.run.run import Run
from onward.transforms.heads import add_head, head_of

from support.decoders import DECODERS, assert_close, decoder
from support.finetuning import SETTINGS, base_in, base_model, config, write_rows
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
    with pytest.raises(UserError, match=r"differs in the tokens in data/train\.safetensors"):
        Run.resume(run.folder)


def test_a_finished_run_is_made_longer_on_its_own_tokens_or_others(story_file: Path, tmp_path: Path) -> None:
    base = Run.start(text_config(story_file, tmp_path / "base", steps=2))
    list(base.train())
    argv = ["train", "--from", str(base.folder), "--steps", "2", "--learning-rate", "0", "--device", SETTINGS["device"]]
    for name, more in {"longer": [], "more": [str(story_file)]}.items():
        assert main([*argv, *more, "--out", str(tmp_path / name)]) == 0
        longer = onward.load(tmp_path / name)
        assert longer.tokenizer.inner.to_str() == base.tokenizer.inner.to_str()
        for one, other in zip(longer.model.parameters(), onward.load(base.folder).model.parameters()):
            assert torch.equal(one, other), "it begins from the weights, and learns nothing at a rate of 0"
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
    """Examples of random tokens, most of which are trained; `lengths` are those of the sequences."""
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
    """The model with the head that a method trains, if it does, of random weights."""
    if labels := Method.kinds[method].labels or ("no", "yes") * (method == "classify"):
        add_head(model, labels)
        torch.nn.init.normal_(head_of(model).weight)
    return model


def gradient(model: Decoder, method: Method, batches: Sequence[Batch]) -> dict[str, torch.Tensor]:
    """The gradient of the mean loss over the batches, as the trainer takes it."""
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


ALONE = [  # no other model, no samples
    name for name, one in Method.choices().items() if name != "distill" and not issubclass(one, PolicyMethod)
]


@pytest.mark.parametrize("name", [name for name in ALONE if name != "kto"])  # whose divergence is that of a batch
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


TALK = {"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}
PROMPT, PAIR = {"prompt": "2 + 3?", "answer": "5"}, {"prompt": "2?", "chosen": "3", "rejected": "4"}
LONG = {"text": "what is the sum of these numbers? " * 60}
JUDGED = {"prompt": "2?", "completion": "3", "label": 1}
KIND = {"text": "2", "label": "a"}
MISTAKES: dict[str, tuple[Any, str, str]] = {  # a record or several, further options, and the sentence
    "no template": ({"messages": TALK}, "", "no chat template for messages: name one, such as --template chatml"),
    "a turn that never ends": (
        {"messages": TALK},
        "--template open.jinja",
        "never closes the assistant's turn with a control token",
    ),
    "roles out of order": ({"messages": TALK[::-1]}, "--template plain", "message 1 is of role 'assistant' after"),
    "equal answers": ({**PAIR, "rejected": "3"}, "--method dpo", "chosen and rejected are equal"),
    "too long": (LONG, "", "1 of 1 examples are longer than 96 tokens, data.jsonl line 1 with"),
    "no such target": (PROMPT, "--lora lora(rank=2,targets=('attn.qq',))", "did you mean attn.q?"),
    "no such beginning": (
        PROMPT,
        "--lora lora(init=pisa)",
        "lora.init is 'pisa', which is no known kind of Initialization: did you mean pissa?",
    ),
    "weights that move backwards": (PROMPT, "--weights ramp(begin=0.9,end=0.1)", "begin is 0.9 and end is 0.1: give"),
    "a quantized base": ({"text": "2 + 3 is 5"}, "", "quantized weights, which are not trained: train adapters"),
    "a reward that raises": (PROMPT, "--method grpo --reward mine.py:raises", "ZeroDivisionError"),
    "a reward of NaN": (PROMPT, "--method rloo --reward mine.py:nan", "the reward nan returned nan"),
    "a reward of too few": (PROMPT, "--method ppo --reward mine.py:few", "returned 1 values for"),
    "no reward": (PROMPT, "--method ppo", "reward is missing, which ppo needs"),
    "a model without rewards": (PROMPT, "--method ppo --reward {base}", "a model without rewards"),
    "another vocabulary": ({"text": "2"}, "--method distill --teacher other", "another vocabulary"),
    "no texts or messages": ({"prompt": 2, "completion": None}, "", "prompt and answer are int and NoneType: give"),
    "an adapter": ({"text": "2"}, "--method distill --teacher adapter", "adapter holds an adapter: onward merge"),
    "no schema": (
        PROMPT,
        "--method grpo --reward json_schema(file='schema.json')",
        "there is no file schema.json: give",
    ),
    "a reward for sft": (
        PROMPT,
        "--reward exact",
        "--reward is not an option of sft, but of cispo, grpo, gspo, ppo, rloo, sapo: leave",
    ),
    "adapters without lora": (
        PROMPT,
        "--quantize int8",
        "--quantize is 'int8' without adapters to train: give lora, or leave it out",
    ),
    "beta 0": (PAIR, "--method ipo --beta 0", "--beta is 0.0: it must be a number from 1e-06"),
    "an empty text": ([KIND, {"text": ""}], "", "data.jsonl line 2: the text is empty"),
    "an empty answer": ({**PAIR, "rejected": ""}, "--method dpo", "data.jsonl line 1: the answer is empty"),
    "an empty prompt": ({"prompt": ""}, "--method grpo --reward length(characters=5)", "line 1: the prompt is empty"),
    "a prompt of another type": (
        {"prompt": 5},
        "--method rloo --reward length(characters=5)",
        "line 1: prompt is 5: give a text",
    ),
    "an empty pair": ([KIND, {**KIND, "pair": ""}], "--method classify", "line 2: the text or pair is empty"),
    "one class": ([KIND] * 4, "--method classify", "all 4 examples have the same label, and classify learns"),
    "one label": ([JUDGED, {**JUDGED, "prompt": "4?"}], "--method kto", "all 2 examples have the same label, and kto"),
    "a strength as label": ([JUDGED, {**JUDGED, "label": 5}], "--method kto", "line 2: label is 5: it is 1 or true"),
    "one prompt": ([JUDGED, {**JUDGED, "label": 0}], "--method kto", "line 1: all examples have the same prompt"),
    "mixed rows": (
        [JUDGED, {**JUDGED, "prompt": "4?"}, {**JUDGED, "completion": TALK[1:]}],
        "--method kto",
        "data.jsonl line 3: prompt and answer are str and list",
    ),
    "no answer": (
        [PROMPT, {"prompt": "2?", "answer": None}],
        "--method grpo --reward exact",
        "line 2: it has no answer",
    ),
    "an answer of another type": (
        {"prompt": "2?", "answer": [5]},
        "--method ppo --reward exact",
        "answer is [5]: give",
    ),
    "not UTF-8": (
        b'{"text": "\xe9"}',
        "",
        "data.jsonl is not utf-8 at byte offset 10 (line 1): JSON is written in UTF-8",
    ),
    "show and json": ({"text": "2"}, "--show 1 --json", "prints examples and ends, and json is given: choose one"),
    "an option of onward train": ({"text": "2"}, "--config fine.toml", "encoding is given, which a run on examples"),
    "no label": ({"text": "2"}, "--method classify", "needs text and label"),
    "a field twice": (PAIR, "--method dpo(beta=1) --beta 2", "--beta is given beside the method and inside it"),
    "a sum of unlike losses": (PAIR, "--method dpo+kto", "--method has the term kto, which is no loss of pairs"),
    "a sum without pairs": (PAIR, "--method sft+2*sft", "no term that compares answers, such as dpo: add one"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_sentence_and_leave_nothing(
    case: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record, options, sentence = MISTAKES[case]
    monkeypatch.chdir(tmp_path)
    if isinstance(record, bytes):
        Path("data.jsonl").write_bytes(record)
    else:
        rows = record if isinstance(record, list) else [record] if case == "too long" else [record] * 4
        write_rows(Path("data.jsonl"), rows)
    Path("fine.toml").write_text('encoding = "latin-1"')
    Path("open.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    Path("mine.py").write_text(
        "def raises(p, c, a): return [1 / 0]\ndef few(p, c, a): return [1.0]\n"
        "def nan(p, c, a): return [float('nan')] * len(c)\n"
    )
    if case == "another vocabulary":
        onward.train_tokenizer("byte", []).save(Path("other"))
    if case == "an adapter":
        onward.load(base).tokenizer.save(Path("adapter"))  # type: ignore[union-attr]
        Path("adapter/adapter_config.json").write_text("{}")
    if case == "a quantized base":
        base = base_model(tmp_path / "plain", d_model=32, d_ff=64)
        onward.save(onward.load(base, quantize="int8"), base := tmp_path / "int8")
    words = f"--steps 1 --validation none --precision fp32 --device cpu {options}"
    if case != "a reward for sft" and "--reward" in options:
        words += " --samples 4 --completion-length 2"
    argv = ["finetune", str(base), "data.jsonl", "--out", "run", *words.format(base=base).split()]
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert sentence in said.replace("\n", " ")
    assert "Traceback" not in said
    assert not Path("run/result.json").exists()
    assert "reward" in case or not Path("run").exists()
