"""Which numbers came too close to the limit of a dtype: a line, a table, and what to do."""

from __future__ import annotations

import fnmatch
import math
from dataclasses import dataclass

from .numerics import FORMATS, fmt
from .ranges import path_of, room

_SHOWN, _WIDTH = 20, 100
_WIDER = ("bfloat16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The largest finite |number| of one kind of tensor of one module, in the dtype that it had."""

    module: str
    type: str
    tensor: str
    dtype: str
    size: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Near:
    """A peak that came too close to the limit of `dtype`: `left` bits below it, above it when negative."""

    module: str
    type: str
    tensor: str
    dtype: str
    size: float
    left: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """All peaks with fewer than `bits` of headroom, the closest first; at least one."""

    bits: float
    near: tuple[Near, ...]

    def title(self) -> str:
        """The closest one, in one line."""
        one, more = self.near[0], len(self.near) - 1
        said = f"{path_of(one.module)} ({one.type}): largest {one.tensor} {fmt(one.size)}, {one.left:+.1f} bits of "
        return f"{said}headroom in {one.dtype}, {self.bits:g} are asked for{f' (and {more} more)' if more else ''}"

    def page(self) -> str:
        """The title, a table of the closest, and what to do about the first."""
        from .report.table import Column, table

        near = self.near[:_SHOWN]
        columns = [
            Column("module", [path_of(one.module) for one in near], left=True, shrinks=True),
            Column("type", [one.type for one in near], left=True, shrinks=True, give=1),
            Column("tensor", [one.tensor for one in near], left=True),
            Column("largest", [fmt(one.size) for one in near]),
            Column("headroom", [f"{one.left:+.1f}" for one in near]),
            Column("dtype", [one.dtype for one in near], left=True),
            Column("its limit", [fmt(FORMATS[one.dtype].max) for one in near], give=2),
        ]
        more = [f"and {len(self.near) - _SHOWN} more"] if len(self.near) > _SHOWN else []
        advice = [f"{at}. {one}" for at, one in enumerate(_advice(near[0], self.bits), 1)]
        heading = f"Closer than {self.bits:g} bits to the limit of a dtype, closest first"
        return "\n".join([self.title(), "", heading, *table(columns, _WIDTH), *more, "", "What to do", *advice])


def close(peaks: list[Peak], bits: float, dtype: str | None = None, allow: tuple[str, ...] = ()) -> Shortage | None:
    """The peaks with fewer than `bits` of headroom; None when there are none.

    Each is held against its own dtype, or against `dtype` where one is given. `allow` are patterns (`fnmatch`) of
    module paths that may come closer.
    """
    found = []
    for peak in reversed(peaks):  # of a tensor that several modules hand on, the innermost is named: it came last
        if any(fnmatch.fnmatchcase(peak.module, pattern) for pattern in allow):
            continue
        form = FORMATS.get(dtype or peak.dtype)
        if form is not None and (left := room(peak.size, form)) < bits:
            found.append(
                Near(module=peak.module, type=peak.type, tensor=peak.tensor, dtype=form.name, size=peak.size, left=left)
            )
    found.sort(key=lambda one: one.left)
    return Shortage(bits=bits, near=tuple(found)) if found else None


def _advice(one: Near, bits: float) -> list[str]:
    where = path_of(one.module)
    factor = 2 ** max(math.ceil(bits - one.left), 1)
    said = [f"Make the {one.tensor} of {where} smaller, by a factor of {fmt(factor)}: a norm or a scale before it."]
    if one.tensor == "gradient":
        said = [f"Make the gradient of {where} smaller, by a factor of {fmt(factor)}: a smaller loss or loss scale."]
    wider = [name for name in _WIDER if name != one.dtype and room(one.size, FORMATS[name]) >= bits]
    if wider:
        said.append(f"Or compute {where} in {' or '.join(wider)}, where that leaves the room that is asked for.")
    if one.module:
        said.append(f'If it may come that close, allow it: @pytest.mark.nanhunt(allow="{one.module}").')
    return said
