"""What a run would take of memory, found without taking it: the same ops on tensors that have no numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import UsageError
from ..schemas import schema_of

Tensor = torch.Tensor

_MOST_OPS = 200_000


class _Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what each op gives; no op runs that would go beyond the limit."""

    def __init__(self, most: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most, self.bytes, self.ops = most, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.ops += 1
        if not schema_of(func).views:
            given = {id(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            made = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor) and id(t) not in given]
            self.bytes += sum(t.numel() * t.element_size() for t in made)
        if self.bytes > self.most or self.ops > _MOST_OPS:
            raise _TooMuch
        return out


class _TooMuch(Exception):
    pass


def shadow(value: Any) -> Any:
    """The same value, with tensors that have shapes and no numbers; parameters stay parameters."""

    def one(t: Tensor) -> Tensor:
        bare = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
        return torch.nn.Parameter(bare, requires_grad=t.requires_grad) if isinstance(t, torch.nn.Parameter) else bare

    def other(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return one(leaf)
        return torch.device("meta") if isinstance(leaf, torch.device) else leaf

    return pytree.tree_map(other, value)


def rehearse(run: Callable[[], Any], *, most: int, times: int = 1) -> None:
    """Run something on shadows, and refuse it when all that it gives, `times` over, has more than `most` bytes.

    Raises:
        UsageError: then, and when it cannot be run without numbers.
    """
    try:
        with torch.no_grad(), _Counted(most // times):
            run()
    except _TooMuch:
        raise UsageError(f"running it would take more than {most / 1e6:.0f} MB: see --max-mb") from None
    except Exception as error:
        first = str(error).split("\n")[0][:200]
        raise UsageError(f"it cannot be run on what the capsule holds: {first}") from None
