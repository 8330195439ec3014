"""The fewest samples of a failing call that still fail, and of those the fewest rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..leaves import leaves
from .replaying import DTYPES, Capsule
from .running import kinds, own

Tensor = torch.Tensor
Pick = tuple[tuple[int, Tensor], ...]  # along which dimension, which indices

_MOST_RUNS = 2000
_ROWS = 3  # dimensions along which rows are looked for, behind that of the samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Smallest:
    """What was found.

    Attributes:
        how: what was run: "module" or "op", as in a replay, or "batch", of which the bad numbers are looked for.
        of: how many samples there were.
        samples: those that fail together, and no fewer of them do.
        rows: for each further dimension, its indices that are needed; left out where all of them are.
        runs: how often the call was run.
    """

    how: str
    of: int
    samples: tuple[int, ...]
    rows: tuple[tuple[int, tuple[int, ...]], ...] = ()
    dim: int = 0
    runs: int = 0

    def lines(self) -> Iterator[str]:
        """In words, one thought a line."""
        if not self.of:
            yield "bisect:    what was given has no dimension of samples, or the fault did not come again"
            return
        some = ", ".join(map(str, self.samples[:20])) + (", ..." if len(self.samples) > 20 else "")
        word = "sample" if len(self.samples) == 1 else "samples"
        along = f" (along dimension {self.dim})" if self.dim else ""
        still = (
            f"{word} {some} of {self.of}{along}" if len(self.samples) < self.of else f"all {self.of} samples together"
        )
        yield f"bisect:    still fails with {still}, {self.runs} runs"
        for dim, indices in self.rows:
            shown = ", ".join(map(str, indices[:20])) + (", ..." if len(indices) > 20 else "")
            yield f"           of dimension {dim} it needs {shown}"


def bisect(capsule: Capsule, model: nn.Module | None = None, *, dtype: str | None = None) -> Smallest:
    """The fewest samples with which the recorded kind of bad value still comes out.

    Samples lie along the first dimension of the inputs or, where none of them can be taken away there, the second, as
    in a sequence of steps. A module that mixes its samples, such as a batch norm, may need them all.

    Raises:
        UsageError: when the capsule cannot be run at all.
    """
    trial = Trial(capsule, model, DTYPES[dtype] if dtype is not None else None)
    best = Smallest(how=trial.how, of=0, samples=())
    if not trial.fails(()):
        return best
    for dim in (0, 1):
        size = trial.size(dim)
        if size is None:
            continue
        samples = fewest(range(size), lambda some: trial.fails(((dim, _index(some)),)))  # noqa: B023
        if not best.of or (len(samples) < len(best.samples) and best.of == len(best.samples)):
            best = Smallest(how=trial.how, of=size, samples=tuple(samples), dim=dim)
        if len(samples) < size:
            break
    if not best.of:
        return best
    pick: Pick = ((best.dim, _index(best.samples)),)
    rows: list[tuple[int, tuple[int, ...]]] = []
    for dim in range(1, 1 + _ROWS):
        size = trial.size(dim)
        if dim == best.dim or size is None or dim == trial.last or len(best.samples) == best.of > 1:
            continue
        needed = fewest(range(size), lambda some: trial.fails((*pick, (dim, _index(some)))))  # noqa: B023
        if len(needed) < size:
            rows.append((dim, tuple(needed)))
            pick = (*pick, (dim, _index(needed)))
    return Smallest(how=best.how, of=best.of, samples=best.samples, rows=tuple(rows), dim=best.dim, runs=trial.runs)


def fewest(items: Sequence[int], fails: Callable[[Sequence[int]], bool]) -> list[int]:
    """A part of `items` that fails, of which no part with one item less does (delta debugging, Zeller 1999)."""
    left, pieces = list(items), 2
    while len(left) > 1:
        size = -(-len(left) // pieces)
        chunks = [left[at : at + size] for at in range(0, len(left), size)]
        found = next((chunk for chunk in chunks if fails(chunk)), None)
        if found is not None:
            left, pieces = found, 2
            continue
        rests = ([one for one in left if one not in set(chunk)] for chunk in chunks) if len(chunks) > 2 else ()
        rest = next((rest for rest in rests if fails(rest)), None)
        if rest is not None:
            left, pieces = rest, max(pieces - 1, 2)
        elif pieces >= len(left):
            break
        else:
            pieces = min(2 * pieces, len(left))
    return left


class Trial:
    """The call of a capsule, run on parts of what it was given."""

    def __init__(
        self, capsule: Capsule, model: nn.Module | None, dtype: torch.dtype | None, *, how: str | None = None
    ) -> None:
        self.how, self._run, self.given = capsule.trial(model, dtype, how=how)
        self._kind = capsule.finding.kind
        self.runs = 0
        self._main = self._shape()

    def _shape(self) -> torch.Size:
        """Along what parts are taken: the shape of the result, when an input has as many samples, else of an input."""
        given = [t for _, t in leaves(self.given) if not isinstance(t, nn.Parameter) and t.dim()]
        try:
            made = [t.shape for _, t in leaves(self._run(own(self.given))) if t.dim()]
        except Exception:
            made = []
        fitting = [shape for shape in made if any(t.shape[0] == shape[0] for t in given)]
        largest = max((t.shape for t in given), key=lambda shape: shape.numel(), default=torch.Size())
        return fitting[0] if fitting else largest

    def size(self, dim: int) -> int | None:
        return self._main[dim] if dim < len(self._main) and self._main[dim] > 1 else None

    @property
    def last(self) -> int:
        """The last dimension, whose numbers belong together."""
        return len(self._main) - 1

    def fails(self, pick: Pick) -> bool:
        return self._bad(lambda: self.taken(pick))

    def bad(self, call: Any) -> bool:
        """Whether it fails with these arguments."""
        return self._bad(lambda: own((call, {})))

    def _bad(self, given: Callable[[], Any]) -> bool:
        if self.runs >= _MOST_RUNS:
            return False
        self.runs += 1
        try:
            return self._kind in kinds(self._run(given()))
        except Exception:  # what it was given does not fit together any more
            return False

    def taken(self, pick: Pick) -> Any:
        """What the call was given, cut down to some indices of some dimensions; weights are left whole."""

        def part(t: Tensor) -> Tensor:
            if isinstance(t, nn.Parameter):
                return t
            taken = t.detach()
            for dim, indices in pick:
                if dim < taken.dim() and t.shape[dim] == self._main[dim]:
                    taken = taken.index_select(dim, indices.to(t.device))
            return taken.requires_grad_(t.requires_grad)

        return pytree.tree_map_only(Tensor, part, own(self.given))


def _index(some: Sequence[int]) -> Tensor:
    return torch.tensor(list(some), dtype=torch.long)
