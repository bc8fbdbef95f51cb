"""Losses of preferences: equal to their formulas in fp64, and to TRL's functions where TRL is installed."""

import importlib
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import onward
from onward import fields
from onward.config.lora import LoRA
from onward.data.examples import Encoder, tabulated
from onward.data.forms import judged, preferred
from onward.data.packing import ExampleBatch, batch_of
from onward.data.records import Record
from onward.errors import UserError
from onward.model.decoder import Decoder
from onward.text.templates import with_template
from onward.training.losses.answers import Answers, sequence_logprobs
from onward.training.methods import Method
from onward.training.methods.pairs import PairMethod
from onward.training.run.run import Run
from onward.training.step.trainer import Step
from onward.transforms.lora import add_lora

from support.finetuning import base_in, base_model, config, pairs, sums, tokenizer, write_rows
from support.finetuning import method as method_of
from support.grids import first
from support.runs import assert_same_run

PAIRS = [name for name, one in Method.choices().items() if issubclass(one, PairMethod)]
REFERENCED = [name for name, one in Method.choices().items() if "reference" in fields.hints(one)]
COMPARED = sorted(REFERENCED, key="kto".__ne__)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_model(tmp_path_factory.mktemp("base"), dropout=0.3)


@pytest.fixture
def batch() -> ExampleBatch:
    return example_batch("dpo")


def example_batch(method: str) -> ExampleBatch:
    """Pairs or judged answers, two in each row."""
    records = [Record(row, f"line {i}") for i, row in enumerate(pairs(4))]
    table, _ = tabulated(method_of(method).examples(Encoder(tokenizer()), records), 96, "error")
    return batch_of(table, [[i, i + 1] for i in range(0, len(table), 2)], by_example=True)


def changed(base: Path, amount: float = 0.1) -> Decoder:
    """The base after some training."""
    model = onward.load(base).model
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * amount)
    return model.train()


log_s = lambda x: -np.log1p(np.exp(-x))
sigmoid = lambda x: 1 / (1 + np.exp(-x))
log_odds = lambda x: x - np.log(1 - np.exp(x))
# in fp64, with beta 0.3, of the log-ratios c and r of the chosen and the rejected answer, of their mean
# log-probabilities a and b, and of their numbers of tokens n and k
FORMULAS: dict[str, Callable[..., Any]] = {
    "dpo": lambda c, r, a, b, n, k: -log_s(0.3 * (c - r)),
    "dpo(label_smoothing=0.2)": lambda c, r, a, b, n, k: -log_s(0.3 * (c - r)) * 0.8 - log_s(0.3 * (r - c)) * 0.2,
    "dpo(normalized=true)": lambda c, r, a, b, n, k: -log_s(0.3 * (c / n - r / k)),
    "robust(label_smoothing=0.2)": lambda c, r, a, b, n, k: (
        (-log_s(0.3 * (c - r)) * 0.8 + log_s(0.3 * (r - c)) * 0.2) / 0.6
    ),
    "hinge": lambda c, r, a, b, n, k: np.maximum(0, 1 - 0.3 * (c - r)),
    "ipo": lambda c, r, a, b, n, k: (c / n - r / k - 1 / 0.6) ** 2,
    "exo(label_smoothing=0.1)": lambda c, r, a, b, n, k: (
        sigmoid(0.3 * (c - r)) * np.log(sigmoid(0.3 * (c - r)) / 0.9)
        + sigmoid(0.3 * (r - c)) * np.log(sigmoid(0.3 * (r - c)) / 0.1)
    ),
    "nca": lambda c, r, a, b, n, k: -log_s(0.3 * c) - (log_s(-0.3 * c) + log_s(-0.3 * r)) / 2,
    "bco": lambda c, r, a, b, n, k: -log_s(0.3 * c) - log_s(-0.3 * r),
    "sppo": lambda c, r, a, b, n, k: (c - 1 / 0.6) ** 2 + (r + 1 / 0.6) ** 2,
    "apo": lambda c, r, a, b, n, k: 1 - sigmoid(0.3 * c) + sigmoid(0.3 * r),
    "apo(variant=down)": lambda c, r, a, b, n, k: sigmoid(0.3 * c) + 1 - sigmoid(0.3 * (c - r)),
    "discopop(tau=0.5)": lambda c, r, a, b, n, k: (
        -log_s(0.3 * (c - r)) * (1 - sigmoid(0.6 * (c - r))) + np.exp(-0.3 * (c - r)) * sigmoid(0.6 * (c - r))
    ),
    "simpo(gamma=0.7, label_smoothing=0.2)": lambda c, r, a, b, n, k: (
        -log_s(0.3 * (a - b) - 0.7) * 0.8 - log_s(-0.3 * (a - b) + 0.7) * 0.2
    ),
    "cpo(label_smoothing=0.2)": lambda c, r, a, b, n, k: (
        -log_s(0.3 * (a * n - b * k)) * 0.8 - log_s(0.3 * (b * k - a * n)) * 0.2
    ),
    "orpo": lambda c, r, a, b, n, k: -a - 0.3 * log_s(log_odds(a) - log_odds(b)),
    "dpo + 0.2 * sft": lambda c, r, a, b, n, k: -log_s(0.3 * (c - r)) - 0.2 * a,
    "ipo - 0.5 * simpo(gamma=0)": lambda c, r, a, b, n, k: (c / n - r / k - 1 / 0.6) ** 2 + 0.5 * log_s(0.3 * (a - b)),
}


