"""Methods of fine-tuning, one file each: its options, the examples it makes of records, and its loss.

Does not import torch, so that `--help` answers at once: formulas use the methods of tensors, and `Method.loss` imports
the modules that it uses. A file in one of its folders is found by itself.
"""

from importlib import import_module
from pathlib import Path

from onward.training.methods.method import Method

for file in sorted(Path(__file__).parent.glob("*/[a-z]*.py")):
    import_module(f"{__name__}.{file.parent.name}.{file.stem}")

__all__ = ["Method"]
