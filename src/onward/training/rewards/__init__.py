"""Rewards: numbers for the completions that a model writes. A reward is a value, a part of the type `Reward`; a sum of
rewards with weights is a reward.

Does not import torch, so that `--help` answers at once. Importing this package registers all kinds.
"""

from onward.training.rewards import code, function, judge, model, sum, text
from onward.training.rewards.reward import Reward

__all__ = ["Reward", "code", "function", "judge", "model", "sum", "text"]
