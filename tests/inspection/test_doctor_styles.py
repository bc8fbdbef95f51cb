"""The doctor finds mutants of ten styles of decoders, and raises no alarm for unusual but correct decoders."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onward import UserError, doctor
from onward.inspection.doctor.checks import CHEAP
from onward.inspection.doctor.subject import Subject
from onward.inspection.doctor.target import subjects_of

from support.correct_decoders import CORRECT
from support.mutants import KINDS, MUTANTS
from support.planted import failures
from support.styles import STYLES, made, mutant

FOUND = 0.95  # minimum share of mutants to find
FIRST = [next((style, kind) for style in styles) for kind, styles in KINDS.items()]
QUICK = ["config_class", "model_output", "width 4", "context 6", "sinks", "one block, used twice", "no positions"]
QUICK += ["several exits", "branches that begin at zero", "rotation that decays", "linear_bias in bf16", "scan"]


def test_mutants_are_two_hundred_in_ten_styles() -> None:
    assert len(MUTANTS) >= 200
    assert len(STYLES) == 10
    assert {style for style, _ in MUTANTS} == STYLES.keys()


@pytest.mark.parametrize(("style", "kind"), FIRST)
def test_one_mutant_of_each_kind_is_found(style: str, kind: str) -> None:
    assert failures(doctor(mutant(style, kind), fresh=True, checks=QUICK_CHECKS))


QUICK_CHECKS = (*CHEAP, "loss", "first loss", "initialization")


@pytest.mark.long
def test_nineteen_of_twenty_mutants_are_found() -> None:
    missed = [(style, kind) for style, kind in MUTANTS if not failures(doctor(mutant(style, kind), fresh=True))]
    assert len(missed) <= (1 - FOUND) * len(MUTANTS), missed


@pytest.mark.parametrize(
    ("name", "fresh"),
    [
        pytest.param(name, fresh, marks=[] if fresh and name in QUICK else pytest.mark.long)
        for name in CORRECT
        for fresh in (True, False)
    ],
)
def test_unusual_decoder_that_is_right_raises_no_alarm(name: str, fresh: bool) -> None:
    torch.manual_seed(0)
    found = doctor(CORRECT[name](), fresh=fresh)
    assert [(f.check, f.what) for f in found if f.status in ("failed", "not run")] == []


def test_overfit_of_a_narrow_model_names_its_steps_and_width() -> None:
    [found] = doctor(CORRECT["width 4"](), fresh=True, checks=["overfit"])
    assert found.status == "noted"
    assert "in 80 steps of sign descent, at a width of 4" in found.what


def test_shared_blocks_are_noted_and_not_failed() -> None:
    """Sharing one block among all layers is correct in a Universal Transformer but a mistake elsewhere; the code looks
    the same."""
    [found] = doctor(CORRECT["one block in all layers of a list"](), fresh=True, checks=["shared"])
    assert found.status == "noted"
    assert "layers.0 and layers.1 are one module" in found.what


def test_crash_in_a_check_is_named_so() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = made(STYLES["functional"])

        def forward(self, tokens: Tensor) -> Tensor:
            if int(tokens[0, 0]) == int(tokens[0, 1]) and tokens.size(1) > 8 and int(tokens[0, 0]):
                raise KeyError("no such text")
            return self.inner(tokens)

    found = {f.check: f for f in doctor(Picky(), checks=["causal", "positions", "context"])}
    assert found["positions"].status == "not run"
    assert found["positions"].what == "could not be run: KeyError: 'no such text'"
    assert found["causal"].status == found["context"].status == "ok"


def test_model_with_the_last_logits_alone_is_read_through_its_targets() -> None:
    assert Subject(made(STYLES["config_class"])).logits.shape == (2, 16, 61)


def test_early_exits_are_advised_an_adapter_that_chooses_one() -> None:
    class Exits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = made(STYLES["functional"])

        def forward(self, tokens: Tensor) -> list[Tensor]:
            return [self.inner(tokens)] * 3

    with pytest.raises(UserError, match=r"returns a list of 3, as for early exits: .*model\(tokens\)\[-1\]"):
        doctor(Exits())
    assert failures(doctor(Exits(), adapter=lambda model, tokens: model(tokens)[-1])) == {}


def test_file_without_a_name_names_its_models(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import torch\nclass GPT(torch.nn.Module): pass\nclass Big(GPT): pass\ndef other(): pass\n")
    with pytest.raises(UserError, match=rf"name one of its classes or functions, {file}:GPT or {file}:Big$"):
        subjects_of(str(file))


# ---------------------------------------------------------------- training

TEXT = torch.randint(1, 61, (4000,), generator=torch.Generator().manual_seed(5))


def windows(starts: list[int], rows: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Batches of windows of 16 tokens."""
    pairs = [(TEXT[i : i + 16], TEXT[i + 1 : i + 17]) for i in starts]
    return [tuple(map(torch.stack, zip(*pairs[i : i + rows]))) for i in range(0, len(pairs), rows)]  # type: ignore[misc]


