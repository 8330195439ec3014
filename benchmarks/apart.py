"""A function in a process of its own: what it leaves behind goes with it, and a crash costs one row."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from typing import Any


class Failed(Exception):
    """The function raised, died or took too long: the words say which."""


def words(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:240].rstrip(": ")


def run(function: Callable[..., Any], *args: Any, seconds: float) -> Any:
    """What `function(*args)` returns. The function and its arguments must be picklable.

    Raises:
        Failed: after `seconds`, or when the function or its process fails.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(theirs, function, args))
    process.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            raise Failed(f"it took more than {seconds:.0f} seconds")
        good, result = ours.recv()
    except EOFError:
        raise Failed("its process died") from None
    finally:
        process.terminate()
        process.join()
    if not good:
        raise Failed(result)
    return result


def _call(pipe: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        pipe.send((True, function(*args)))
    except BaseException as error:
        traceback.print_exc()
        pipe.send((False, words(error)))
