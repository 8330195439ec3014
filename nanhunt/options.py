"""What may be asked of a watch, and the words for what may not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from .errors import UsageError
from .finding import Finding
from .naming import walk
from .report.files import MAX_MB, MOST_RING
from .verdict import KINDS

OnHit = str | Callable[[Finding], object]

_ON_HIT = ("raise", "warn", "record")
_STOP = ("confirmed", "first")
_DETAIL = ("auto", "module", "op")
_COMPILED = ("error", "eager", "retrace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of `nanhunt.watch`, checked."""

    optimizer: torch.optim.Optimizer | None
    scaler: Any
    on_hit: OnHit
    stop: str
    detail: str
    kinds: tuple[str, ...]
    allow: tuple[str, ...]
    steps: tuple[int, int] | None
    every: int
    compiled: str
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    backward: bool = True
    capsule: str | None = None
    max_mb: float = MAX_MB
    slim: bool = False
    ring: int = 0
    profile: bool = False
    defer: bool = False
    ranks: bool = True  # tell other ranks, and hear of them
    catch: Any = None  # of a hunt, which writes the capsule itself

    def looked_at(self, model: nn.Module) -> Callable[[str], bool]:
        """Which modules are looked at, by path. A pattern takes a module with all that is inside it.

        Raises:
            UsageError: for a pattern that fits no module of the model.
        """
        if not self.only and not self.skip:
            return lambda path: True
        paths = [path for path, _ in walk(model)]
        for name, patterns in (("only", self.only), ("skip", self.skip)):
            for pattern in patterns:
                if not any(fnmatchcase(path, pattern) for path in paths):
                    some = ", ".join(repr(path) for path in paths[1:6])
                    raise UsageError(f"{name}: no module fits {pattern!r}; there are {some}, ...")

        def looked_at(path: str) -> bool:
            around = _around(path)
            wanted = not self.only or any(fnmatchcase(one, p) for one in around for p in self.only)
            return wanted and not any(fnmatchcase(one, p) for one in around for p in self.skip)

        return looked_at


def _around(path: str) -> list[str]:
    """A path and those of the modules around it; the root's own, "", stands for itself alone."""
    parts = path.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def checked(
    *, kinds: Iterable[str], allow: Iterable[str], only: Iterable[str] = (), skip: Iterable[str] = (), **asked: Any
) -> Options:
    """The options, or a `UsageError` that names the legal values."""
    _one_of("on_hit", asked["on_hit"], _ON_HIT, also="a callable that gets the Finding", fits=callable)
    _one_of("stop", asked["stop"], _STOP)
    _one_of("detail", asked["detail"], _DETAIL)
    _one_of("compiled", asked["compiled"], _COMPILED)
    kinds = _words("kinds", kinds)
    if not kinds:
        raise UsageError(f"kinds is empty: name at least one of {', '.join(KINDS)}")
    for kind in kinds:
        _one_of("kinds", kind, KINDS)
    steps, every = asked["steps"], asked["every"]
    if steps is not None and not (
        isinstance(steps, tuple)
        and len(steps) == 2
        and all(isinstance(s, int) for s in steps)
        and 0 <= steps[0] < steps[1]
    ):
        raise UsageError(f"steps={steps!r}: give a pair (first, end) with 0 <= first < end, such as steps=(100, 200)")
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise UsageError(f"every={every!r}: give a whole number of steps, 1 or more")
    trained_with(asked["optimizer"], asked["scaler"])
    if not isinstance(asked.get("backward", True), bool):
        raise UsageError(f"backward={asked['backward']!r}: give True, or False to look at forward alone")
    if not isinstance(asked.get("profile", False), bool):
        raise UsageError(f"profile={asked['profile']!r}: give True to have the ranges of all modules in watch.profile")
    asked |= capsule_options(
        asked.get("capsule"), asked.get("max_mb", MAX_MB), asked.get("slim", False), asked.get("ring", 0)
    )
    only, skip, allow = _words("only", only), _words("skip", skip), _words("allow", allow)
    if asked["detail"] == "op" and (only or skip or not asked.get("backward", True)):
        raise UsageError('detail="op" follows every value from its birth: leave only=, skip= and backward= out')
    return Options(kinds=kinds, allow=allow, only=only, skip=skip, **asked)


def capsule_options(folder: Any, most: Any, slim: Any, ring: Any = 0) -> dict[str, Any]:
    """Where a capsule of a fault goes, and how large it may be, checked."""
    if folder is not None:
        if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
            raise UsageError(f"capsule={folder!r}: name a folder, which may be a new one")
        if os.path.exists(folder) and not os.path.isdir(folder):
            raise UsageError(f"capsule={os.fspath(folder)!r} is a file: name a folder, which may be a new one")
        folder = os.path.abspath(os.fspath(folder))  # the program may change its folder
    if isinstance(most, bool) or not isinstance(most, (int, float)) or not 0 < most < 1 << 40:
        raise UsageError(f"max_mb={most!r}: give a number of megabytes, such as 256")
    if not isinstance(slim, bool):
        raise UsageError(f"slim={slim!r}: give True for the failing rows alone, or False")
    if isinstance(ring, bool) or not isinstance(ring, int) or not 0 <= ring <= MOST_RING:
        raise UsageError(f"ring={ring!r}: give a number of batches from 0 to {MOST_RING}")
    return {"capsule": folder, "max_mb": float(most), "slim": slim, "ring": ring}


def trained_with(optimizer: Any, scaler: Any) -> None:
    """Refuse an optimizer or a scaler that is none."""
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"optimizer is a {type(optimizer).__name__}: pass a torch.optim.Optimizer, or leave it out")
    if scaler is not None and not hasattr(scaler, "get_scale"):
        raise UsageError(f"scaler is a {type(scaler).__name__}: pass a torch.amp.GradScaler, or leave it out")


def made(model: nn.Module) -> None:
    """Refuse a model with lazy parameters or buffers, which its first call makes: nobody can put them back."""
    named = (*model.named_parameters(), *model.named_buffers())
    lazy = [name for name, tensor in named if is_lazy(tensor)]
    if lazy:
        some = ", ".join(lazy[:3]) + (", ..." if len(lazy) > 3 else "")
        raise UsageError(f"{some} are lazy and not made yet: call the model once, as model(batch), before")


def _words(name: str, value: Any) -> tuple[str, ...]:
    words = (value,) if isinstance(value, str) else value
    if not isinstance(words, (tuple, list, set, frozenset)) or not all(isinstance(word, str) for word in words):
        raise UsageError(f"{name}={value!r}: give a word or a tuple of words")
    return tuple(words)


def _one_of(
    name: str,
    value: Any,
    legal: tuple[str, ...],
    *,
    also: str = "",
    fits: Callable[[Any], bool] | None = None,
) -> None:
    if (isinstance(value, str) and value in legal) or (fits is not None and not isinstance(value, str) and fits(value)):
        return
    words = ", ".join(repr(word) for word in legal) + (f" or {also}" if also else "")
    raise UsageError(f"{name}={value!r} is not known: use one of {words}")
