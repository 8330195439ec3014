"""What the pages have in common: how a tensor, a call, a place or a number of a finding is put into words."""

from __future__ import annotations

import math
import re

from ..finding import Call, Finding, TensorStats
from ..numerics import fmt
from .lines import clean, elide

_SHORT = {"float": "f", "bfloat": "bf", "complex": "c", "int": "i", "uint": "u"}
_FOLDERS = re.compile(r"(?<=\s)\S*[/\\](?=[^/\\\s]+:\d)")
_OVERLOAD = re.compile(r"\baten\.(\w+)\.\w+")


def place(finding: Finding) -> list[tuple[str, str]]:
    """Labels and texts: file and line, the text of the line, the operation with its dtypes, tensor and cause."""
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
    return pairs


def _dtypes(finding: Finding) -> str:
    """`in float16`, or `float16, float32 -> float32` where the operation changes the dtype."""
    made = list(dict.fromkeys(t.dtype for t in finding.tensors if t.dtype and _is_result(t)))
    read = list(dict.fromkeys(t.dtype for t in finding.tensors if t.dtype and not _is_result(t)))
    if made and read and made != read:
        return f"{', '.join(map(clean, read))} -> {', '.join(map(clean, made))}"
    return f"in {', '.join(map(clean, made or read))}" if made or read else ""


def _is_result(row: TensorStats) -> bool:
    return row.role.startswith(("output", "result", "gradient", "grad_input"))


def plain(value: object) -> str:
    """A value of the context, whatever it is, cut where it is long."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return fmt(value)
    if isinstance(value, tuple):
        return "; ".join(plain(item) for item in value[:12]) + (" ..." if len(value) > 12 else "")
    if isinstance(value, dict):
        return "(" + ", ".join(f"{clean(key)} {plain(item)}" for key, item in list(value.items())[:12]) + ")"
    return elide(clean(value), 200)


def hop(line: str) -> str:
    """One step of the way, without the folders of its file and the overload of its op."""
    return _OVERLOAD.sub(r"\1", _FOLDERS.sub("", clean(line)))


def call_name(call: Call) -> str:
    if call.module is None:
        return "(outside the model)"
    return clean(call.module) or "(the model itself)"


def growth(call: Call) -> str:
    if call.absmax_in and call.absmax_out and math.isfinite(call.absmax_in) and math.isfinite(call.absmax_out):
        return f"x {fmt(float(f'{call.absmax_out / call.absmax_in:.2g}'))}"
    return ""


def known(number: float | None) -> str:
    return "" if number is None else fmt(number)


def is_bad(row: TensorStats) -> bool:
    return bool(row.nan or row.pos_inf or row.neg_inf)


def row_name(row: TensorStats, finding: Finding) -> str:
    # `weight`, not `weight encoder.block.2.wo.weight`: the page is about that module
    name = (row.name or "").removeprefix(f"{finding.module}." if finding.module else "")
    return clean(row.role if not name or name == row.role else f"{row.role} {name}")


def notation(row: TensorStats) -> str:
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


def count(n: int | None) -> str:
    return "?" if n is None else fmt(n) if n else ""


def share(n: int | None, of: int | None) -> str:
    return "" if not n or not of else percent(n / of)


def percent(part: float | None) -> str:
    if not part:
        return ""
    return "<0.1%" if part < 0.001 else f"{100 * part:.3g}%"


def bits(room: float | None) -> str:
    return "" if room is None else fmt(room) if not math.isfinite(room) else f"{room:+.1f}"
