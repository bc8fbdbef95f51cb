"""A scaling law: the loss of a model by its size and its training tokens."""

from collections.abc import Mapping
from dataclasses import asdict

from onward.base.errors import UserError
from onward.learn.interactive.figure import InteractiveFigure
from onward.planning.laws import LossLaw


def loss_surface(law: LossLaw, models: Mapping[str, tuple[float, float]]) -> InteractiveFigure:
    """Sliders for N and D over the loss of a law, with its lines of equal loss and of equal operations, and the best
    split of the same operations. `models` are points (parameters, tokens) to start from."""
    if not models:
        raise UserError("models is empty: give at least one point, such as {'Chinchilla': (70e9, 1.4e12)}")
    return InteractiveFigure(
        "scaling",
        "The loss by parameters N and tokens D",
        "First plot: each curve has one loss, and the straight line one number of operations, C = 6 N D. Second plot: "
        "the loss along this line. Ring: the best N and D for C.",
        {"law": asdict(law), "models": [[name, *place] for name, place in models.items()]},
    )
