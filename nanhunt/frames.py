"""What the interpreter's stack tells: the user's line, and arguments that a hook is not given."""

from __future__ import annotations

import linecache
import os
import sys
from types import FrameType
from typing import Any

import torch
from torch.nn.modules import module as _nn_module

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_DEMO = _OURS + "demo.py"
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
# The frame inside Module.__call__ that holds `args` and `kwargs` (torch 2.1 and later).
_CALL_FRAME, _CALL_FILE = "inner", _nn_module.__file__


def _foreign(filename: str) -> bool:
    if filename == _DEMO:  # the demo stands for a user's program
        return False
    return filename.startswith((_TORCH, _OURS, "<frozen")) or filename == "<string>"


def user_site(frame: FrameType | None = None) -> tuple[str, int] | None:
    """File and line of the innermost frame outside torch and nanhunt."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        if not _foreign(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def source(site: tuple[str, int] | None) -> tuple[str | None, str | None]:
    """`("file.py:88", "the text of that line")` of a site."""
    if site is None:
        return None, None
    return f"{site[0]}:{site[1]}", linecache.getline(*site).strip() or None


def call_kwargs() -> dict[str, Any]:
    """The keyword arguments of the module call whose forward pre-hook is running.

    A global pre-hook is not given them (torch 2.13), so they are read from the frame that holds them;
    empty when it is not where it is expected.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(8):
        if frame is None:
            break
        if frame.f_code.co_name == _CALL_FRAME and frame.f_code.co_filename == _CALL_FILE:
            found = frame.f_locals.get("kwargs")
            return found if isinstance(found, dict) else {}
        frame = frame.f_back
    return {}


def running() -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """(module, args, kwargs) of the module calls that run on this stack, innermost first."""
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == _CALL_FRAME and frame.f_code.co_filename == _CALL_FILE:
            local = frame.f_locals
            if "self" in local and "args" in local:
                found.append((local["self"], local["args"], local.get("kwargs") or {}))
        frame = frame.f_back
    return found
