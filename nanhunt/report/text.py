"""A finding as a page for a terminal: what happened, why, what to do, and the numbers behind it."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable

from ..finding import Call, Finding, TensorStats
from ..numerics import fmt
from .lines import cells, clean, elide, head, wrap
from .table import Column, table

_NOT_A_FAULT = {
    "loss_scale": "the GradScaler skips this step and lowers the scale",
    "absorbed": "it reached neither the loss nor a gradient",
}
_SHORT = {"float": "f", "bfloat": "bf", "complex": "c", "int": "i", "uint": "u"}

# How many lines a section may take, its heading included, or how many rows its table may show. With what
# stands around the rows, five lines of place and six blank ones, that makes 60 at most.
_TITLE, _WHY, _ADVICE, _ROWS, _CALLS, _CONTEXT = 3, 6, 11, 9, 8, 7
_HOPS = 5  # of the way; where there is one, the other sections make room

_ADVICE_HEADING = "What to do"
_TENSORS_HEADING = "Tensors (headroom: how many bits the largest number may still grow; own dtype, then others)"
_TRAIL_HEADING = "The calls before it, oldest first (largest number in and out)"
_FOLDERS = re.compile(r"(?<=\s)\S*[/\\](?=[^/\\\s]+:\d)")
_OVERLOAD = re.compile(r"\baten\.(\w+)\.\w+")
_WAY_HEADING = "From there to where it was noticed, op by op"
_CONTEXT_HEADING = "Context"


def title(finding: Finding) -> str:
    """The verdict in one sentence, on one line."""
    f = finding
    kind = clean(f.kind or "non-finite value")
    tensor = elide(clean(f.tensor), 120) if f.tensor else None
    the_first = "the first" if f.handled is None else "a"
    when = f", step {f.step}" if f.step is not None else ""
    nth = f" ({_ordinal(f.call)} call)" if f.call is not None and f.call > 1 else ""
    if f.phase == "input":
        said = f"{tensor or 'the input'} already held a {kind} when the model was called{nth}{when}"
    elif f.phase == "state":
        what = {"bad_parameter": "parameter ", "bad_buffer": "buffer "}.get(f.cause or "", "")
        before = f"step {f.step}" if f.step is not None else "the step"
        said = f"{what}{tensor or _who(f)} already held a {kind} before {before}"
    elif f.phase == "optimizer":
        inside = f"{'' if ' ' in tensor else 'parameter '}{tensor}" if tensor else _who(f)
        said = f"the optimizer step made {the_first} {kind}, in {inside}{when}"
    elif f.phase == "backward" and f.op == "AccumulateGrad":
        said = f"{_who(f)} made {the_first} {kind}, in backward, in the sum of {tensor or 'a gradient'}{when}"
    elif f.phase == "backward" and f.op:
        said = f"{_who(f)} made {the_first} {kind}, in the backward of {_short_op(f.op)}{nth}{when}"
    else:
        said = f"{_who(f)} made {the_first} {kind}, in {clean(f.phase)}{nth}{when}"
    if f.rank is not None:
        said += f", on rank {f.rank}"
    if f.handled is not None:
        said += f" (not a fault: {_NOT_A_FAULT.get(f.handled, clean(f.handled))})"
    return said


def page(finding: Finding, *, color: bool | None = None, width: int = 100) -> str:
    """The whole page, at most 60 lines and `width` columns; `color` None asks the terminal."""
    width = max(width, 40)
    paint = _paint if (_wants_color() if color is None else color) else _leave
    place, way = _place(finding, width), _way(finding, width)
    if finding.line and finding.source:
        place[1] = paint("cyan", place[1])
    sections = [
        [paint("bold", line) for line in wrap(title(finding), width, most=_TITLE, rest="  ")],
        place,
        wrap(finding.why or "", width, most=_WHY),
    ]
    for heading, lines in (
        (_ADVICE_HEADING, _advice(finding, width, _ADVICE - 2 * bool(way))),
        (_TENSORS_HEADING, _tensors(finding, width, paint)),
        (_WAY_HEADING, way),
        (_TRAIL_HEADING, _trail(finding, width, _CALLS - 3 * bool(way))),
        (_CONTEXT_HEADING, _context(finding, width, _CONTEXT - 2 * bool(way))),
    ):
        if len(heading) > width or (heading == _TENSORS_HEADING and lines and "headroom" not in lines[0]):
            heading = heading.partition(" (")[0]
        sections.append([paint("bold", heading), *lines] if lines else [])
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def _who(finding: Finding) -> str:
    if finding.module is None:
        return "code outside the model"
    kind = elide(clean(finding.module_type), 60) if finding.module_type else ""
    if finding.module == "":
        return f"the model's own {'code' if finding.phase == 'backward' else 'forward'}{kind and f' ({kind})'}"
    return f"{elide(clean(finding.module), 120)}{kind and f' ({kind})'}"


def _ordinal(n: int) -> str:
    return f"{n}{'th' if 10 < n % 100 < 14 else {1: 'st', 2: 'nd', 3: 'rd'}.get(n % 10, 'th')}"


def _short_op(op: str) -> str:
    parts = clean(op).split(".")
    return elide(parts[1] if parts[0] == "aten" and len(parts) > 1 else ".".join(parts), 60)


# -- sections ------------------------------------------------------------------------------------------------


def _place(finding: Finding, width: int) -> list[str]:
    """File and line, the text of the line, the operation with its dtypes, the tensor and the cause."""
    f = finding
    pairs: list[tuple[str, str]] = []
    if f.line:
        where = {"backward": "forward at", "input": "called at", "state": "read at"}.get(f.phase, "at")
        pairs.append(("summed at" if f.op == "AccumulateGrad" else where, clean(f.line)))
        if f.source:
            pairs.append(("", clean(f.source.strip())))
    if f.op or _dtypes(f):
        how = "derivative of " if f.phase == "backward" and f.op != "AccumulateGrad" else ""
        pairs.append(
            ("op" if f.op else "dtype", f"{how}{clean(f.op)} {_dtypes(f)}" if f.op else _dtypes(f).removeprefix("in "))
        )
    if f.tensor:
        pairs.append(("tensor", clean(f.tensor)))
    if f.cause:
        pairs.append(("cause", clean(f.cause).replace("_", " ")))
    label = max((len(name) for name, _ in pairs), default=0)
    return [elide(f"{name:<{label}}  {value}".rstrip(), width) for name, value in pairs]


def _dtypes(finding: Finding) -> str:
    """`in float16`, or `float16, float32 -> float32` where the operation changes the dtype."""
    made = list(dict.fromkeys(t.dtype for t in finding.tensors if t.dtype and _is_result(t)))
    read = list(dict.fromkeys(t.dtype for t in finding.tensors if t.dtype and not _is_result(t)))
    if made and read and made != read:
        return f"{', '.join(map(clean, read))} -> {', '.join(map(clean, made))}"
    return f"in {', '.join(map(clean, made or read))}" if made or read else ""


def _is_result(row: TensorStats) -> bool:
    return row.role.startswith(("output", "result", "gradient", "grad_input"))


def _advice(finding: Finding, width: int, most: int) -> list[str]:
    lines: list[str] = []
    for n, advice in enumerate(finding.advice[:most], 1):
        item = wrap(advice, width, most=3, first=f"{n}. ", rest="   ")
        if len(lines) + len(item) > most - 1:
            break
        lines += item
    return lines


def _context(finding: Finding, width: int, most: int) -> list[str]:
    lines: list[str] = []
    told: list[str] = []
    unseen: list[str] = []
    for key, value in list(finding.context.items())[:40]:
        if value is None or value == () or value == {} or value == "" or key == "path":
            continue
        (unseen if key.startswith(("blind", "not_seen")) else told).append(
            f"{clean(key).replace('_', ' ')} {_value(value)}"
        )
    lines += wrap(", ".join(told), width, most=most - 2)
    for text in unseen:
        lines += wrap(text, width, most=2, rest="  ")
    return lines[: most - 1]


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return fmt(value)
    if isinstance(value, tuple):
        return "; ".join(_value(item) for item in value[:12]) + (" ..." if len(value) > 12 else "")
    if isinstance(value, dict):
        return "(" + ", ".join(f"{clean(key)} {_value(item)}" for key, item in list(value.items())[:12]) + ")"
    return elide(clean(value), 200)


def _way(finding: Finding, width: int) -> list[str]:
    """The hops, without the folders of their files; the middle of a long way is left out."""
    hops = finding.context.get("path")
    if not isinstance(hops, tuple) or len(hops) < 2:
        return []
    lines = [_OVERLOAD.sub(r"\1", _FOLDERS.sub("", clean(str(hop)))) for hop in hops]
    lines = [line if cells(line) <= width else head(line, width - 3) + "..." for line in lines]
    if len(lines) > _HOPS:
        left_out = len(lines) - _HOPS + 1
        lines = [*lines[:2], f"(and {left_out} more ops)", *lines[-(_HOPS - 3) :]]
    return lines


def _trail(finding: Finding, width: int, most: int) -> list[str]:
    shown = finding.trail[-most:]
    if not shown:
        return []
    columns = [
        Column("module", [_call_name(c) for c in shown], left=True, shrinks=True),
        Column("type", [clean(c.module_type or "") for c in shown], left=True, shrinks=True, give=2),
        Column(
            "phase",
            ["" if c.phase == finding.phase else clean(c.phase or "") for c in shown],
            left=True,
            give=1,
        ),
        Column("call", [str(c.call) if c.call and c.call > 1 else "" for c in shown], give=3),
        Column("in", [_known(c.absmax_in) for c in shown]),
        Column("out", [_known(c.absmax_out) for c in shown]),
        Column("growth", [_growth(c) for c in shown], give=4),
    ]
    lines = table(columns, width)
    more = len(finding.trail) - len(shown)
    return lines if not (lines and more) else [*lines, f"(and {more} earlier)"]


def _call_name(call: Call) -> str:
    if call.module is None:
        return "(outside the model)"
    return clean(call.module) or "(the model itself)"


def _growth(call: Call) -> str:
    if call.absmax_in and call.absmax_out and math.isfinite(call.absmax_in) and math.isfinite(call.absmax_out):
        return f"x {fmt(float(f'{call.absmax_out / call.absmax_in:.2g}'))}"
    return ""


def _known(number: float | None) -> str:
    return "" if number is None else fmt(number)


def _tensors(finding: Finding, width: int, paint: Callable[[str, str], str]) -> list[str]:
    # What is bad comes first only where not all can be shown; else the order of the record is kept.
    rows = list(finding.tensors)
    if len(rows) > _ROWS:
        rows = sorted(rows, key=lambda row: not _is_bad(row))[:_ROWS]
    if not rows:
        return []

    def room(name: str) -> list[str]:
        return [_bits(row.headroom.get(name)) if row.dtype != name else "" for row in rows]

    columns = [
        Column("tensor", [_row_name(row, finding) for row in rows], left=True, shrinks=True),
        Column("type", [_notation(row) for row in rows], left=True, shrinks=True),
        Column("device", [clean(row.device or "") for row in rows], left=True, give=8),
        Column("min", [_known(row.min) for row in rows]),
        Column("max", [_known(row.max) for row in rows]),
        Column("absmax", [_known(row.absmax) for row in rows], give=1),
        Column("smallest", [_known(row.smallest_nonzero) for row in rows], give=2),
        Column("nan", [_count(row.nan) for row in rows]),
        Column("+inf", [_count(row.pos_inf) for row in rows]),
        Column("-inf", [_count(row.neg_inf) for row in rows]),
        Column("zero", [_share(row.zero, row.numel) for row in rows], give=3),
        Column("subnormal", [_percent(row.below_normal) for row in rows], give=9),
        Column("headroom", [_bits(row.headroom_bits) for row in rows], give=10),
        Column("f16", room("float16"), give=7),
        Column("bf16", room("bfloat16"), give=5),
        Column("e4m3", room("float8_e4m3fn"), give=6),
        Column("e5m2", room("float8_e5m2"), give=4),
    ]
    if len({row.device for row in rows}) == 1:
        columns = [column for column in columns if column.name != "device"]
    lines = table(columns, width)
    if not lines:
        return []
    header, *body = lines
    lines = [
        header,
        *(paint("red", line) if _is_bad(row) else line for row, line in zip(rows, body, strict=True)),
    ]
    more = len(finding.tensors) - len(rows)
    return lines if not more else [*lines, f"(and {more} more in the record)"]


def _is_bad(row: TensorStats) -> bool:
    return bool(row.nan or row.pos_inf or row.neg_inf)


def _row_name(row: TensorStats, finding: Finding) -> str:
    # `weight`, not `weight encoder.block.2.wo.weight`: the page is about that module
    name = (row.name or "").removeprefix(f"{finding.module}." if finding.module else "")
    return clean(row.role if not name or name == row.role else f"{row.role} {name}")


def _notation(row: TensorStats) -> str:
    """`f16[2,6,64]`"""
    dtype = clean(row.dtype or "")
    for long, short in _SHORT.items():
        if dtype.removeprefix(long).isdigit():
            dtype = short + dtype.removeprefix(long)
            break
    dtype = dtype.removeprefix("float8_").removesuffix("fn") if dtype.startswith("float8_") else dtype
    if row.shape is None:
        return dtype
    return f"{dtype}[{','.join('*' if size < 0 else str(size) for size in row.shape)}]"


def _count(n: int | None) -> str:
    return "?" if n is None else fmt(n) if n else ""


def _share(n: int | None, of: int | None) -> str:
    return "" if not n or not of else _percent(n / of)


def _percent(share: float | None) -> str:
    if not share:
        return ""
    return "<0.1%" if share < 0.001 else f"{100 * share:.3g}%"


def _bits(bits: float | None) -> str:
    return "" if bits is None else fmt(bits) if not math.isfinite(bits) else f"{bits:+.1f}"


# -- paint ---------------------------------------------------------------------------------------------------


def _wants_color() -> bool:
    """https://no-color.org and https://force-color.org, then whether anyone is looking."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return os.environ.get("TERM") != "dumb" and bool(getattr(sys.stdout, "isatty", bool)())


_CODES = {"bold": "1", "red": "31", "cyan": "36"}


def _paint(style: str, line: str) -> str:
    return f"\x1b[{_CODES[style]}m{line}\x1b[0m"


def _leave(style: str, line: str) -> str:
    return line
