"""Fine-tuning methods, one file each: the options of the method, the examples it makes from records, and its loss.

Does not import torch, so that `--help` answers at once: formulas call only methods of tensors, and `Method.loss`
imports the modules that it uses. New files in the subfolders are found automatically.
"""

from importlib import import_module
from pathlib import Path

from onward.training.methods.method import Method

for file in sorted(Path(__file__).parent.glob("*/[a-z]*.py")):
    import_module(f"{__name__}.{file.parent.name}.{file.stem}")

__all__ = ["Method"]
