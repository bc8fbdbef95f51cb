"""Reward and classification heads: their losses, saves, and use as a reward."""

import json
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import onward
from onward import Decoder, FinetuneConfig, Run, UserError
from onward.cli import main
from onward.data import Encoder, Record
from onward.data.forms import classified, preferred
from onward.data.packing import batch_of
from onward.data.tables import tabulated
from onward.evaluation.heads import evaluate_head, examples_of
from onward.evaluation.outputs import calibration_bins, calibration_error, outputs
from onward.reports import RunRecord
from onward.training import reward_loss
from onward.training.losses.scoring import ClassLoss, RewardLoss
from onward.training.rewards.model import Model
from onward.training.run.result import evaluate_run
from onward.transforms import add_head
from onward.transforms.heads import head_labels, head_of

from support.decoders import DECODERS, assert_close, decoder
from support.finetuning import base_model, config, tokenizer, write_rows
from support.finetuning import method as method_of
from support.runs import assert_same_run, metrics

PAIRS: list[dict[str, Any]] = [
    {"prompt": f"{i} + 3?", "chosen": "It is eleven.", "rejected": "0" * (i % 4 + 1)} for i in range(16)
]
TEXTS = "Brief!", "It is eleven."
CLASSES = [{"text": f"{i}?", "pair": TEXTS[i % 2], "label": ["no", "yes"][i % 2]} for i in range(16)]
DATA: dict[str, list[dict[str, Any]]] = {"reward": PAIRS, "classify": CLASSES}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_model(tmp_path_factory.mktemp("base"), dropout=0.0)


@pytest.fixture(scope="module")
def runs(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    """A run of each method, both with all weights and with adapters of rank 2."""
    folder, found = tmp_path_factory.mktemp("runs"), {}
    for method in DATA:
        for rank in 0, 2:
            run = Run.start(options(method, base, folder, f"{method}-{rank}", lora=rank or None))
            list(run.train())
            found[method, rank] = run.folder
    return found


def options(method: str, base: Path, folder: Path, name: str, **changes: Any) -> FinetuneConfig:
    data = write_rows(folder / f"{method}.jsonl", DATA[method])
    settings = {"template": "", "validation": "0.2", "method": method, "steps": 8, "validate_every": 4}
    return config(base, data, folder / name, **settings | changes)


def example_batch(method: str) -> Any:
    """Four examples in two rows."""
    table, _ = tabulated(
        method_of(method).examples(Encoder(tokenizer()), [Record(r, "") for r in DATA[method]]), 96, "error"
    )
    return batch_of(table, [[0, 1], [2, 3]], by_example=True)


def with_head(method: str) -> Decoder:
    model = decoder(replace(DECODERS["llama"], vocab_size=tokenizer().vocab_size, context_length=96))
    add_head(model, ["reward"] if method == "reward" else ["no", "yes"])
    torch.manual_seed(0)
    torch.nn.init.normal_(head_of(model).weight)
    return model


@pytest.mark.parametrize("margin", [0.0, 1.5])
def test_reward_loss_is_its_formula_in_fp64(margin: float) -> None:
    chosen, rejected = torch.tensor([[-30.0, 0.0, 2.0], [1.0, 0.0, -40.0]], dtype=torch.float64)
    gap, total = (chosen - rejected).numpy() - margin, (chosen + rejected).numpy()
    wanted = np.logaddexp(0, -gap) + 0.01 * total**2
    np.testing.assert_allclose(reward_loss(chosen, rejected, margin, 0.01).numpy(), wanted, rtol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("margin", [False, True])
def test_reward_loss_and_gradient_equal_those_of_trl(margin: bool) -> None:
    reward_trainer = pytest.importorskip("trl.trainer.reward_trainer", reason="needs TRL: pip install trl")
    rewards = torch.randn(8, 1, generator=torch.Generator().manual_seed(0)).requires_grad_()
    same = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x)
    metrics = defaultdict[str, Any](lambda: defaultdict(list))
    fake = SimpleNamespace(model=SimpleNamespace(training=False), accelerator=same, _metrics=metrics)
    fake._total_train_tokens, fake.args = 0, SimpleNamespace(center_rewards_coefficient=0.01)
    margins = torch.tensor([0.5, 0.0, 2.0, 1.0])
    inputs = {"input_ids": torch.zeros(8, 1)} | ({"margin": margins} if margin else {})
    policy = lambda **_: SimpleNamespace(logits=rewards)
    theirs = reward_trainer.RewardTrainer.compute_loss(fake, policy, inputs)
    chosen, rejected = rewards[:, 0].chunk(2)
    ours = reward_loss(chosen, rejected, margins if margin else 0.0, 0.01).mean()
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)
    both = [torch.autograd.grad(loss, rewards, retain_graph=True)[0] for loss in (ours, theirs)]
    assert_close(both[0], both[1], 1e-6)


