"""The last message of a process that ends because a file that it maps to memory has become shorter (SIGBUS).

Python's own signal handlers run only between two bytecode instructions, and the failing instruction never ends. The
handler here is machine code that only calls `write` and `_exit`, as POSIX allows in a handler.
"""

import ctypes
import signal
from typing import Any

from onward.kernels.available import unavailable

SENTENCE = (
    "onward: Cannot go on, because a weight file became shorter while a step read it, or its disk failed: start "
    "the server again, and replace files instead of writing to them, or use --no-mmap\n"
)
CODE = """
@text = private constant [{size} x i8] c"{text}"
declare i64 @write(i32, ptr, i64)
declare void @_exit(i32)
define void @handler(i32 %signal) {{
  %written = call i64 @write(i32 2, ptr @text, i64 {size})
  call void @_exit(i32 {status})
  ret void
}}
"""
KEPT = list[Any]()  # keeps the machine code of the handler in memory


def say_at_bus_error(sentence: str = SENTENCE, status: int = 2) -> None:
    """At a SIGBUS, end the process with a message on standard error and with `status`; does nothing on systems without
    this signal, and on machines that cannot compile."""
    if not hasattr(signal, "SIGBUS") or KEPT or unavailable():
        return
    import llvmlite.binding as llvm

    text = sentence.encode()
    code = CODE.format(size=len(text), text="".join(f"\\{byte:02x}" for byte in text), status=status)
    machine = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(code), machine)
    engine.finalize_object()
    KEPT.append(engine)
    install = ctypes.CDLL(None).signal
    install.argtypes, install.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    install(signal.SIGBUS, engine.get_function_address("handler"))
