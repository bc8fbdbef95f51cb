"""Functions of higher folders that lower folders call: `onward/__init__.py` sets them, and they import nothing until
they are called."""

TYPE_CHECKING = False  # `import onward` imports this file, and importing `typing` is slow
if TYPE_CHECKING:
    from collections.abc import Callable

describe: "Callable[[object], str | None]" = lambda value: None  # an object as HTML, for a notebook
define_kinds: "Callable[[], object]" = lambda: None  # defines all kinds of parts, including those of families
tried: "Callable[[object], object]" = lambda config: config  # the tensors that each layer of a decoder caches
