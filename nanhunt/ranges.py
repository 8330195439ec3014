"""How large the numbers of a step were, module by module: a text file to review, and what has changed since."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .errors import UsageError
from .numerics import FORMATS, Format, fmt

_FORMAT = 1
_NOISE = 0.1  # bits: an update leaves a number that moved by less as it stands, so that a diff shows what matters
_SHOWN = 20  # modules that a message names
_ROOT = "(the model itself)"
_PLAIN = re.compile(r"[\w.\-\[\]]+", re.ASCII)
_FIRST = re.compile(r"# nanhunt ranges, format (\d+)\.")
_HEAD = """\
# nanhunt ranges, format {number}. The largest |number| that each module gave out in a step (output) and that came back
# to it in backward (gradient), each with the bits of headroom that this leaves in {dtype}, whose largest number is
# {largest}. Modules stand in the order of their first call. `pytest --nanhunt-update` writes this file: review it.
dtype {dtype}
#  output   bits  gradient   bits  type  module
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The largest finite |number| that one module gave out, and that came back to it; None where there was none."""

    module: str
    type: str
    output: float | None = None
    gradient: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """The ranges of one step, in the order in which the modules were first called, and the dtype they should fit."""

    dtype: str
    modules: tuple[Range, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Headroom that a tensor of a module has lost: its largest |number| before and now, bits lost and bits left."""

    module: str
    type: str
    tensor: str
    before: float
    now: float
    bits: float
    left: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Stored ranges against those of today: what lost too much headroom (worst first), what is new, what is gone."""

    dtype: str
    bits: float
    lost: tuple[Loss, ...]
    new: tuple[str, ...]
    gone: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.lost or self.new or self.gone)


class RangesChanged(AssertionError):
    """What `check_ranges` raises: the first line names the worst module, `comparison` holds all of it."""

    def __init__(self, text: str, comparison: Comparison | None = None) -> None:
        super().__init__(text)
        self.comparison = comparison


def form_of(dtype: object) -> Format:
    """The format behind a dtype that ranges are held against.

    Raises:
        UsageError: for a dtype that is no floating-point format, naming the legal ones.
    """
    form = FORMATS.get(str(dtype).removeprefix("torch."))
    if form is None:
        raise UsageError(f"dtype={str(dtype)!r} is no floating-point format: use one of {', '.join(FORMATS)}")
    return form


def room(size: float, form: Format) -> float:
    """Bits of headroom. What rounds to zero counts as the smallest number there is, so that zero has a distance."""
    return math.log2(form.max) - math.log2(max(size, form.smallest_subnormal))


# --- the file -----------------------------------------------------------------------------------------------


def written(ranges: Ranges, before: Ranges | None = None) -> str:
    """The file; numbers that have hardly moved since `before` are written as they stood there."""
    form = form_of(ranges.dtype)
    stood = {} if before is None else {row.module: row for row in before.modules}
    lines = [_HEAD.format(number=_FORMAT, dtype=form.name, largest=f"{form.max:g}")]
    for row in ranges.modules:
        old = stood.get(row.module, row)
        cells = [_cell(_settled(getattr(old, t), getattr(row, t)), form) for t in ("output", "gradient")]
        lines.append(f"{' '.join(cells)}  {_word(row.type)}  {path_of(row.module)}\n")
    return "".join(lines)


def parsed(text: str, name: str) -> Ranges:
    """The ranges of a file; `name` is what errors call it.

    Raises:
        UsageError: for text that `written` has not written, with the line and what to do.
    """
    first = _FIRST.match(text)
    if first is None or int(first[1]) != _FORMAT:
        what = "no nanhunt ranges" if first is None else f"nanhunt ranges of format {first[1]}, not {_FORMAT}"
        raise UsageError(f"{name} holds {what}: write it anew with pytest --nanhunt-update")
    dtype, rows = "", []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            if not dtype:
                word, dtype = line.split()
                if word != "dtype":
                    raise ValueError
                dtype = form_of(dtype).name
            else:
                output, _, gradient, _, kind, module = line.split(None, 5)
                rows.append(Range(module=_module(module), type=kind, output=_size(output), gradient=_size(gradient)))
        except ValueError:
            raise UsageError(
                f"{name}, line {number}: {line.strip()[:80]!r} is no row of ranges (a merge conflict?): "
                "write the file anew with pytest --nanhunt-update"
            ) from None
    if not dtype:
        raise UsageError(f"{name} names no dtype: write it anew with pytest --nanhunt-update")
    return Ranges(dtype=dtype, modules=tuple(rows))


def _settled(before: float | None, now: float | None) -> float | None:
    if before and now and abs(math.log2(now) - math.log2(before)) < _NOISE:
        return before
    return now


def _cell(size: float | None, form: Format) -> str:
    if size is None:
        return f"{'-':>9} {'-':>6}"
    size = float(f"{size:.3g}")  # the bits are those of the number that is written
    return f"{size:>9.3g} {room(size, form):>+6.1f}"


def _size(cell: str) -> float | None:
    if cell == "-":
        return None
    size = float(cell)
    if not 0 <= size < math.inf:
        raise ValueError
    return size


def _word(text: str) -> str:
    return re.sub(r"\s+", "_", text) or "_"


def path_of(module: str) -> str:
    """A module's path as messages and files have it, in one word."""
    if not module:
        return _ROOT
    return module if _PLAIN.fullmatch(module) else json.dumps(module)


