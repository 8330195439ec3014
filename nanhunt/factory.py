"""A model, its step and what belongs to them, from `module:factory` on the command line."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UsageError

if TYPE_CHECKING:
    from torch import nn

_KEYS = ("model", "step", "optimizer", "scaler", "example", "batches")
_GIVES = (
    "it must return a model, (model, step), or a mapping with 'model' and any of "
    f"{', '.join(repr(key) for key in _KEYS[1:])}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a factory made.

    `step` takes no argument where there are no `batches`, else one of them; `example` is what the model is called
    with: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
    """

    model: nn.Module
    step: Callable[..., Any] | None = None
    optimizer: Any = None
    scaler: Any = None
    example: Any = None
    batches: Sequence[Any] | None = None


def make(spec: str) -> Parts:
    """Import `package.module:factory` or `path/to/file.py:factory`, call it, and sort what it returns.

    The folder one stands in counts as a place to import from, as under `python -m`.

    Raises:
        UsageError: when the name says nothing, is not there, or the factory returns something else.
        Exception: what the factory itself dies of.
    """
    return sort(_returned(spec), spec)


def model_of(spec: str) -> nn.Module:
    """The model alone: what a factory returns, or what stands first in it.

    Raises:
        UsageError: as `make`.
        Exception: what the factory itself dies of.
    """
    made = _returned(spec)
    if isinstance(made, tuple) and made and _is_model(made[0]):
        return made[0]  # type: ignore[no-any-return]
    return sort(made, spec).model


def _returned(spec: str) -> Any:
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name:
        raise UsageError(f"{spec!r} names no factory: give module:factory or file.py:factory, such as train:build")
    made: Any = _load(where, spec)
    for part in name.split("."):
        try:
            made = getattr(made, part)
        except AttributeError:
            raise UsageError(f"{where!r} has no {name!r}: name a function that builds the model") from None
    return made() if callable(made) and not _is_model(made) else made


def sort(made: Any, spec: str = "the factory") -> Parts:
    """The parts that a factory returned, by name.

    Raises:
        UsageError: when it is none of what a factory may return.
    """
    if isinstance(made, Parts):
        return made
    if _is_model(made):
        return Parts(model=made)
    if isinstance(made, tuple) and len(made) == 2 and _is_model(made[0]) and callable(made[1]):
        return Parts(model=made[0], step=made[1])
    if isinstance(made, Mapping):
        unknown = [str(key) for key in made if key not in _KEYS]
        if unknown:
            raise UsageError(f"{spec!r} returned unknown keys {', '.join(map(repr, unknown))}: {_GIVES}")
        if _is_model(made.get("model")):
            return Parts(**made)
    raise UsageError(f"{spec!r} returned {type(made).__name__}: {_GIVES}")


def _is_model(value: Any) -> bool:
    from torch import nn

    return isinstance(value, nn.Module)


def _load(where: str, spec: str) -> Any:
    if where.endswith(".py"):
        path = Path(where)
        if not path.is_file():
            raise UsageError(f"{spec!r}: there is no file {where!r}")
        sys.path.insert(0, str(path.resolve().parent))  # what stands beside it is imported as from a script
        found = importlib.util.spec_from_file_location(path.stem, path)
        assert found is not None and found.loader is not None  # the name ends in .py
        module = importlib.util.module_from_spec(found)
        sys.modules[path.stem] = module
        found.loader.exec_module(module)
        return module
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is not None and (where + ".").startswith(error.name + "."):
            raise UsageError(
                f"{spec!r}: there is no module {error.name!r} here: give its full name, or file.py"
            ) from None
        raise
