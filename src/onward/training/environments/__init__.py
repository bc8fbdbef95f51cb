"""Environments: replies to a model between its turns, such as a calculator. An environment is a part (a frozen
dataclass) of the type `Environment`. Does not import torch, so that `--help` answers at once."""

from onward.training.environments import calculator, function
from onward.training.environments.environment import Environment

__all__ = ["Environment", "calculator", "function"]