def _module(cell: str) -> str:
    cell = cell.strip()
    if cell == _ROOT:
        return ""
    return str(json.loads(cell)) if cell.startswith('"') else cell


# --- the comparison -----------------------------------------------------------------------------------------


def compared(before: Ranges, now: Ranges, bits: float) -> Comparison:
    """What has lost more than `bits` of headroom in `now.dtype`, or does not fit into it any more."""
    form = form_of(now.dtype)
    stored = {row.module: row for row in before.modules}
    there = {row.module for row in now.modules}
    lost: list[Loss] = []
    new: list[str] = []
    gone = [path_of(row.module) for row in before.modules if row.module not in there]
    for row in now.modules:
        old = stored.get(row.module)
        if old is None:
            new.append(path_of(row.module))
            continue
        for tensor in ("output", "gradient"):
            was, size = getattr(old, tensor), getattr(row, tensor)
            if was is None and size is not None:
                new.append(f"the {tensor} of {path_of(row.module)}")
            elif was is not None and size is None:
                gone.append(f"the {tensor} of {path_of(row.module)}")
            elif was is not None:
                left = room(size, form)
                smaller = room(was, form) - left
                # The number in the file is rounded: by less than a hundredth of a bit.
                if smaller > bits + 0.01 or (left < 0 <= room(was, form) and smaller > _NOISE):
                    lost.append(
                        Loss(
                            module=row.module,
                            type=row.type,
                            tensor=tensor,
                            before=was,
                            now=size,
                            bits=smaller,
                            left=left,
                        )
                    )
    lost.reverse()  # of a tensor that several modules hand on, the innermost is named: it was called last
    lost.sort(key=lambda one: -one.bits)
    return Comparison(dtype=form.name, bits=bits, lost=tuple(lost), new=tuple(new), gone=tuple(gone))


def told(comparison: Comparison, file: str) -> str:
    """The comparison in words, the worst first."""
    return "\n".join(_lines(comparison, file))


def _lines(c: Comparison, file: str) -> Iterator[str]:
    if c.lost:
        worst = c.lost[0]
        more = f" (and {len(c.lost) - 1} more)" if len(c.lost) > 1 else ""
        yield f"{_sentence(worst)} in {c.dtype}{more}"
        yield f"More than {c.bits:g} bits of headroom were lost, or the number no longer fits, worst first:"
        for one in c.lost[:_SHOWN]:
            yield f"  {_sentence(one)}"
        if len(c.lost) > _SHOWN:
            yield f"  and {len(c.lost) - _SHOWN} more"
    else:
        yield f"the stored ranges are of another model: {len(c.new)} new, {len(c.gone)} gone"
    for what, names in (("New, not in the file", c.new), ("Gone, in the file only", c.gone)):
        if names:
            more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            yield f"{what}: {', '.join(names[:_SHOWN])}{more}"
    yield f"The ranges are stored in {file}. If the change is meant, run pytest --nanhunt-update and review the file."


def _sentence(one: Loss) -> str:
    return (
        f"{path_of(one.module)} ({one.type}): largest {one.tensor} {fmt(one.before)} -> {fmt(one.now)}, "
        f"{one.bits:.1f} bits lost, {one.left:+.1f} left"
    )
