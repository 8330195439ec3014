"""Where a page goes: to standard output, or to a file that is none of those it was made from."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ..errors import UsageError
from .files import write_whole


def beside(file: str, out: str | None) -> str:
    """The name of a page for a browser: `out`, or that of the file it is about, `a.json` giving `a.html`.

    Raises:
        UsageError: when what is read has no name.
    """
    if out is None and file == "-":
        raise UsageError("a page of what is read from standard input needs a name: add -o OUT")
    return out or os.path.splitext(file)[0] + ".html"


def deliver(text: str, out: str | None, *, files: Sequence[str]) -> None:
    """Print the text, or write it to `out` and say so; `files` are those that were read.

    Raises:
        UsageError: when that is not possible, with the reason.
        BrokenPipeError: when nobody reads standard output any more.
    """
    if out is None:
        try:
            print(text, end="", flush=True)
        except BrokenPipeError:
            raise
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # python would try once more at its end
            raise UsageError(f"cannot write to standard output: {error.strerror or error}") from None
    elif os.path.realpath(out) in map(os.path.realpath, files):
        raise UsageError(f"{out!r} is read and would be written: name another file with -o")
    else:
        try:
            print(f"written to {write_whole(out, text)}")
        except OSError as error:
            raise UsageError(f"cannot write {out!r}: {error.strerror or error}") from None
