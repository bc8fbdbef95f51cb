"""Rotary positions, whose pairs combine the two halves of a head."""

from random import Random

import torch
from torch import Tensor

from onward.learn.exercise import Exercise, Mistake


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotate queries or keys by their positions. Pair i consists of the numbers i and i + E/2 (halves, as in GPT-NeoX
    and the Llama of transformers, not adjacent numbers), and at position t it turns counterclockwise by the angle
    t · θ^(−2i/E).

    x (B, H, T, E), positions (T,) -> (B, H, T, E)
    """
    E = x.shape[-1]
    frequency = theta ** (-torch.arange(0, E, 2) / E)  # (E / 2,)
    angle = positions[:, None] * frequency  # (T, E / 2)
    cos, sin = angle.cos(), angle.sin()
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def draw(pick: Random) -> tuple[Tensor, Tensor, float]:
    T = pick.randint(1, 2)
    x = torch.randn(1, pick.randint(1, 2), T, pick.choice([4, 6]))
    return x, torch.arange(T) + pick.randint(1, 5), pick.choice([100.0, 10_000.0])


LAST = """\
first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)"""  # two lines of the answer
EXERCISE = Exercise(
    chapter=5,
    answer=rope,
    draw=draw,
    mistakes=(
        Mistake(
            LAST,
            "first, second = x[..., ::2], x[..., 1::2]\n"
            "    return torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)",
            "adjacent numbers form a pair, as in GPT-J and RoFormer: pair the number i with i + E/2",
        ),
        Mistake(
            "x.chunk(2, dim=-1)",
            "(x[..., ::2], x[..., 1::2])",
            "adjacent numbers are rotated, but the results are put into halves: take the pairs from the halves as well",
        ),
        Mistake("angle.sin()", "-angle.sin()", "the rotation goes clockwise: exchange the signs of the sines"),
        Mistake(
            "second * cos + first * sin",
            "second * cos - first * sin",
            "this is not a rotation, because one sign is wrong: the second number is second · cos + first · sin",
        ),
        Mistake(
            "first * cos - second * sin",
            "first * cos + second * sin",
            "this is not a rotation, because one sign is wrong: the first number is first · cos − second · sin",
        ),
        Mistake("torch.arange(0, E, 2)", "torch.arange(E // 2)", "the exponents are −i/E: use −2i/E"),
        Mistake("(-torch.arange(", "(torch.arange(", "the exponents are positive: later pairs turn more slowly"),
        Mistake(
            "positions[:, None]",
            "torch.arange(len(positions))[:, None]",
            "positions are counted from 0: use the given positions, which may begin later, such as after cached tokens",
        ),
        Mistake(
            "positions[:, None]", "(positions[:, None] + 1)", "positions are off by one: position 0 is not rotated"
        ),
        Mistake(
            "theta ** (-torch.arange(0, E, 2) / E)",
            "10_000.0 ** (-torch.arange(0, E, 2) / E)",
            "10,000 is used for every theta: use theta",
        ),
        Mistake(
            LAST,
            "cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)\n"
            "    first, second = x.chunk(2, dim=-1)\n"
            "    return x * cos + torch.cat((-second, first), dim=-1) * sin",
            "the angles are those of adjacent numbers (repeat_interleave), but halves turn: use cat((angle, angle))",
        ),
        Mistake(
            LAST,
            "cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)\n"
            "    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2) * sin",
            "the angles are those of halves, but adjacent numbers turn: use cat((-second half, first half))",
        ),
        Mistake("torch.arange(0, E, 2) / E", "torch.arange(0, E, 2) / (E // 2)", "the exponents are −4i/E: use −2i/E"),
        Mistake(
            "(first * cos - second * sin, second * cos + first * sin)",
            "(second * cos + first * sin, first * cos - second * sin)",
            "the halves of the result are exchanged: the first number of a pair stays in the first half",
        ),
        Mistake(
            "return torch.cat((first * cos - second * sin,",
            "first = first * cos - second * sin\n    return torch.cat((first,",
            "the second half is computed from the rotated first half: keep the old first half until both are computed",
        ),
    ),
)