@pytest.mark.parametrize("method", DATA)
def test_outputs_of_packed_examples_are_those_after_their_last_tokens(method: str) -> None:
    model, batch = with_head(method), example_batch(method)
    form = preferred if method == "reward" else classified
    several = form(Encoder(tokenizer()), [Record(row, "") for row in DATA[method][:4]])
    sequences = [sequence.tokens for example in several for sequence in example.sequences]
    alone = outputs(model, sequences)
    assert_close(head_of(model)(model.hidden(batch.tokens, batch.positions).flatten(0, 1)[batch.lasts]), alone, 1e-5)
    loss, _, figures = (RewardLoss() if method == "reward" else ClassLoss())(model, batch)  # type: ignore[misc]
    labels = torch.tensor([0, 1, 0, 1])
    if method == "reward":
        wanted, right = -(alone[::2] - alone[1::2]).sigmoid().log().sum(), (alone[::2] > alone[1::2]).sum()
    else:
        wanted, right = (
            torch.nn.functional.cross_entropy(alone, labels, reduction="sum"),
            (alone.argmax(1) == labels).sum(),
        )
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert figures["accuracy"] == right


def test_classifier_adds_the_mean_loss_of_the_text() -> None:
    model, batch = with_head("classify"), example_batch("classify")
    plain, _, _ = ClassLoss()(model, batch)  # type: ignore[misc]
    loss, _, figures = ClassLoss(0.5)(model, batch)  # type: ignore[misc]
    logprobs = model(batch.tokens, batch.positions).log_softmax(-1)
    of_texts = 0.0
    for number in range(4):
        where = (batch.sequences == number) & (batch.targets >= 0)
        of_texts -= logprobs[where].gather(1, batch.targets[where][:, None]).mean().item()
    assert figures["text_loss"].item() == pytest.approx(of_texts, rel=1e-5)
    assert loss.item() == pytest.approx(plain.item() + 0.5 * of_texts, rel=1e-5)


def test_calibration_error_is_the_distance_of_confidence_and_accuracy() -> None:
    confidence, right = torch.tensor([0.95, 0.97, 0.55, 1.0]), torch.tensor([1.0, 0.0, 1.0, 1.0])
    means = {name: value.item() / 4 for name, value in calibration_bins(confidence, right).items()}
    found = calibration_error({"accuracy": 0.75, **means})
    assert found.keys() == {"accuracy", "calibration_error"}
    assert found["calibration_error"] == pytest.approx((abs(0.95 + 0.97 + 1.0 - 2) + abs(0.55 - 1)) / 4)


@pytest.mark.parametrize("method", DATA)
@pytest.mark.parametrize("rank", [0, 2])
def test_a_run_learns_its_head_and_saves_it(method: str, rank: int, runs: dict[tuple[str, int], Path]) -> None:
    folder = runs[method, rank]
    validations = [row for row in metrics(folder) if "validation_loss" in row]
    assert validations[-1]["accuracy"] == 1
    assert 0 <= validations[-1]["calibration_error"] <= 1
    lm = onward.load(folder)
    assert head_labels(lm.model) == (("reward",) if method == "reward" else ("no", "yes"))
    assert head_of(lm.model).weight.any()
    if method == "reward":
        right, wrong = lm.rewards("5 + 3?", ["It is eleven.", "00"])
        assert right > wrong
    else:
        (one, other) = lm.classify([("7?", TEXTS[1]), ("6?", TEXTS[0])])
        assert one["yes"] > 0.5 > other["yes"]
        assert sum(one.values()) == pytest.approx(1)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_run_with_a_head_resumes_exactly(
    rank: int, base: Path, runs: dict[tuple[str, int], Path], tmp_path: Path
) -> None:
    run = Run.start(options("classify", base, tmp_path, f"classify-{rank}", lora=rank or None))
    for _ in run.train(stop=lambda: run.step == 3):
        pass
    list(Run.resume(run.folder).train())
    one, other = (onward.load(folder).model.state_dict() for folder in (run.folder, runs["classify", rank]))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    if not rank:
        assert_same_run(run.folder, runs["classify", rank])