def of(notation: str, **changes: Any) -> Any:
    """A method from its notation, in which every loss of pairs has beta 0.3."""
    made: Any = fields.part(Method, notation, "method")
    terms = tuple((weight, with_beta(one)) for weight, one in getattr(made, "terms", ()))
    return replace(made, terms=terms) if terms else replace(with_beta(made), **changes)


def with_beta(method: Any) -> Any:
    return replace(method, beta=0.3) if hasattr(method, "beta") else method


def test_every_loss_of_pairs_has_a_formula() -> None:
    assert {fields.parse(name, "")["kind"] for name in FORMULAS} - {"sum"} == {*PAIRS}


@pytest.mark.parametrize("name", FORMULAS)
def test_loss_is_its_formula_in_fp64(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    draw = lambda most: -torch.rand(40, dtype=torch.float64, generator=generator) * most
    chosen, rejected, theirs, others = draw(30), draw(30), draw(30), draw(30)
    counts = [torch.randint(1, 9, (40,), generator=generator) for _ in range(2)]
    got = of(name).of_pairs(Answers(chosen, theirs, counts[0]), Answers(rejected, others, counts[1]))
    c, r, n, o = (x.numpy() for x in (chosen - theirs, rejected - others, *counts))
    wanted = FORMULAS[name](c, r, chosen.numpy() / n, rejected.numpy() / o, n, o)
    np.testing.assert_allclose(got.numpy(), wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", FORMULAS)
def test_loss_and_gradient_stay_finite_far_from_0(name: str) -> None:
    far = torch.tensor([0.0, 1e-3, 30.0, 80.0])
    for sign in -1, 1:
        logprobs = (-100 - sign * far).requires_grad_()
        chosen, rejected = Answers(logprobs, torch.full((4,), -100.0), far + 1), Answers(far - 200, far - 100, far + 1)
        loss = of(name).of_pairs(chosen, rejected)
        (grad,) = torch.autograd.grad(loss.sum(), logprobs)
        assert loss.isfinite().all()
        assert grad.isfinite().all()


def test_tail_weighs_the_tokens_beyond_the_shorter_answer(base: Path, batch: ExampleBatch) -> None:
    model = onward.load(base).model
    whole, half = (sequence_logprobs(model, batch, tail) for tail in (1.0, 0.25))
    single = [sequence_logprobs(model, cut_after(batch, count)) for count in range(1, 40)]
    for pair in range(batch.num_sequences // 2):
        shorter = int(whole.count[2 * pair : 2 * pair + 2].min())
        for number in 2 * pair, 2 * pair + 1:
            shared = single[shorter - 1].total[number]
            wanted = shared + 0.25 * (whole.total[number] - shared)
            assert half.total[number].item() == pytest.approx(wanted.item(), abs=1e-4)
    assert torch.equal(whole.count, half.count)


def cut_after(batch: ExampleBatch, count: int) -> ExampleBatch:
    """The batch, of whose sequences only the first `count` targets are trained."""
    targets = batch.targets.clone()
    for number in range(batch.num_sequences):
        rows, columns = ((batch.sequences == number) & (targets >= 0)).nonzero(as_tuple=True)
        targets[rows[count:], columns[count:]] = -100
    return replace(batch, targets=targets)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("adapter", [False, True])
def test_dpo_begins_at_ln_2(adapter: bool, precision: str, base: Path, batch: ExampleBatch) -> None:
    model = onward.load(base).model.train()
    if adapter:
        add_lora(model, LoRA(rank=2))
    loss = method_of("dpo").loss(base_in(base))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        value, _, figures = loss(model, batch)  # type: ignore[misc]
    assert value.item() / 4 == pytest.approx(np.log(2), abs=1e-6)
    assert {name: figure.item() for name, figure in figures.items()} == {
        "accuracy": 2.0,
        "margin": 0.0,
        "chosen_reward": 0.0,
        "rejected_reward": 0.0,
    }


@pytest.mark.parametrize("name", first(1, COMPARED))
def test_kept_reference_gives_the_loss_of_the_online_one(name: str, base: Path, tmp_path: Path) -> None:
    data, losses = write_rows(tmp_path / "pairs.jsonl", pairs()), []
    for reference in "online", "kept":
        options = {"method": name, "reference": reference, "template": "", "batch_size": 2, "validation": "none"}
        run = Run.start(config(base, data, tmp_path / reference, **options))
        losses.append([event.loss for event in run.train() if isinstance(event, Step)])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert losses[0][0] != losses[0][-1]


def test_a_run_that_is_resumed_compares_with_the_same_base(tmp_path: Path) -> None:
    base, data = base_model(tmp_path / "base"), write_rows(tmp_path / "pairs.jsonl", pairs(20))
    run = Run.start(config(base, data, tmp_path / "run", method="dpo"))
    first, *_ = run.train(stop=lambda: run.step == 1)
    assert isinstance(first, Step)
    assert first.figures["accuracy"] == 0.5
    with torch.no_grad():
        lm = onward.load(base)
        lm.model.embed.weight.add_(1)
    onward.save(lm, base)
    with pytest.raises(UserError, match=r"base is not the model that .*run was started from .*dpo compares with it"):
        Run.resume(tmp_path / "run")


def test_sequence_logprobs_are_the_sums_of_those_of_tokens(base: Path, batch: ExampleBatch) -> None:
    model = onward.load(base).model
    found = sequence_logprobs(model, batch)
    for number in range(batch.num_sequences):
        here = batch.sequences == number
        where = here & (batch.tokens > 0) | here & (batch.positions > 0)
        tokens, targets = batch.tokens[where][None], batch.targets[where]
        logprobs = model(tokens)[0].log_softmax(-1)
        kept = [logprobs[i, t].item() for i, t in enumerate(targets.tolist()) if t >= 0]
        assert found.total[number].item() == pytest.approx(sum(kept), abs=1e-4)
        assert int(found.count[number]) == len(kept)


BAD = {
    "equal answers": ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are equal"),
    "no rejected": ({"prompt": "a", "chosen": "b"}, "needs chosen and rejected"),
    "a margin of text": (
        {"chosen": "b", "rejected": "c", "margin": "big"},
        "margin is 'big': it must be a finite number",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_pairs_are_one_sentence_with_their_place(case: str) -> None:
    values, sentence = BAD[case]
    with pytest.raises(UserError, match=f"^p.jsonl line 3: .*{sentence}"):
        list(preferred(Encoder(tokenizer()), [Record(values, "p.jsonl line 3")]))


def test_what_two_conversations_share_is_their_prompt() -> None:
    template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    names = onward.Tokenizer(tokenizer().inner, templates={"default": template})
    talk = sums(2)[1]["messages"]
    other = [talk[0], {"role": "assistant", "content": "Eleven."}]
    for values in {"chosen": talk, "rejected": other}, {"prompt": talk[:1], "chosen": talk[1:], "rejected": other[1:]}:
        (example,) = preferred(Encoder(names), [Record(values, "")])
        texts = [names.decode([t for t, own in zip(s.tokens, s.trained) if own]) for s in example.sequences]
        assert texts == [talk[1]["content"], "Eleven."]


def test_judged_answers_come_with_an_answer_to_another_prompt() -> None:
    rows = [{"prompt": f"{i} ", "completion": f"{i}{i}", "label": i % 2 == 0} for i in range(3)]
    found = list(judged(Encoder(tokenizer()), [Record(row, "") for row in rows]))
    assert [tokenizer().decode(e.sequences[1].tokens) for e in found] == ["0 22", "1 00", "2 11"]
    assert [e.numbers["label"] for e in found] == [1, 0, 1]


def test_partners_of_pairs_and_mixed_rows_answer_another_prompt_of_the_same_kind() -> None:
    names = with_template(tokenizer(), "plain")
    say = lambda role, text: [{"role": role, "content": text}]
    rows: list[dict[str, Any]] = [{"prompt": f"{i}?", "chosen": f"is {i}", "rejected": f"is {i}{i}"} for i in range(3)]
    rows += [{"prompt": "0?", "completion": f"It is {i}", "label": i} for i in range(2)]
    rows[2:2] = [
        {"prompt": say("user", f"{i}?"), "completion": say("assistant", f"Be {i}"), "label": i} for i in range(2)
    ]
    rows += [
        {"chosen": say("user", "7?") + say("assistant", f"{i}"), "rejected": say("user", "7?") + say("assistant", "!")}
        for i in range(2)
    ]
    found = list(judged(Encoder(names), [Record(row, f"line {i}") for i, row in enumerate(rows)]))
    texts = [[names.decode(s.tokens) for s in one.sequences] for one in found]
    assert len(found) == 3 * 2 + 2 + 2 + 2 * 2
    answers = defaultdict(set)
    for own, _ in texts:
        answers[own.split("?")[0]].add(own.split("?")[1])
    for own, partner in texts:
        prompt, answer = partner.split("?")
        assert prompt == own.split("?")[0]
        assert ("User" in own) == ("Assistant" in answer), "of the same kind"
        assert answer not in answers[prompt]
        assert any(answer in several for several in answers.values())


@pytest.mark.parametrize("label", [5, -1, 0.5, "1"])
def test_a_label_is_1_or_0(label: Any) -> None:
    row = {"prompt": "2?", "completion": "3", "label": label}
    with pytest.raises(UserError, match=r"p.jsonl line 3: label is .*: it is 1 or true for a wanted answer"):
        list(judged(Encoder(tokenizer()), [Record(row, "p.jsonl line 3")]))


class Stub:
    """What TRL asks of a model, from ours: log-probabilities of the tokens whose labels are not -100."""

    def __init__(self, model: Decoder) -> None:
        self.model = model

    def __call__(self, input_ids: Tensor, labels: Tensor, **_: Any) -> SimpleNamespace:
        logprobs = self.model(input_ids)[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0]
        kept = logprobs * (labels[:, 1:] != -100)
        unused = torch.zeros_like(kept)
        return SimpleNamespace(log_probs=kept, entropy=unused, mean_logits=unused, is_top1=unused.bool(), aux_loss=None)


def padded(batch: ExampleBatch, which: slice) -> dict[str, Tensor]:
    """The sequences of a batch as TRL collates them: one in a row, padded on the right."""
    rows = []
    for number in range(batch.num_sequences)[which]:
        here = batch.sequences == number
        where = here & ((batch.tokens > 0) | (batch.positions > 0))
        rows.append((batch.tokens[where], torch.cat([torch.tensor([False]), batch.targets[where][:-1] >= 0])))
    pad = lambda several: torch.nn.utils.rnn.pad_sequence(several, batch_first=True)
    tokens, mask = pad([row[0] for row in rows]), pad([row[1].long() for row in rows])
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "completion_mask": mask}


def theirs(notation: str, model: Decoder, reference: Decoder, batch: ExampleBatch, beta: float) -> Tensor:
    """TRL's loss."""
    (losses, smoothing, tail), name = TRL[notation], notation.partition("(")[0]
    metrics = {mode: defaultdict[str, list[float]](list) for mode in ("train", "eval")}
    gather = SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda x: x, gather=lambda x: x)
    gather.unwrap_model = lambda x: x
    common = SimpleNamespace(
        model=model, accelerator=gather, aux_loss_enabled=False, _metrics=metrics, beta=beta, label_smoothing=smoothing
    )
    own = vars(common)
    if name in ("orpo", "simpo", "cpo"):
        found = sequence_logprobs(model, batch)
        scores = found.total if name == "cpo" else found.mean
        chosen, rejected = scores[::2], scores[1::2]
        if name == "orpo":
            from trl.experimental.orpo import ORPOTrainer

            return (-chosen - ORPOTrainer.odds_ratio_loss(common, chosen, rejected)[0]).mean()
        from trl.experimental.cpo import CPOTrainer

        own |= {"loss_type": {"cpo": "sigmoid"}.get(name, name), "simpo_gamma": 0.5, "alpha": 0.0}
        return CPOTrainer.cpo_loss(common, chosen, rejected)[0].mean()
    own |= {"precompute_ref_logps": False, "ref_model": Stub(reference), "args": SimpleNamespace()}
    own["args"].gradient_checkpointing_kwargs = None
    own |= {"_total_train_tokens": 0, "_tp_size": 1, "use_weighting": False}
    policy = Stub(model)
    if name == "kto":
        import trl.trainer.kto_trainer as module

        own |= {"loss_type": "kto", "calculate_KL": True, "desirable_weight": 1.0, "undesirable_weight": 1.0}
        inputs: dict[str, Any] = padded(batch, slice(0, None, 2)) | {"label": batch.numbers["label"].bool()}
        inputs |= {f"KL_{key}": value for key, value in padded(batch, slice(1, None, 2)).items()}
        common._compute_kl_logps = lambda m, b: module.KTOTrainer._compute_kl_logps(common, m, b)
        return call(module.KTOTrainer._compute_loss, common, policy, inputs)
    import trl.trainer.dpo_trainer as module

    own |= {"ld_alpha": tail, "f_divergence_type": "reverse_kl"}
    own |= {"loss_types": [*losses], "loss_weights": [*losses.values()]}
    own["args"].discopop_tau = 0.05
    both = padded(batch, slice(None))
    inputs = {key: torch.cat([value[::2], value[1::2]]) for key, value in both.items()}
    return call(module.DPOTrainer._compute_loss, common, policy, inputs)


def call(compute: Any, trainer: Any, policy: Stub, inputs: dict[str, Any]) -> Tensor:
    """The loss of a method of a trainer of TRL."""
    module: Any = importlib.import_module(compute.__module__)
    module.disable_gradient_checkpointing = lambda *_: nullcontext()
    return compute(trainer, policy, inputs, False)


TRL: dict[str, tuple[dict[str, float], float, float | None]] = {  # losses of DPOTrainer, label_smoothing and ld_alpha
    "dpo": ({"sigmoid": 1.0}, 0.0, None),
    "dpo(tail=0.4)": ({"sigmoid": 1.0}, 0.0, 0.4),
    "dpo(normalized=true)": ({"sigmoid_norm": 1.0}, 0.0, None),
    "robust(label_smoothing=0.1)": ({"robust": 1.0}, 0.1, None),
    "hinge": ({"hinge": 1.0}, 0.0, None),
    "ipo": ({"ipo": 1.0}, 0.0, None),
    "exo(label_smoothing=0.1)": ({"exo_pair": 1.0}, 0.1, None),
    "nca": ({"nca_pair": 1.0}, 0.0, None),
    "bco": ({"bco_pair": 1.0}, 0.0, None),
    "sppo": ({"sppo_hard": 1.0}, 0.0, None),
    "apo": ({"apo_zero": 1.0}, 0.0, None),
    "apo(variant=down)": ({"apo_down": 1.0}, 0.0, None),
    "discopop": ({"discopop": 1.0}, 0.0, None),
    "dpo + 0.3 * nca - 0.1 * hinge": ({"sigmoid": 1.0, "nca_pair": 0.3, "hinge": -0.1}, 0.0, None),
    "simpo(label_smoothing=0.1)": ({}, 0.1, None),
    "cpo(label_smoothing=0.1)": ({}, 0.1, None),
    "orpo": ({}, 0.0, None),
    "kto": ({}, 0.0, None),
}


@pytest.mark.long
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("name", TRL)
def test_loss_and_gradient_equal_those_of_trl(name: str, adapter: bool, base: Path) -> None:
    pytest.importorskip("trl", reason="needs TRL: pip install trl")
    batch, reference = example_batch("kto" if name == "kto" else "dpo"), onward.load(base).model.double()
    model = (onward.load(base).model if adapter else changed(base)).eval().double()
    if adapter:
        add_lora(model, LoRA(rank=2))
        torch.manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += torch.randn_like(parameter) * 0.1
    trained = [p for p in model.parameters() if p.requires_grad]
    own = of(name).loss(replace(base_in(base), load=lambda _: onward.load(base).model.double()))
    losses = [own(model, batch)[0] / batch.divisor, theirs(name, model, reference, batch, 0.3)]
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-6, rel=1e-6)
    ours, wanted = (torch.autograd.grad(loss, trained) for loss in losses)
    for got, other in zip(ours, wanted):
        assert (got - other).abs().max() <= 1e-5 * other.abs().max() + 1e-7


def test_a_synced_reference_moves_towards_the_model(base: Path, batch: ExampleBatch) -> None:
    loss, model = of("dpo(reference=synced(every=2, share=0.25))").loss(base_in(base)), changed(base)
    start = [p.clone() for p in onward.load(base).model.parameters()]
    loss(model, batch)
    for step in range(3):
        assert loss.prepare(model, [batch])[0] is batch
        moved = 0.25 if step == 2 else 0.0
        for own, before, new in zip(loss.reference.model.parameters(), start, model.parameters()):
            torch.testing.assert_close(own, before + moved * (new - before))


def test_a_run_with_a_synced_reference_resumes_exactly(base: Path, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "pairs.jsonl", pairs())
    options = {"method": "dpo(reference=synced(every=2))", "template": "", "batch_size": 2, "validation": "none"}
    list(Run.start(config(base, data, tmp_path / "whole", **options)).train())
    run = Run.start(config(base, data, tmp_path / "run", **options))
    for _ in run.train(stop=lambda: run.step == 3):
        pass
    list(Run.resume(tmp_path / "run").train())
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    with pytest.raises(UserError, match="synced, which follows weights and not adapters: leave out lora"):
        config(base, data, tmp_path / "lora", **options, lora=2)
