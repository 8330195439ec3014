"""A comparison of two runs as a page for a terminal: do they part, where, by how much, and how alike they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..numerics import fmt
from ..precision.figures import LINE, MULTIPLE, Call, Figures, Own
from ..precision.likeness import Likeness
from .lines import clean, elide, wrap
from .table import Column, table

_PARTED, _CHART, _GRADIENTS, _NOTES = 8, 24, 6, 6  # rows of a section at most
_BAR = 24  # columns: one for each bit of a float32
BELOW = "BELOW"  # in the text of a similarity that is too small
_SMALL = 1e-3  # of the whole gradient's length: below, a parameter's gradient is mostly rounding in any precision

_PARTED_HEADING = "Where they part: error of a module's own code, its inputs being right"
_LARGEST_HEADING = "Largest errors of a module's own code, its inputs being right"


def title(record: Likeness) -> str:
    """The verdict in one sentence, on one line."""
    a, b = clean(record.a), clean(record.b)
    if record.first is not None:
        own = record.modules[record.first].own
        said = f"{who(record, record.first)} is where {b} parts from {a}: "
        more = len(record.parted) - 1
        after = f" (and {more} more module{'s' if more > 1 else ''})" if more else ""
        if own is not None and own.made:
            return f"{said}its own code makes {', '.join(own.made)}{after}"
        times = fmt(float(f"{own.times:.2g}")) if own is not None else "?"
        return f"{said}its own code loses {times} times what rounding explains{after}"
    if record.not_finite is not None:
        return f"{who(record, record.not_finite)} is the first whose numbers are not finite in {b} alone"
    if record.died is not None:
        return f"the run in {b} died: {clean(record.died)}"
    if not record.calls:
        return f"nothing was compared of {a} and {b}"
    if record.identical:
        return f"{a} and {b} give the same numbers, bit for bit: precision is not the cause"
    if record.agree:
        grads = ""
        if record.parameters and record.gradient_cosine < 1:
            grads = f", and the gradients have a cosine of {cosine(record.gradient_cosine)}"
        return f"{a} and {b} agree, rounding explains what differs in forward{grads}: precision is not the cause"
    if record.broken and not record.output_cosine < LINE:
        scale = _overscaled(record)
        at = f", at a loss scale of {fmt(scale)}" if scale else ""
        n = len(record.broken)
        return (
            f"the outputs of {b} and {a} agree, and the gradients of {n} parameter{'s' if n != 1 else ''} are not "
            f"finite in {b} alone{at}"
        )
    what, value = "output", record.output_cosine
    if not value < LINE and record.gradient_cosine < LINE:
        what, value = "gradient", record.gradient_cosine
    if math.isnan(value):
        return f"no module loses more in {b} than rounding explains; of the output there is nothing to compare"
    judged = any(call.own is not None for call in record.calls)
    alone = f"no single module loses more in {b} than rounding explains, yet " if judged else ""
    return f"{alone}the cosine of the {what} of {b} and {a} is {cosine(value)}, below {LINE}"


def who(record: Likeness, path: str) -> str:
    kind = record.modules[path].type
    named = elide(clean(path), 120) if path else "the model's own forward"
    return f"{named}{f' ({elide(clean(kind), 60)})' if kind else ''}"


def cosine(value: float) -> str:
    """`1`, `1 - 2.3e-06` near it, `0.9713`, `?`."""
    if math.isnan(value):
        return "?"
    if value == 1.0:
        return "1"
    return f"1 - {1 - value:.1e}" if value > 0.999 else f"{value:.4f}"


def page(record: Likeness, *, width: int = 100) -> str:
    """The whole page, at most 70 lines and `width` columns."""
    width = max(width, 40)
    sections = [
        wrap(title(record), width, most=3, rest="  "),
        _facts(record, width),
        _headed(_PARTED_HEADING if record.parted else _LARGEST_HEADING, _parted(record, width)),
        _headed("What to do", _advice(record, width)),
        _headed("Along the model (a column for each bit that the outputs have in common)", _chart(record, width)),
        _headed("Gradients of parameters, least alike first", _gradients(record, width)),
        _headed("Notes", [line for note in notes(record) for line in wrap(note, width, most=3, first="- ", rest="  ")]),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines)


def notes(record: Likeness) -> list[str]:
    died = [f"the run in {record.b} died: {record.died}"] if record.died is not None else []
    more = len(record.notes) - _NOTES
    return [*died, *record.notes[:_NOTES], *([f"and {more} more"] if more > 0 else [])]


def facts(record: Likeness) -> list[tuple[str, str]]:
    """Labels and texts of the similarities that are asked for first."""
    told = []
    several = f" (worst of {record.batches} batches; mean {cosine(record.mean_output_cosine)})"
    if record.outputs:
        worst = min(record.outputs, key=lambda one: one.cosine)
        side = "at or above" if worst.cosine >= LINE else BELOW
        of = clean(worst.tensor)
        told.append(
            (f"cosine of {of}", f"{cosine(worst.cosine)}, {side} {LINE}{several if record.batches > 1 else ''}")
        )
        told.append(("largest error", f"{fmt(worst.max_abs)}, root mean square {ulps(worst)}"))
    if record.parameters:
        told.append(("cosine of the gradient", cosine(record.gradient_cosine)))
    told += [(str(key), fmt(value) if isinstance(value, float) else clean(value)) for key, value in _scales(record)]
    return told


def _overscaled(record: Likeness) -> float | None:
    """The loss scale of the second run, which may be why gradients are not finite there."""
    scale = record.context.get("loss scale b")
    return scale if isinstance(scale, float) and scale > 1 else None


def _scales(record: Likeness) -> list[tuple[str, object]]:
    return [(key, value) for key, value in record.context.items() if str(key).startswith("loss scale")]


def ulps(one: Figures) -> str:
    return f"{fmt(float(f'{one.ulps:.3g}'))} ulp of {one.lower}"


def steepest(record: Likeness) -> Call | None:
    """The call that magnifies error most, where no module parts: from what it read to what it gave."""
    grown = [
        (call.output.error / call.input.error, call)
        for call in record.calls
        if call.output is not None and call.input is not None and call.input.error and call.output.error
    ]
    return max(grown, key=lambda pair: pair[0])[1] if grown else None


def advice(record: Likeness) -> list[str]:
    """Short, specific actions; none where the two agree."""
    first = record.first
    if first is not None:
        own = record.modules[first].own
        name = first or "the model's own forward"
        if own is not None and own.made:
            return [
                f"Look at the limits of the format in {name}: its own code makes {own.made[0]} of numbers that are "
                f"finite in {record.a}. nanhunt.hunt(step, model=model) names the operation.",
                f"Compute {name} in float32, or scale what it reads.",
            ]
        where = own.tensor if own is not None else "output"
        return [
            f"Read the forward of {name} for a cast to a lower dtype, a sum in half precision, or an upcast that is "
            f"missing, on the way to its {where}.",
            "Compute that part in float32 (torch.autocast(..., enabled=False), and x.float()), and compare again.",
        ]
    if record.agree or not record.calls:
        return []
    said = []
    if record.died is not None:
        said.append(
            f"Run the step once in {record.b} without nanhunt: it has to come to its end there. What the model gave up "
            "to then is compared below."
        )
    most = steepest(record)
    if most is not None and record.not_finite is None and not record.output_cosine >= LINE:
        said.append(
            f"The model magnifies ordinary rounding, most in {most.module or 'its own forward'}: keep that module, or "
            "what it reads, in float32."
        )
    if record.broken and record.not_finite is None and (scale := _overscaled(record)):
        said.append(
            f"At a loss scale of {fmt(scale)} gradients leave {record.b}: a GradScaler skips such steps and lowers its "
            "scale. Compare once it has found it, or build it with a smaller init_scale."
        )
    if not record.broken and not record.output_cosine < LINE and record.gradient_cosine < LINE:
        said.append("Forward agrees and the gradients do not: look at custom backward code, and at the loss scale.")
    return said


# --- sections -----------------------------------------------------------------------------------------------


def _headed(heading: str, lines: list[str]) -> list[str]:
    return [heading, *lines] if lines else []


def _facts(record: Likeness, width: int) -> list[str]:
    told = facts(record)
    wide = max((len(label) for label, _ in told), default=0)
    return [elide(f"{label.ljust(wide)}  {said}", width) for label, said in told]


def judged(record: Likeness) -> list[tuple[str, Own]]:
    """Modules by their own error: those that part in the order in which they ran, then the largest."""
    known = [(name, own) for name, one in record.modules.items() if (own := one.own) is not None]
    parted = [(name, own) for path in record.parted for name, own in known if name == path]
    rest = sorted((pair for pair in known if pair[0] not in record.parted), key=lambda pair: -pair[1].times)
    return [*parted, *rest]


def times(own: Own) -> str:
    return "" if own.made else fmt(float(f"{own.times:.2g}"))


def _parted(record: Likeness, width: int) -> list[str]:
    rows = judged(record)
    if not rows:
        return []
    rows = rows[: _PARTED if record.parted else 3]
    columns = [
        Column("module", [clean(name) or "(the model itself)" for name, _ in rows], left=True, shrinks=True),
        Column("type", [clean(record.modules[name].type) for name, _ in rows], left=True, shrinks=True, give=1),
        Column("at", [clean(own.tensor) for _, own in rows], left=True, shrinks=True, give=2),
        Column("own error", [", ".join(own.made) or fmt(own.error) for _, own in rows]),
        Column("explained", [fmt(own.explained) for _, own in rows]),
        Column("times", [times(own) for _, own in rows]),
        Column("parts", ["yes" if own.times > MULTIPLE else "no" for _, own in rows], left=True),
    ]
    more = len(record.parted) - len(rows)
    return [*table(columns, width), *([f"and {more} more that part"] if more > 0 else [])]


def _advice(record: Likeness, width: int) -> list[str]:
    return [
        line
        for n, said in enumerate(advice(record), 1)
        for line in wrap(said, width, most=3, first=f"{n}. ", rest="   ")
    ]


def thinned(calls: Sequence[Call], most: int) -> list[Call]:
    """As many calls, in order: of neighbours the one that is least alike."""
    if len(calls) <= most:
        return list(calls)
    kept = []
    for n in range(most):
        group = calls[n * len(calls) // most : (n + 1) * len(calls) // most]
        kept.append(min(group, key=lambda call: call.output.cosine if call.output is not None else 2.0))
    return kept


def common_bits(one: Figures) -> float:
    """How many leading bits two tensors have in common, by the size of their difference."""
    if one.only_b or one.only_a:
        return 0.0
    return min(max(-math.log2(one.error), 0.0), 53.0) if one.error else 53.0


def _chart(record: Likeness, width: int) -> list[str]:
    worst = min((one.batch for one in record.calls), default=0)
    if record.outputs and record.batches > 1:
        worst = min(range(len(record.outputs)), key=lambda n: record.outputs[n].cosine)
    calls = [call for call in record.calls if call.output is not None and call.batch == worst]
    rows = [(call, call.output) for call in thinned(calls, _CHART) if call.output is not None]
    if not rows:
        return []
    columns = [
        Column("module", [clean(call.module) or "(the model itself)" for call, _ in rows], left=True, shrinks=True),
        Column("cosine", [", ".join(out.only_b) or cosine(out.cosine) for _, out in rows], left=True),
        Column("bits", [bar(out) for _, out in rows], left=True),
        Column("", ["< parts" if call.module in record.parted else "" for call, _ in rows], left=True),
    ]
    more = len(calls) - len(rows)
    return [*table(columns, width), *([f"of {len(calls)} calls, the least alike of each few"] if more else [])]


def bar(one: Figures) -> str:
    bits = round(common_bits(one))
    return "#" * min(bits, _BAR) + (">" if bits > _BAR else "")


def gradients(record: Likeness) -> list[tuple[str, Figures]]:
    """Parameters whose gradient says something, least alike first; those lost to rounding in any precision left out."""
    every = record.gradients
    whole = math.sqrt(sum(one.count * min(one.sizes[0], 1e150) ** 2 for one in every.values()))
    told = [
        (name, one) for name, one in every.items() if one.only_b or one.sizes[0] * math.sqrt(one.count) > _SMALL * whole
    ]
    return sorted(told, key=lambda pair: (not pair[1].only_b, pair[1].cosine))


def _gradients(record: Likeness, width: int) -> list[str]:
    rows = [pair for pair in gradients(record) if pair[1].max_abs or pair[1].only_b][:_GRADIENTS]
    if not rows:
        return []
    return table(
        [
            Column("parameter", [clean(name) for name, _ in rows], left=True, shrinks=True),
            Column("cosine", [", ".join(one.only_b) or cosine(one.cosine) for _, one in rows], left=True),
            Column("largest error", [fmt(one.max_abs) for _, one in rows]),
            Column("relative", [fmt(one.error) for _, one in rows]),
            Column("ulp", [fmt(float(f"{one.ulps:.3g}")) for _, one in rows], give=1),
            Column("of", [one.lower for _, one in rows], left=True, give=1),
        ],
        width,
    )
