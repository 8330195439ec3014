"""A finding as a page for a terminal: what happened, why, what to do, and the numbers behind it."""

from __future__ import annotations

from ..finding import PICTURES, Finding
from .lines import cells, clean, elide, head, wrap
from .paint import Paint, painter
from .table import Column, table
from .words import bits, call_name, count, growth, hop, is_bad, known, notation, percent, place, plain, row_name, share

_NOT_A_FAULT = {
    "loss_scale": "the GradScaler skips this step and lowers the scale",
    "absorbed": "it reached neither the loss nor a gradient",
}

# How many lines a section may take, its heading included, or how many rows its table may show. With what
# stands around the rows, five lines of place and six blank ones, that makes 60 at most.
_TITLE, _WHY, _ADVICE, _ROWS, _CALLS, _CONTEXT = 3, 6, 11, 9, 8, 7
_HOPS = 5  # of the way; where there is one, the other sections make room

_ADVICE_HEADING = "What to do"
_TENSORS_HEADING = "Tensors (headroom: how many bits the largest number may still grow; own dtype, then others)"
_TRAIL_HEADING = "The calls before it, oldest first (largest number in and out)"
_ELSEWHERE = ("path", *PICTURES)  # context that has a section of its own, or none
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
        if f.cause in ("unknown", "collective") and f.op is None:  # see coarse.cause
            said = (
                f"a gradient went bad between backward and the update, which put {the_first} {kind} in {inside}{when}"
            )
        else:
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
    paint = painter(color)
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
    pairs = place(finding)
    label = max((len(name) for name, _ in pairs), default=0)
    return [elide(f"{name:<{label}}  {value}".rstrip(), width) for name, value in pairs]


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
        if value is None or value == () or value == {} or value == "" or key in _ELSEWHERE:
            continue
        (unseen if key.startswith(("blind", "not_seen")) else told).append(
            f"{clean(key).replace('_', ' ')} {plain(value)}"
        )
    lines += wrap(", ".join(told), width, most=most - 2)
    for text in unseen:
        lines += wrap(text, width, most=2, rest="  ")
    return lines[: most - 1]


def _way(finding: Finding, width: int) -> list[str]:
    """The hops, without the folders of their files; the middle of a long way is left out."""
    hops = finding.context.get("path")
    if not isinstance(hops, tuple) or len(hops) < 2:
        return []
    lines = [hop(str(one)) for one in hops]
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
        Column("module", [call_name(c) for c in shown], left=True, shrinks=True),
        Column("type", [clean(c.module_type or "") for c in shown], left=True, shrinks=True, give=2),
        Column(
            "phase",
            ["" if c.phase == finding.phase else clean(c.phase or "") for c in shown],
            left=True,
            give=1,
        ),
        Column("call", [str(c.call) if c.call and c.call > 1 else "" for c in shown], give=3),
        Column("in", [known(c.absmax_in) for c in shown]),
        Column("out", [known(c.absmax_out) for c in shown]),
        Column("growth", [growth(c) for c in shown], give=4),
    ]
    lines = table(columns, width)
    more = len(finding.trail) - len(shown)
    return lines if not (lines and more) else [*lines, f"(and {more} earlier)"]


def _tensors(finding: Finding, width: int, paint: Paint) -> list[str]:
    # What is bad comes first only where not all can be shown; else the order of the record is kept.
    rows = list(finding.tensors)
    if len(rows) > _ROWS:
        rows = sorted(rows, key=lambda row: not is_bad(row))[:_ROWS]
    if not rows:
        return []

    def room(name: str) -> list[str]:
        return [bits(row.headroom.get(name)) if row.dtype != name else "" for row in rows]

    columns = [
        Column("tensor", [row_name(row, finding) for row in rows], left=True, shrinks=True),
        Column("type", [notation(row) for row in rows], left=True, shrinks=True),
        Column("device", [clean(row.device or "") for row in rows], left=True, give=8),
        Column("min", [known(row.min) for row in rows]),
        Column("max", [known(row.max) for row in rows]),
        Column("absmax", [known(row.absmax) for row in rows], give=1),
        Column("smallest", [known(row.smallest_nonzero) for row in rows], give=2),
        Column("nan", [count(row.nan) for row in rows]),
        Column("+inf", [count(row.pos_inf) for row in rows]),
        Column("-inf", [count(row.neg_inf) for row in rows]),
        Column("zero", [share(row.zero, row.numel) for row in rows], give=3),
        Column("subnormal", [percent(row.below_normal) for row in rows], give=9),
        Column("headroom", [bits(row.headroom_bits) for row in rows], give=10),
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
        *(paint("red", line) if is_bad(row) else line for row, line in zip(rows, body, strict=True)),
    ]
    more = len(finding.tensors) - len(rows)
    return lines if not more else [*lines, f"(and {more} more in the record)"]
