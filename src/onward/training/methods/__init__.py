"""Methods of fine-tuning, one file each: its options, the examples it makes of records, and its loss.

Does not import torch, so that `--help` answers at once: formulas use the methods of tensors, and `Method.loss` imports
what it computes with. A file of this folder is found by itself.
"""

from importlib import import_module
from pkgutil import iter_modules

from onward.training.methods.method import Method

for module in iter_modules(__path__):
    import_module(f"{__name__}.{module.name}")

__all__ = ["Method"]
