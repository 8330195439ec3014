"""A ceiling on what this process may take of memory while something of a stranger's runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..errors import UsageError

_LIBRARIES_MB = 256  # what is loaded meanwhile, and the stacks of threads


@contextlib.contextmanager
def ceiling(megabytes: float) -> Iterator[None]:
    """No more than so many megabytes above what the process has now: the system refuses it, whoever asks.

    Shapes can be measured before a run, what an op takes for its own work cannot: a convolution of float64 unfolds its
    input. Where the system knows no such limit (it is Linux's), nothing is done.

    Raises:
        UsageError: when the block has asked for more.
    """
    taken = _taken()
    if taken is None:
        yield
        return
    import resource  # which other systems have not

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = taken + int((megabytes + _LIBRARIES_MB) * 1e6)
    known = [one for one in (soft, hard) if one != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(wanted, *known) if known else wanted, hard))
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            raise UsageError(f"running it would take more than {megabytes:.0f} MB: see --max-mb") from None
        raise
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _taken() -> int | None:
    """Bytes of memory that this process may write to, as RLIMIT_DATA counts them; None where nobody tells."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            (line,) = (line for line in file if line.startswith("VmData:"))
        return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
