"""One step of AdamW."""

from random import Random

import torch
from torch import Tensor

from onward.learn.exercise import Exercise, Mistake


def adamw_step(
    w: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights w and the averages m (of gradients) and v (of their squares) after one step of AdamW:

    m ← β₁ m + (1 − β₁) g      v ← β₂ v + (1 − β₂) g²

    w ← w − lr ( m̂ / (√v̂ + eps) + decay · w )

    m̂ and v̂ are m and v divided by 1 − β^step, which corrects the bias; `step` is 1 in the first step.
    """
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g**2
    m_hat = m / (1 - betas[0] ** step)
    v_hat = v / (1 - betas[1] ** step)
    w = w - lr * (m_hat / (v_hat.sqrt() + eps) + decay * w)
    return w, m, v


def draw(pick: Random) -> tuple[object, ...]:
    n, step = pick.randint(2, 3), pick.randint(1, 4)
    earlier = float(step > 1)
    w, g, m, v = torch.randn(n) * 2, torch.randn(n), torch.randn(n) * earlier, torch.rand(n) * earlier
    return w, g, m, v, step, pick.choice([0.1, 0.2]), (0.9, 0.98), pick.choice([0.05, 0.1]), pick.choice([0.3, 0.5])


EXERCISE = Exercise(
    chapter=8,
    answer=adamw_step,
    draw=draw,
    mistakes=(
        Mistake(
            "m = betas[0] * m + (1 - betas[0]) * g\n",
            "g, decay = g + decay * w, 0\n    m = betas[0] * m + (1 - betas[0]) * g\n",
            "the weight decay is added to the gradient (Adam with L2): in AdamW, it bypasses m and v and is applied "
            "to w",
        ),
        Mistake(
            "w - lr * (m_hat / (v_hat.sqrt() + eps) + decay * w)",
            "w - lr * m_hat / (v_hat.sqrt() + eps) - decay * w",
            "the weight decay is not multiplied by the learning rate: subtract lr · decay · w",
        ),
        Mistake(" + decay * w)", ")", "the weight decay is missing: subtract lr · decay · w"),
        Mistake(
            "w = w - lr * (m_hat / (v_hat.sqrt() + eps) + decay * w)",
            "w = (w - lr * m_hat / (v_hat.sqrt() + eps)) * (1 - lr * decay)",
            "the decay applies to weights that the step has already moved: use the old ones, or multiply by "
            "1 − lr · decay first",
        ),
        Mistake("+ decay * w)", "- decay * w)", "the weight decay has the wrong sign, and weights grow: subtract it"),
        Mistake("m / (1 - betas[0] ** step)", "m", "m̂ lacks the correction of the bias: divide m by 1 − β₁^step"),
        Mistake("v / (1 - betas[1] ** step)", "v", "v̂ lacks the bias correction: divide v by 1 − β₂^step"),
        Mistake(
            "m_hat = m / (1 - betas[0] ** step)\n    v_hat = v / (1 - betas[1] ** step)",
            "m_hat, v_hat = m, v",
            "the correction of the bias is missing: divide m by 1 − β₁^step, and v by 1 − β₂^step",
        ),
        Mistake(
            "m_hat = m / (1 - betas[0] ** step)\n    v_hat = v / (1 - betas[1] ** step)",
            "m_hat = m / (1 - betas[0] ** (step + 1))\n    v_hat = v / (1 - betas[1] ** (step + 1))",
            "the step is off by one: it is already 1 in the first step",
        ),
        Mistake(
            "m_hat = m / (1 - betas[0] ** step)\n    v_hat = v / (1 - betas[1] ** step)",
            "m_hat = m = m / (1 - betas[0] ** step)\n    v_hat = v = v / (1 - betas[1] ** step)",
            "the corrected averages are returned, and would be corrected again: keep m and v as they were",
        ),
        Mistake("(v_hat.sqrt() + eps)", "(v_hat + eps).sqrt()", "eps is inside of the root: add it after"),
        Mistake("v_hat.sqrt()", "v_hat", "the root is missing: divide by √v̂ + eps"),
        Mistake("* g**2", "* g", "v averages gradients: let it average their squares"),
        Mistake("w - lr *", "w + lr *", "the step goes uphill: subtract it"),
        Mistake(
            "m = betas[0] * m + (1 - betas[0]) * g\n",
            "betas = betas[::-1]\n    m = betas[0] * m + (1 - betas[0]) * g\n",
            "β₁ and β₂ are exchanged: β₁ belongs to m",
        ),
        Mistake("* g**2", "* m**2", "v averages the squares of m: let it average those of the gradient g"),
        Mistake(
            "(1 - betas[0]) * g\n",
            "g\n",
            "the gradient is added to m in full, as in SGD with momentum: multiply it by 1 − β₁",
        ),
        Mistake("(v_hat.sqrt() + eps)", "v_hat.sqrt()", "eps is missing: divide by √v̂ + eps"),
    ),
)
