"""The loss that an option names: functions, classes with arguments, and refusals."""

from pathlib import Path

import pytest

from onward import Loss, RunConfig, UserError
from onward.training import CrossEntropy
from onward.training.step.loss import LossOfFunction
from onward.training.step.own_loss import text_loss

MODULE = """
from dataclasses import dataclass

from onward import Loss
from onward.training import CrossEntropy

def focal(model, batch): ...

@dataclass(frozen=True)
class Power(Loss):
    gamma: float = 2.0

@dataclass(frozen=True, kw_only=True)
class Warm(CrossEntropy):
    heat: float = 1.0

class NoLoss:
    def __init__(self): self.summarize = None

number = 3
"""
WRONG = {
    "losses:focul": "the module losses has no focul",
    "losses:number": "not a class or function",
    "losses:focal(gamma=2)": "not a class or function",
    "losses:Power(gama=2)": "Cannot make the loss losses:Power",
    "losses:NoLoss": "because it is not a Loss",
    "losses": "name a function of (model, batch)",
    "nowhere:focal": "there is no module nowhere",
}


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "losses", raising=False)
    (tmp_path / "losses.py").write_text(MODULE)


def made(loss: str, **options: float) -> Loss:
    return text_loss(RunConfig(loss=loss, steps=1, **options))  # type: ignore[arg-type]


def test_named_loss_is_made_with_its_arguments_and_options() -> None:
    assert type(made("")) is CrossEntropy
    assert isinstance(made("losses:focal"), LossOfFunction)
    assert made("losses:Power(gamma=0.5)").gamma == 0.5  # type: ignore[attr-defined]
    warm = made("losses:Warm(heat=3)", z_loss=1e-4)
    assert (warm.heat, warm.z_loss) == (3, 1e-4)  # type: ignore[attr-defined]
    assert RunConfig(loss="losses:focal", imports=("losses", "more"), steps=1).modules == ("losses", "more")


@pytest.mark.parametrize("loss", WRONG)
def test_name_of_no_loss_is_refused(loss: str) -> None:
    with pytest.raises(UserError) as error:
        made(loss)
    assert WRONG[loss] in str(error.value)


def test_option_that_the_loss_does_not_read_is_refused() -> None:
    with pytest.raises(UserError, match="label_smoothing has no effect on the loss losses:focal"):
        made("losses:focal", label_smoothing=0.1)
