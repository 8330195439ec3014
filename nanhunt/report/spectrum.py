"""A profile as a page for a terminal: the answer, what stands against it, the numbers, and a picture of exponents."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..numerics import COMPARED, FORMATS, Format, fmt
from ..precision.narrowing import Verdict
from ..precision.profiles import GRADIENTS, ModuleProfile, Numbers, Profile
from ..ranges import path_of
from .lines import clean, elide, head, wrap
from .table import Column, table
from .words import bits, percent

# What a row of a table or picture is of, in words; a module is shown by these roles.
ROLE_WORDS = {
    "inputs": "inputs",
    "outputs": "outputs",
    "output_gradients": "gradients",
    "weights": "weights",
    "weight_gradients": "weight grads",
}
_WORST, _ROWS, _WARNED, _KEPT, _NOTES = 3, 12, 4, 8, 4
_SHADES = " .:-=+*#%@"  # from nothing on, each a third of the next, up to all
BETWEEN = (
    "Not seen: numbers that a module's own forward makes and does not give out, such as squares in a norm. "
    "nanhunt.compare runs them in {}."
)
_NAME = 30  # columns that a name gets in the picture


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row of a table or picture: a role of a module, times the scale that its verdict takes."""

    module: ModuleProfile
    role: str
    numbers: Numbers
    scale: float

    @property
    def name(self) -> str:
        return f"{path_of(self.module.name)} {ROLE_WORDS[self.role]}"

    def left(self, form: Format) -> float | None:
        room = self.numbers.headroom(form.name, self.scale)
        return room if room is not None and math.isfinite(room) else None


def chosen(profile: Profile, verdict: Verdict, most: int) -> list[Line]:
    """The rows that say most: those of the reasons, then those closest to the limit, in the order of the model."""
    wanted = dict.fromkeys((one.module, one.role) for one in verdict.reasons)
    wanted |= dict.fromkeys((one.module, one.role) for one in verdict.closest)
    kept = set(list(wanted)[:most])
    return [line for line in lines(profile, verdict) if (line.module.name, line.role) in kept]


def lines(profile: Profile, verdict: Verdict) -> list[Line]:
    """All rows of a profile, module by module."""
    return [
        Line(module=one, role=role, numbers=numbers, scale=verdict.loss_scale if role in GRADIENTS else 1.0)
        for one in profile.modules.values()
        for role, numbers in one.roles()
    ]


def page(profile: Profile, *, dtype: object = "float16", loss_scale: float | None = None, width: int = 100) -> str:
    """The whole page, about 60 lines, for the move to `dtype`."""
    verdict = profile.verdict(dtype, loss_scale)
    form = FORMATS[verdict.dtype]
    width = max(width, 60)
    rows = chosen(profile, verdict, _ROWS)
    sections = [wrap(verdict.title(), width, most=4, rest="  "), wrap(about(profile), width, most=3)]
    worst = list({one.module: one for one in reversed(verdict.reasons)}.values())[::-1]
    worst = sorted(worst, key=verdict.reasons.index)[:_WORST]  # of each module the worst
    told = [line for at, one in enumerate(worst, 1) for line in wrap(f"{at}. {one.text}", width, most=3, rest="   ")]
    if told:
        sections.append(["What stands against it, worst first", *told])
    sections.append(wrap(keep(verdict), width, most=4, rest="  "))
    warned = [line for one in verdict.warnings[:_WARNED] for line in wrap(one.text, width, most=3, rest="  ")]
    if warned:
        more = len(verdict.warnings) - _WARNED
        sections.append(["Headroom that shrinks", *warned, *([f"(and {more} more)"] if more > 0 else [])])
    if rows:
        shown = table(columns(rows, form), width)
        more = len(lines(profile, verdict)) - len(rows)
        hidden = [f"(and {more} more in the record)"] if more else []
        heading = f"Closest to the limits of {form.name} (headroom in bits; shares of all numbers)"
        sections.append([*wrap(heading, width, most=2), *shown, *hidden])
        sections.append(picture(rows, width))
    if verdict.fits:
        sections.append(wrap(BETWEEN.format(verdict.dtype), width, most=3, rest="  "))
    sections.append([line for note in profile.notes[:_NOTES] for line in wrap(note, width, most=2, rest="  ")])
    return "\n\n".join("\n".join(part) for part in sections if part)


def about(profile: Profile) -> str:
    """What the profile is of, in one line."""
    steps = len(profile.steps)
    said = f"Profile of {clean(profile.model)}: {len(profile.modules)} modules, {fmt(profile.seen)} tensors"
    if steps:
        first, last = profile.steps[0], profile.steps[-1]
        said += f", step {first}" if first == last else f", steps {first} to {last}"
    if profile.every > 1:
        said += f", every {profile.every}th"
    if profile.sample is not None:
        said += f", {fmt(profile.sample)} numbers of each at most"
    scales = [scale for scale in profile.loss_scales if scale is not None]
    if scales:
        said += f", under a loss scale of {fmt(scales[-1])}, which is taken out of the gradients"
    if profile.skipped:
        said += f", {fmt(profile.skipped)} tensors that could not be read"
    return said


