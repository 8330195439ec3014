"""Lines of the user's code: who called an op, who called backward, what runs inside a backward."""

from __future__ import annotations

import gc
import linecache
import os
import sys
import sysconfig
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import NamedTuple

import torch

Site = tuple[str, int]

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_DEMO = _OURS + "demo.py"  # stands for a user's program
_SKIPPED = (_TORCH, _OURS)
_STDLIB = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib"))
_SITE_PACKAGES = ("site-packages", "dist-packages")
_GRAPH = os.path.join(_TORCH, "autograd", "graph.py")
_CHECKPOINT = os.path.join(_TORCH, "utils", "checkpoint.py")
_MODULE = os.path.join(_TORCH, "nn", "modules", "module.py")
_PRINTING = os.path.join(_TORCH, "_tensor_str.py")
_OPTIM = os.path.join(_TORCH, "optim", "")
_UPDATES = tuple(os.path.join(_TORCH, *p) for p in (("amp", "grad_scaler.py"), ("nn", "utils", "clip_grad.py")))
_SCALER = _UPDATES[0]
_SCALING = ("scale", "apply_scale")
_known: dict[str, bool] = {}


def is_user(filename: str) -> bool:
    """Whether a frame of this file is the user's: not torch, not nanhunt, not the standard library."""
    known = _known.get(filename)
    if known is None:
        if filename.startswith("<"):
            # `python -c` and `python -` have no file; code that attrs, dataclasses or fx generate has none either.
            known = filename == "<stdin>" or filename.startswith("<ipython") or filename == "<string>"
        else:
            inside = filename.startswith(_STDLIB) and not any(part in filename for part in _SITE_PACKAGES)
            known = filename == _DEMO or (not filename.startswith(_SKIPPED) and not inside)
        _known[filename] = known
    return known


def _users(frame: FrameType) -> bool:
    filename = frame.f_code.co_filename
    return is_user(filename) and (filename != "<string>" or frame.f_globals.get("__name__") == "__main__")


def user_site(frame: FrameType | None = None) -> Site | None:
    """File and line of the innermost frame of the user's, from `frame` outwards."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        if is_user(frame.f_code.co_filename) and _users(frame):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def caller() -> Site | None:
    """The same for the call of a module, from within its hooks: called for each one, so it takes the short way."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None:
        filename = frame.f_code.co_filename
        user = _known.get(filename)
        if (is_user(filename) if user is None else user) and (filename != "<string>" or _users(frame)):
            return filename, frame.f_lineno
        frame = frame.f_back
    return None


class Inside(NamedTuple):
    """What Python code runs between the autograd engine and the op: none, the user's, or a forward once more."""

    site: Site | None
    again: bool
    hook: CodeType | None = None  # the user's function that the engine called


def _is_engine(frame: FrameType) -> bool:
    return frame.f_code.co_name == "_engine_run_backward" and frame.f_code.co_filename == _GRAPH


def inside_backward(frame: FrameType | None = None) -> Inside:
    """Looks from `frame` outwards to the engine: a checkpoint's recomputation calls modules or its own file."""
    frame = frame or sys._getframe(1)
    site, again, hook = None, False, None
    while frame is not None and not _is_engine(frame):
        code = frame.f_code
        if _users(frame):
            site, hook = site or (code.co_filename, frame.f_lineno), code
        if code.co_filename == _CHECKPOINT or (code.co_name == "_call_impl" and code.co_filename == _MODULE):
            again = True
        frame = frame.f_back
    return Inside(site, again, hook)


def backward_site(frame: FrameType | None = None) -> Site | None:
    """The line that called backward. On an accelerator the engine has threads of its own: then any thread's."""
    found = _engine_above(frame or sys._getframe(1))
    if found is None:
        found = next((engine for stack in _all_stacks() if (engine := _engine_above(stack)) is not None), None)
    return user_site(found) if found is not None else None


def _engine_above(frame: FrameType | None) -> FrameType | None:
    while frame is not None and not _is_engine(frame):
        frame = frame.f_back
    return frame


def _all_stacks() -> list[FrameType]:
    # Python holds a lock while it lists the threads, and a collection that starts meanwhile may want it too
    # (python/cpython#106883): it would wait for itself for ever.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return list(sys._current_frames().values())
    finally:
        if collecting:
            gc.enable()


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def optimizer_running(frame: FrameType | None = None) -> tuple[bool, torch.optim.Optimizer | None]:
    """Whether an update is on the stack (a step, unscaling, clipping), and the optimizer when it is known."""
    updating = False
    for one in _outwards(frame or sys._getframe(1)):
        filename, name = one.f_code.co_filename, one.f_code.co_name
        updating = updating or filename.startswith(_OPTIM) or (filename in _UPDATES and name not in _SCALING)
        if name == "step" and isinstance(one.f_locals.get("self"), torch.optim.Optimizer):
            return True, one.f_locals["self"]
    return updating, None


def scaling_loss(frame: FrameType | None = None) -> bool:
    """Whether a GradScaler is multiplying the loss."""
    return any(
        one.f_code.co_filename == _SCALER and one.f_code.co_name in _SCALING
        for one in _outwards(frame or sys._getframe(1))
    )


def printing(frame: FrameType | None = None) -> bool:
    """Whether a tensor is being printed: that reads numbers, but nobody acts on them."""
    return any(one.f_code.co_filename == _PRINTING for one in _outwards(frame or sys._getframe(1)))


def text(site: Site | None) -> tuple[str | None, str | None]:
    """`("file.py:88", "the text of that line")`."""
    if site is None:
        return None, None
    return f"{site[0]}:{site[1]}", linecache.getline(*site).strip() or None
