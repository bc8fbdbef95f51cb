"""Display in a notebook: objects as HTML, and progress as one changing line."""

import sys
from importlib import import_module
from typing import Any

from onward.base import handed


class Shown:
    """Base class of objects, such as a configuration, that a Jupyter notebook displays as a table or a picture."""

    def _repr_html_(self) -> str | None:
        return handed.describe(self)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, which can show and update outputs."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class DisplayedLine:
    """A line in the output of a notebook's cell whose text can be replaced, to show progress."""

    def __init__(self) -> None:
        self.handle: Any = None  # of IPython's display

    def show(self, line: str) -> None:
        data = {"text/plain": line}
        if self.handle is None:
            self.handle = import_module("IPython.display").display(data, raw=True, display_id=True)
        else:
            self.handle.update(data, raw=True)
