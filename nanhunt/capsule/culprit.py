"""The culprit of a capsule as a module that can be called: rebuilt, or that of the user's own model, under its name."""

from __future__ import annotations

from torch import nn

from ..errors import UsageError
from ..naming import Names
from . import rebuild
from .reading import Piece
from .running import own

_LONGEST = 500  # characters of a path


def rebuilt(piece: Piece) -> nn.Module:
    """The module of torch.nn that a capsule describes, with the recorded weights.

    Raises:
        UsageError: when it is none of torch.nn, or the description does not fit the weights.
    """
    spec = piece.value("build") if "build" in piece else None
    if spec is None:
        name = piece.text("type") or "the culprit"
        raise UsageError(
            f"{name} is no module of torch.nn, so its class is not in the capsule: give the model that has it"
        )
    return rebuild.built(spec, own(piece.state()))


def inside(model: nn.Module, path: str) -> nn.Module:
    """The module of that name in a model.

    Raises:
        UsageError: when there is none.
    """
    found = Names(model).by_path.get(path)
    if found is None:
        raise UsageError(f"the model has no module {path!r}: is it the model that the capsule was made with?")
    return found


def rooted(module: nn.Module, path: str) -> nn.Module:
    """A tree of empty modules in which this one stands where it stood, so that it bears its name.

    Raises:
        UsageError: for a path that no module has.
    """
    if not path:
        return module
    if len(path) > _LONGEST or not all(path.split(".")):
        raise UsageError(f"this capsule is damaged: {path[:40]!r} is the path of no module")
    root = inner = nn.Module()
    *above, last = path.split(".")
    try:
        for name in above:
            child = nn.Module()
            inner.add_module(name, child)
            inner = child
        inner.add_module(last, module)
    except KeyError:  # the name of a method, say
        raise UsageError(f"this capsule is damaged: {path[:40]!r} is the path of no module") from None
    return root
