"""How the next token is chosen, as a value. Does not import torch."""

from dataclasses import dataclass

from onward.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """One request's way of choosing tokens. A UserError tells of a value out of range."""

    temperature: float = 0.8  # below 1 sharpens, above 1 flattens the distribution; 0 always takes the likeliest token
    top_k: int = 0  # keep only the k likeliest tokens; 0: all
    top_p: float = 1.0  # keep the likeliest tokens up to this share of the probability (nucleus)
    seed: int | None = None  # the same seed gives the same text; none: a new one each time

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature is {self.temperature}: it must be at least 0")
        if self.top_k < 0:
            raise UserError(f"top_k is {self.top_k}: it must be at least 0")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}: it must be above 0 and at most 1")
