"""What lower folders need of higher ones: functions that `onward/__init__.py` hands down, and that import nothing until
they are called."""

TYPE_CHECKING = False  # `import onward` imports this file, which `typing` would make slow
if TYPE_CHECKING:
    from collections.abc import Callable

describe: "Callable[[object], str | None]" = lambda value: None  # an object as HTML, for a notebook
define_kinds: "Callable[[], object]" = lambda: None  # defines all kinds of parts, those of families included
tried: "Callable[[object], object]" = lambda config: config  # what the layers of a decoder with own parts keep
