"""The address space of the process, which `ulimit -v` limits, and errors that mean that memory ran out."""

import errno
import mmap

THREAD_STACK_BYTES = 9 << 20
"""Address space of a thread by default, in bytes."""


def can_reserve(nbytes: int) -> bool:
    """Whether the process can get this much more address space, which `ulimit -v` limits."""
    try:
        mmap.mmap(-1, nbytes).close()
    except (MemoryError, OSError):
        return False
    return True


def is_no_memory(error: BaseException) -> bool:
    """Whether an error means that the system has no memory left, for Python, a system call, a library or a thread."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, ImportError):  # an error of the dynamic loader, which numpy quotes
        return any(message in str(error) for message in ("failed to map segment", "cannot allocate memory"))
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return not can_reserve(THREAD_STACK_BYTES)
    return isinstance(error, MemoryError)
