"""Rewards: numbers for the completions that a model writes. A reward is a part (a frozen dataclass) of the type
`Reward`; a weighted sum of rewards is also a reward.

Does not import torch, so that `--help` answers at once. Importing this package registers all kinds.
"""

from onward.training.rewards import code, function, judge, model, sum, text
from onward.training.rewards.reward import Reward

__all__ = ["Reward", "code", "function", "judge", "model", "sum", "text"]
