"""The memory allocated by all threads of a process. Works only with glibc."""

import ctypes
import threading
import time


class Mallinfo(ctypes.Structure):
    """The struct mallinfo2 of glibc."""

    NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES.split()]


def allocated() -> int:
    """The currently allocated bytes, without mapped files."""
    read = ctypes.CDLL(None).mallinfo2
    read.restype = Mallinfo
    now = read()
    return int(now.uordblks + now.hblkhd)


class HeapPeak:
    """Context manager that samples the allocated bytes up to a thousand times a second; `bytes` is the maximum minus
    the bytes allocated at the beginning."""

    def __enter__(self) -> "HeapPeak":
        self.ended, self.before, self.bytes = False, allocated(), 0
        self.thread = threading.Thread(target=self.sample, daemon=True)
        self.thread.start()
        return self

    def sample(self) -> None:
        while not self.ended:
            self.bytes = max(self.bytes, allocated() - self.before)
            time.sleep(0.001)

    def __exit__(self, *_: object) -> None:
        self.ended = True
        self.thread.join()
