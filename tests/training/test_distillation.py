"""Distillation: divergences of distributions, and students that learn from teachers."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import onward
from onward import FinetuneConfig, Run, UserError, train_tokenizer
from onward.training import divergence
from onward.training.finetuning.base import with_vocabulary
from onward.training.losses.answers import Frozen
from onward.training.losses.distillation import Distillation, OnPolicy

from support.decoders import DECODERS, assert_close, decoder, token_ids
from support.finetuning import base_model, config, sums, tokenizer, write_rows


@pytest.mark.parametrize("mix", [0.0, 0.3, 0.5, 1.0])
def test_divergence_is_its_formula_in_fp64(mix: float) -> None:
    logits = torch.randn(2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 4
    s, t = logits.softmax(-1).numpy()
    m = mix * t + (1 - mix) * s
    kl = lambda p, q: (p * np.log(p / q)).sum(-1)
    wanted = {0.0: kl(t, s), 1.0: kl(s, t)}.get(mix, mix * kl(t, m) + (1 - mix) * kl(s, m))
    np.testing.assert_allclose(divergence(logits[0], logits[1], mix).numpy(), wanted, rtol=1e-12)


@pytest.mark.parametrize("mix", [0.0, 0.3, 1.0])
def test_tokens_that_student_and_teacher_exclude_do_not_count(mix: float) -> None:
    student, teacher = torch.randn(2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    student.requires_grad_()
    s, t = (F.pad(logits, (0, 2), value=-math.inf) for logits in (student, teacher))
    found = divergence(s, t, mix)
    wanted = divergence(student, teacher, mix)
    assert_close(found, wanted, 1e-12)
    (got,), (gradient,) = (torch.autograd.grad(one.sum(), student) for one in (found, wanted))
    assert_close(got, gradient, 1e-12)


@pytest.mark.long
@pytest.mark.parametrize("mix", [0.0, 0.3, 1.0])
def test_divergence_and_gradient_equal_those_of_trl(mix: float) -> None:
    gkd = pytest.importorskip("trl.experimental.gkd", reason="needs TRL: pip install trl")
    logits = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(0)) * 4
    student, teacher = logits[0].requires_grad_(), logits[1]
    ours = divergence(student.flatten(0, 1), teacher.flatten(0, 1), mix).mean()
    theirs = gkd.GKDTrainer.generalized_jsd_loss(student, teacher, torch.ones(3, 5), mix)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)
    got, wanted = (torch.autograd.grad(loss, student)[0] for loss in (ours, theirs))
    assert_close(got, wanted, 1e-6)


def test_loss_of_a_student_is_the_same_in_chunks() -> None:
    student, teacher = decoder(DECODERS["llama"]), decoder(DECODERS["gpt2"])
    tokens = token_ids(student.config)
    batch = onward.Batch(tokens[:, :-1], tokens[:, 1:].masked_fill(tokens[:, 1:] < 3, -100))
    found = []
    for chunk in 0, 4:
        student.zero_grad()
        loss, *_ = Distillation(Frozen(lambda _: teacher), 0.5, 2.0, chunk)(student, batch)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in student.parameters())])
    for one, other in zip(*found):
        assert_close(one, other)


def test_a_student_comes_closer_to_its_teacher(tmp_path: Path) -> None:
    teacher, base = base_model(tmp_path / "teacher"), base_model(tmp_path / "base", d_model=32)
    data = write_rows(tmp_path / "chats.jsonl", sums(8))
    options = {"method": "distill", "template": "plain", "steps": 4, "validate_every": 4, "teacher": str(teacher)}
    losses = [
        event.loss
        for event in Run.start(config(base, data, tmp_path / "run", **options)).train()
        if hasattr(event, "loss")
    ]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("mix", [0.0, 0.5, 1.0])
def test_padding_of_one_vocabulary_is_left_out(mix: float) -> None:
    student, teacher = decoder(DECODERS["llama"]), decoder(DECODERS["gpt2"])
    longer = with_vocabulary(teacher, teacher.config.vocab_size + 64)
    torch.nn.init.normal_(longer.embed.weight[-64:], std=9)
    tokens = token_ids(student.config)
    batch = onward.Batch(tokens[:, :-1], tokens[:, 1:])
    wanted = Distillation(Frozen(lambda _: teacher), mix)(student, batch)[0]
    assert_close(Distillation(Frozen(lambda _: longer), mix)(student, batch)[0], wanted)
    grown = with_vocabulary(student, student.config.vocab_size + 64).eval()
    assert_close(Distillation(Frozen(lambda _: teacher), mix)(grown, batch)[0], wanted)


def test_a_run_learns_from_a_teacher_with_padded_embeddings(tmp_path: Path) -> None:
    base, teacher = base_model(tmp_path / "base"), tmp_path / "teacher"
    lm = onward.load(base)
    lm.model = with_vocabulary(lm.model, lm.model.config.vocab_size + 64)
    onward.save(lm, teacher)
    options: dict[str, Any] = {"method": "distill", "teacher": str(teacher), "template": "plain", "steps": 1}
    data = write_rows(tmp_path / "chats.jsonl", sums(8))
    (step, *_) = Run.start(config(base, data, tmp_path / "run", **options)).train()
    assert step.loss < 0.01, "the models are equal, except for dropout"  # type: ignore[union-attr]


def test_a_teacher_of_another_vocabulary_is_one_sentence(tmp_path: Path) -> None:
    base, teacher = base_model(tmp_path / "base"), base_model(tmp_path / "teacher")
    train_tokenizer("byte", []).save(teacher)
    data = write_rows(tmp_path / "chats.jsonl", sums(8))
    with pytest.raises(UserError, match=r"the vocabulary of the teacher .*teacher differs from that of .*base"):
        Run.start(config(base, data, tmp_path / "run", method="distill", teacher=str(teacher)))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"method": "distill"}, "distill needs a teacher"),
        ({"teacher": "a"}, "teacher is .*not an option of sft, but of distill"),
    ],
)
def test_only_distillation_has_a_teacher(values: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=f"^{sentence}"):
        FinetuneConfig.of(base="base", **values)


def test_on_policy_loss_is_the_divergence_at_the_students_own_tokens() -> None:
    names = tokenizer()
    sizes: Any = {"vocab_size": names.vocab_size, "context_length": 32}
    student, teacher = (decoder(replace(DECODERS[name], **sizes)) for name in ("llama", "gpt2"))
    rows = torch.tensor([names.encode("12 + 3?")[:5] for _ in range(3)])
    targets = torch.full_like(rows, -100)
    targets[:, -1] = 7
    batches = [onward.Batch(rows, targets, seed=seed) for seed in range(8)]
    for share, own in (0.0, 0), (1.0, 8):
        loss = OnPolicy(Distillation(Frozen(lambda _: teacher), 0.3), share, 4, names)
        prepared = loss.prepare(student, batches)
        assert sum(one is not other for one, other in zip(prepared, batches)) == own
    batch, again = prepared[0], loss.prepare(student, batches[:1])[0]
    assert torch.equal(batch.tokens, again.tokens), "the seed determines the answers"
    assert torch.equal(batch.tokens[:, :5], rows)
    chosen = batch.targets >= 0
    assert chosen.sum(1).max() == 4
    s, t = (model(batch.tokens)[chosen].softmax(-1).double().detach().numpy() for model in (student, teacher))
    m = 0.3 * t + 0.7 * s
    kl = lambda p, q: (p * np.log(p / q)).sum()
    value, *_ = loss(student, batch)
    assert value.item() == pytest.approx(0.3 * kl(t, m) + 0.7 * kl(s, m), rel=1e-5)
    assert [sample["prompt"] for sample in loss.samples] == [names.decode(rows[0].tolist())] * 3
    assert names.encode(loss.samples[0]["text"])[:1] == [batch.targets[0][chosen[0]][0]]