@pytest.mark.parametrize(
    ("method", "sentence"), [("reward", "--method grpo --reward {run}"), ("classify", 'onward.load("{run}").classify(')]
)
def test_the_command_shows_the_accuracy_of_a_head_and_how_to_use_it(
    method: str, sentence: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run = write_rows(tmp_path / "data.jsonl", DATA[method]), tmp_path / "run"
    words = ["--method", method, "--steps", "2", "--device", "cpu", "--validate-every", "1", "--out", str(run)]
    assert main(["finetune", str(base), str(data), *words]) == 0
    said = capsys.readouterr().err
    assert sentence.format(run=run) in said
    assert re.search(r"step 1 of 2 \| loss [0-9.]+ \| accuracy [0-9.]+ \| validation loss", said)
    assert "no gradient" not in said


def test_a_head_goes_with_its_model(base: Path, runs: dict[tuple[str, int], Path], tmp_path: Path) -> None:
    onward.merge(runs["reward", 2], tmp_path / "merged")
    answers = ["It is eleven.", "00"]
    assert onward.load(tmp_path / "merged").rewards("1 + 1?", answers) == pytest.approx(
        onward.load(runs["reward", 2]).rewards("1 + 1?", answers), abs=1e-5
    )
    run = Run.start(options("classify", runs["reward", 0], tmp_path, "run", steps=1, validate_every=1))
    assert head_labels(run.model) == ("no", "yes"), "another task has another head"
    with pytest.raises(UserError, match="no head for rewards or classes"):
        onward.load(base).classify(["a"])
    with pytest.raises(UserError, match=r"llama\.cpp"):
        onward.save(onward.load(runs["reward", 0]), tmp_path / "reward.gguf")


def test_a_reward_model_loads_in_transformers_with_the_same_rewards(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    names = tokenizer()
    model = Decoder(onward.DecoderConfig(names.vocab_size, d_model=16, n_layers=1, n_heads=2, context_length=32))
    add_head(model, ["reward"])
    torch.nn.init.normal_(head_of(model).weight)
    onward.save(onward.LanguageModel(model.eval(), names), tmp_path)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    tokens = names.encode("0123 + 4?")
    assert_close(theirs(torch.tensor([tokens])).logits.detach(), outputs(model, [tokens]), 1e-5)


def test_a_reward_model_rewards_completions(base: Path, runs: dict[tuple[str, int], Path], tmp_path: Path) -> None:
    data = write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"{i}?"} for i in range(8)])
    settings = {"method": "grpo", "samples": 2, "completion_length": 3, "steps": 1, "template": "", "validate_every": 1}
    for rank in 0, 2:
        run = Run.start(config(base, data, tmp_path / f"run{rank}", reward=str(runs["reward", rank]), **settings))
        list(run.train())
        sample = run.trainer.loss.samples[0]  # type: ignore[attr-defined]
        assert np.isfinite(sample["reward"])
    with pytest.raises(UserError, match="has no reward head: train a reward model"):
        Run.start(config(base, data, tmp_path / "bad", reward=str(base), **settings))
    with pytest.raises(UserError, match="the vocabulary of the reward model"):
        Model(str(runs["reward", 0])).open(onward.train_tokenizer("byte", []))
    assert not (tmp_path / "bad").exists()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no label": ({"text": "a"}, "needs text and label"),
    "a list as label": ({"text": "a", "label": [1]}, "needs text and label"),
    "a number as pair": ({"text": "a", "pair": 3, "label": 1}, "needs text and label"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_classes_are_one_sentence_with_their_place(case: str) -> None:
    values, sentence = BAD[case]
    with pytest.raises(UserError, match=f"^c.jsonl line 3: .*{sentence}"):
        list(classified(Encoder(tokenizer()), [Record(values, "c.jsonl line 3")]))


def test_a_margin_that_a_pair_lacks_is_0() -> None:
    rows: list[dict[str, Any]] = [PAIRS[i] | ({"margin": i} if i % 2 else {}) for i in range(5)]
    table, _ = tabulated(preferred(Encoder(tokenizer()), [Record(row, "") for row in rows]), 96, "error")
    assert table.numbers["margin"].tolist() == [0, 1, 0, 3, 0]


def test_classes_are_those_of_the_first_table() -> None:
    encoder = Encoder(tokenizer())
    rows = [Record({"text": "a", "label": label}, "") for label in (10, 9, 10)]
    assert [e.numbers["label"] for e in classified(encoder, rows)] == [1, 0, 1]
    assert encoder.labels == ("9", "10")
    mixed = Encoder(tokenizer())
    list(classified(mixed, [Record({"text": "a", "label": label}, "") for label in (1, "1", 2)]))
    assert sorted(mixed.labels) == ["1", "2"], "a number and its text are one class"
    with pytest.raises(UserError, match="v line 1: label is 8: choose from"):
        list(classified(encoder, [Record({"text": "a", "label": 8}, "v line 1")]))


def evaluated(*words: object, capsys: pytest.CaptureFixture[str]) -> Any:
    """The output of `onward evaluate --json`."""
    assert main(["evaluate", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("rank", [0, 2])
def test_evaluate_prints_the_accuracy_and_the_confusion_of_a_classifier(
    rank: int, runs: dict[tuple[str, int], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, rows = runs["classify", rank], [*CLASSES, {"text": "9?", "pair": TEXTS[0], "label": "yes"}]
    found = evaluated(run, write_rows(tmp_path / "kinds.jsonl", rows), capsys=capsys)
    likeliest = [
        max(row, key=row.__getitem__) for row in onward.load(run).classify([(r["text"], r["pair"]) for r in rows])
    ]
    pairs = [(row["label"], taken) for row, taken in zip(rows, likeliest)]
    assert found["confusion"] == {a: {b: pairs.count((a, b)) for b in ("no", "yes")} for a in ("no", "yes")}
    assert found["accuracy"] == pytest.approx(sum(a == b for a, b in pairs) / len(rows))
    assert found["examples"] == len(rows) == 17
    assert "perplexity" not in found
    assert main(["evaluate", str(run), str(tmp_path / "kinds.jsonl")]) == 0
    out = capsys.readouterr().out
    assert "(label)  no  yes" in out
    assert "perplexity" not in out


@pytest.mark.parametrize("rank", [0, 2])
def test_evaluate_prints_the_accuracy_and_the_margin_of_a_reward_model(
    rank: int, runs: dict[tuple[str, int], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs["reward", rank]
    found, lm = evaluated(run, write_rows(tmp_path / "pairs.jsonl", PAIRS), capsys=capsys), onward.load(run)
    rewards = np.array([lm.rewards(row["prompt"], [row["chosen"], row["rejected"]]) for row in PAIRS])
    assert found["margin"] == pytest.approx((rewards[:, 0] - rewards[:, 1]).mean(), rel=1e-4)
    assert found["accuracy"] == (rewards[:, 0] > rewards[:, 1]).mean()
    assert found["chosen_reward"] == pytest.approx(rewards[:, 0].mean(), rel=1e-4)
    assert found["pairs"] == 16
    assert "perplexity" not in found


@pytest.mark.parametrize("method", DATA)
def test_evaluating_a_run_with_a_head_repeats_its_last_figures(
    method: str, runs: dict[tuple[str, int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs[method, 0]
    result = evaluate_run(Run.resume(run))
    assert evaluated(run, capsys=capsys)["accuracy"] == pytest.approx(result["accuracy"])
    assert RunRecord(run).figures().perplexity is None
    assert {*evaluated(run, "--quantize", "int8", capsys=capsys)["plain"]} >= {"accuracy"}


def test_equal_rewards_count_as_half() -> None:
    model, rows = decoder(replace(DECODERS["llama"], vocab_size=tokenizer().vocab_size, context_length=96)), PAIRS
    add_head(model, ["reward"])
    found = evaluate_head(model, examples_of(model, tokenizer(), [Record(row, "") for row in rows]))
    assert (found.accuracy, found.margin) == (0.5, 0.0)  # type: ignore[union-attr]  # of pairs


NO_EXAMPLES = {
    ("classify", '{"text": "x", "label": "maybe"}'): "rows.jsonl line 1: label is 'maybe': did you mean yes?",
    ("classify", '{"text": "x"}'): "rows.jsonl line 1: it needs text and label",
    ("classify", f'{{"text": "{"y" * 900}", "label": "no"}}'): "more than the context of 96: shorten it",
    (
        "reward",
        '{"prompt": "x", "chosen": "a"}',
    ): "rows.jsonl line 1: it needs chosen and rejected, with a prompt, but has 'prompt', 'chosen'",
    ("reward", ""): "rows.jsonl",
}


@pytest.mark.parametrize(("method", "row"), NO_EXAMPLES)
def test_rows_that_a_head_cannot_be_evaluated_on_are_one_sentence(
    method: str, row: str, runs: dict[tuple[str, int], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path := tmp_path / "rows.jsonl").write_text(row)
    assert main(["evaluate", str(runs[method, 0]), str(path)]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert NO_EXAMPLES[method, row] in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("words", ["--stride 4", "rows.txt --field x", "rows.txt --encoding ascii"])
def test_options_of_texts_are_refused_for_a_head(
    words: str, runs: dict[tuple[str, int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(runs["reward", 0]), *words.split()]) == 2
    assert "applies to texts, but" in capsys.readouterr().err
