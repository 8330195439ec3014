"""Arguments that a hook is not given, read from the frames that hold them."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch.nn.modules import module as _nn_module
from torch.optim import optimizer as _optimizer

# The frame inside Module.__call__ that holds `args` and `kwargs` (torch 2.1 and later).
_CALL_FRAME, _CALL_FILE = "inner", _nn_module.__file__

# The frame around Optimizer.step that runs its hooks (torch 2.0 and later).
_STEP_FRAME, _STEP_FILE = "wrapper", _optimizer.__file__

# Where a pipeline runs its stages on memory that nobody has written, to learn the shapes (torch 2.13; the last: 2.6).
_PIPELINE = "torch.distributed.pipelining.stage"
_REHEARSALS = ("_forward_metadata_inference", "_backward_metadata_inference", "_shape_inference")


def rehearsed() -> bool:
    """True inside a run of a pipeline's stage that is there for the shapes alone: its numbers mean nothing."""
    stage = sys.modules.get(_PIPELINE)
    if stage is None:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _REHEARSALS and frame.f_code.co_filename == stage.__file__:
            return True
        frame = frame.f_back
    return False


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


def steps_of(optimizer: Any) -> int:
    """How many `step()` calls of an optimizer run on this stack: one that calls its parent's runs its hooks twice."""
    count = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == _STEP_FRAME and frame.f_code.co_filename == _STEP_FILE:
            count += frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return count


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