def padded(ignored: int) -> list[tuple[Tensor, Tensor]]:
    """Batches whose rows end with the padding token 0, and whose targets there are `ignored`."""
    batches = [(tokens.clone(), targets.clone()) for tokens, targets in windows([0, 900, 300, 2000])]
    for tokens, targets in batches:
        for row, length in enumerate((16, 9, 12, 6)):
            tokens[row, length:], targets[row, length:] = 0, ignored
    return batches


RANDOM = [700, 3100, 40, 2500, 1800, 900, 2960, 400]
BATCHES: dict[str, tuple[dict[str, Any], str, str]] = {  # given facts, check, expected status
    "shuffled windows": ({"batches": windows(RANDOM)}, "order", "ok"),
    "windows in the order of the text": ({"batches": windows([*range(0, 128, 16)])}, "order", "failed"),
    "windows that slide by one token": ({"batches": windows([*range(8)])}, "order", "failed"),
    "padding that counts": ({"batches": padded(0)}, "padding in targets", "failed"),
    "padding that is ignored": ({"batches": padded(-100)}, "padding in targets", "ok"),
    "no padding": ({"batches": windows(RANDOM)}, "padding in targets", "ok"),
    "validation elsewhere": (
        {"batches": windows(RANDOM), "validation_batches": windows([3500, 3600])},
        "held out",
        "ok",
    ),
    "validation in the training text": (
        {"batches": windows(RANDOM), "validation_batches": windows([701, 2500])},
        "held out",
        "failed",
    ),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches_are_examined(name: str) -> None:
    about, check, status = BATCHES[name]
    [found] = doctor(made(STYLES["functional"]), checks=[check], **about)
    assert found.status == status, found


def test_padding_that_the_loss_leaves_out_is_right() -> None:
    loss = lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten(), ignore_index=0)
    [found] = doctor(made(STYLES["functional"]), checks=["padding in targets"], batches=padded(0), loss=loss)
    assert found.status == "ok"


def test_only_targets_of_the_token_that_most_rows_repeat_are_counted() -> None:
    batches = padded(0)
    for tokens, targets in batches:
        tokens[0, 8:] = targets[0, 8:] = 7
    [found] = doctor(made(STYLES["functional"]), checks=["padding in targets"], batches=batches)
    assert found.what == "3 of 4 rows end with a repeated token, 0, and 21 of their targets are that token"


def loop(model: nn.Module, change: str = "") -> None:
    """An endless training loop, with the mistake `change` unless it is ""."""
    params = [*model.parameters()]
    optimizer = torch.optim.AdamW(params[2:] if change == "left out" else params, 0.0 if change == "rate" else 1e-3)
    model.train(change != "eval")
    while True:
        tokens = torch.randint(61, (2, 17))
        if change != "never zeroed":
            optimizer.zero_grad()
        _, loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        if change == "zeroed late":
            optimizer.zero_grad()
        optimizer.step()


LOOPS = {
    "": "ok",
    "never zeroed": "optimizer.zero_grad() is never called",
    "zeroed late": "between backward() and step()",
    "rate": "the learning rate",
    "left out": "blocks",
    "eval": "model.train()",
}


@pytest.mark.parametrize("change", LOOPS)
def test_training_loop_is_examined(change: str) -> None:
    model = made(STYLES["buffer_mask"])
    before = [p.detach().clone() for p in model.parameters()]
    [found] = doctor(model, checks=["training step"], train=lambda m: loop(m, change))
    assert (found.status == "ok") == (not change), found
    assert not change or LOOPS[change] in found.where or change == "left out"
    assert all(map(torch.equal, before, model.parameters()))


def test_training_step_is_given_batches() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor) -> None:
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()

    [found] = doctor(made(STYLES["functional"]), checks=["training step"], train=step)
    assert "never called" in found.where


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
