"""Rewards: numbers for the completions that a model writes. A reward is a value, a part of the type `Reward`; a sum of
rewards with weights is a reward.

Does not import torch, so that `--help` answers at once. A file of this folder is found by itself.
"""

from importlib import import_module
from pkgutil import iter_modules

for module in iter_modules(__path__):
    import_module(f"{__name__}.{module.name}")