def keep(verdict: Verdict) -> str:
    """The modules that must stay in float32, in words; nothing when there are none."""
    if not verdict.keep:
        return ""
    names = ", ".join(path_of(name) for name in verdict.keep[:_KEPT])
    more = len(verdict.keep) - _KEPT
    return f"Keep in float32: {names}{f' and {more} more' if more > 0 else ''}."


def columns(rows: Sequence[Line], form: Format) -> list[Column]:
    """The table of these rows: largest number, headroom and shares in one format."""
    shares = [row.numbers.share(form.name, row.scale) for row in rows]
    return [
        Column("module", [path_of(row.module.name) for row in rows], left=True, shrinks=True),
        Column("type", [clean(row.module.type) for row in rows], left=True, shrinks=True, give=1),
        Column("numbers", [ROLE_WORDS[row.role] for row in rows], left=True),
        Column("dtype", [", ".join(row.numbers.dtypes) for row in rows], left=True, give=2),
        Column("largest", [fmt(size(row)) for row in rows]),
        Column("headroom", [bits(row.left(form)) for row in rows]),
        Column("overflow", [percent(share.overflow) for share in shares]),
        Column("subnormal", [percent(share.subnormal) for share in shares], give=3),
        Column("vanish", [percent(share.vanish) for share in shares]),
        Column("zero", [percent(zeros(row.numbers)) for row in rows], give=4),
        Column("inf or nan", [percent(bad(row.numbers)) for row in rows]),
    ]


def size(row: Line) -> float | None:
    return None if row.numbers.absmax is None else row.numbers.absmax * row.scale


def zeros(numbers: Numbers) -> float:
    counted = numbers.histogram
    return counted.zero / counted.finite if counted.finite else 0.0


def bad(numbers: Numbers) -> float:
    counted = numbers.histogram
    return (counted.numel - counted.finite) / counted.numel if counted.numel else 0.0


# --- the picture ------------------------------------------------------------------------------------------------


def span(rows: Iterable[Line]) -> tuple[int, int]:
    """The powers of two of a picture, the end left out: all that the rows hold, and float16 from end to end."""
    half = FORMATS["float16"]
    lowest, highest = [math.frexp(half.smallest_subnormal)[1] - 1], [math.frexp(half.max)[1]]
    for row in rows:
        held = moved(row)
        if held:
            lowest.append(min(held))
            highest.append(max(held) + 1)
    return min(lowest), max(highest)


def moved(row: Line) -> dict[int, int]:
    """Counts by exponent, times the scale."""
    by = math.frexp(row.scale)[1] - 1
    return {exponent + by: count for exponent, count in row.numbers.histogram.exponents().items()}


def level(part: float, levels: int) -> int:
    """A share as a shade from 0, nothing, to `levels`, all; each is three times the one before."""
    return max(1, min(levels, levels + math.ceil(math.log(part) / math.log(3)))) if part > 0 else 0


def picture(rows: Sequence[Line], width: int) -> list[str]:
    """Rows of shades over powers of two, and below them from where to where each format goes."""
    name = min(_NAME, max(len(row.name) for row in rows))
    room = width - name - 3
    lo, hi = span(rows)
    wide = max(-(-(hi - lo) // room), 1)
    lo = lo // wide * wide
    places = -(-(hi - lo) // wide)
    column = "one power" if wide == 1 else f"{wide} powers"
    drawn = wrap(f"Where they lie: each column {column} of two, the darker the more", width, most=2)
    for row in rows:
        counts = [0] * places
        for exponent, count in moved(row).items():
            counts[(exponent - lo) // wide] += count
        total = max(row.numbers.histogram.numel, 1)
        shades = "".join(_SHADES[level(count / total, len(_SHADES) - 1)] for count in counts)
        drawn.append(f"{elide(row.name, name):<{name}} |{shades}|")
    drawn.append(f"{'':<{name}} |{_ticks(lo, wide, places)}")
    drawn += [f"{short:<{name}} |{band}|" for short, band in _bands(lo, wide, places)]
    return [head(line, width) for line in drawn]


def _ticks(lo: int, wide: int, places: int) -> str:
    drawn = [" "] * places
    step = 8 * -(-wide // 2) if wide > 1 else 8
    for power in range(-(-lo // step) * step, lo + places * wide, step):
        at = (power - lo) // wide
        label = f"2^{power}"
        if at + len(label) <= places and "".join(drawn[max(at - 1, 0) : at + len(label)]).strip() == "":
            drawn[at : at + len(label)] = label
    return "".join(drawn).rstrip()


def _bands(lo: int, wide: int, places: int) -> Iterable[tuple[str, str]]:
    for name in COMPARED:
        form = FORMATS[name]
        smallest, normal, end = (
            math.frexp(edge)[1] - 1 for edge in (form.smallest_subnormal, form.smallest_normal, form.max)
        )
        band = []
        for at in range(places):
            power = lo + at * wide
            band.append("=" if normal <= power <= end else "-" if smallest <= power < normal else " ")
        yield name, "".join(band)
