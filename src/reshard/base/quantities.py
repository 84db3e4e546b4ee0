"""Sizes and counts as texts for users."""


def size(nbytes: float) -> str:
    """A file size as text: 1.3 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def count(number: float) -> str:
    """A number of parameters as text: 30.5B."""
    for unit in ("", "k", "M"):
        if number < 1000:
            return f"{number:.0f}" if not unit else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f}B"


GIB = 1 << 30
"""Unit of memory sizes, in bytes."""


def memory_size(nbytes: float) -> str:
    """An amount of memory as text, in the units of drivers and kernels: 79.6 GiB."""
    mib = 1024 * nbytes / GIB
    return f"{nbytes / GIB:.1f} GiB" if mib >= 100 else f"{mib:.1f} MiB"
