"""What the pages of a course have in common: how a run, a step, a curve or an event is put into words."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from ..numerics import fmt
from ..symptoms.course import Course, Curve
from ..symptoms.steps import Step, Symptom
from .extent import Scale, Span, real, runs, step_text, values
from .lines import clean, elide
from .words import known

_IN_WORDS = {
    "loss_explosion": "loss explosion",
    "vanishing_gradient": "vanishing gradient",
    "nan_inf": "NaN or Inf",
    "non_convergence": "no convergence",
    "metric_fluctuation": "fluctuating validation metric",
}
_CURVES = {"loss": "loss", "grad_norm": "gradient norm", "loss_scale": "loss scale", "lr": "learning rate"}
_FIRST = tuple(_CURVES)
_BREAK = re.compile(r"(\s(from|at|to|of|in|by))?\s*([\d:;,(=]|->)")


def title(course: Course) -> str:
    """The verdict on one line: `run.log: nan_inf from step 1202 on (certain)`."""
    source = elide(clean(course.source), 80) if course.source != "-" else "standard input"
    source = source or "the run"
    if course.symptoms:
        return f"{source}: {verdict(course.symptoms[0])}"
    if not course.records:
        return f"{source}: no record of a step was found in it"
    return f"{source}: no symptom in {many(course.records, 'record')}{of_steps(course)}"


def verdict(symptom: Symptom) -> str:
    """`nan_inf from step 1202 on (certain)`"""
    return f"{elide(clean(symptom.name), 60)}{began(symptom)} ({elide(clean(symptom.confidence), 40)})"


def began(symptom: Symptom) -> str:
    if symptom.step is not None:
        return f" from step {clean(symptom.step)} on"
    return f" from line {clean(symptom.line)} on" if symptom.line is not None else ""


def of_steps(course: Course) -> str:
    first, last = (*course.steps, None, None)[:2]
    if first is None or last is None:
        return ""
    return f", step {clean(first)}" if first == last else f", steps {clean(first)} to {clean(last)}"


def many(n: int, what: str) -> str:
    return f"{fmt(n)} {what}{'' if n == 1 else 's'}"


def many_runs(courses: Sequence[Course]) -> str:
    """`3 runs, 2 with a symptom`"""
    return f"{many(len(courses), 'run')}, {fmt(sum(course.symptom != 'none' for course in courses))} with a symptom"


def mark(symptom: Symptom) -> tuple[float, str] | None:
    """Where it is drawn, in words too: at its step, or, where that has no number, at the last healthy one."""
    name = elide(clean(symptom.name), 24)
    if (step := real(symptom.step)) is not None:
        return step, f"{name} {step_text(step)}"
    if symptom.before is not None and (before := real(symptom.before.step)) is not None:
        return before, f"{name} after {step_text(before)}"
    return None


def in_words(name: str) -> str:
    return _IN_WORDS.get(name, clean(name).replace("_", " "))


def facts(symptom: Symptom) -> list[tuple[str, str]]:
    """Labels and texts: what it is in words, where it began and between which records, when it could be told."""
    what = in_words(symptom.name)
    form = elide(clean(symptom.form), 60).replace("_", " ")
    pairs = [("symptom", f"{what}: {form}" if form and form != clean(symptom.name).replace("_", " ") else what)]
    before = symptom.before.step if symptom.before is not None else None
    first = symptom.first.step if symptom.first is not None else symptom.step
    if before is not None and first is not None and real(before) is not None and real(first) is not None:
        pairs.append(("began", f"after step {before}" + (f", by step {first}" if first - before > 1 else "")))
    if symptom.line is not None:
        pairs.append(("first seen in", f"line {clean(symptom.line)}"))
    if symptom.seen is not None and symptom.seen != symptom.step:
        pairs.append(("could be told at", f"step {clean(symptom.seen)}"))
    if symptom.first is not None and symptom.first.rank:
        pairs.append(("on", f"rank {clean(symptom.first.rank)}"))
    return pairs


# -- curves --------------------------------------------------------------------------------------------------


def curve_name(name: str) -> str:
    return _CURVES.get(name) or elide(clean(name), 60).replace("_", " ")


def in_order(course: Course) -> list[tuple[str, Curve]]:
    """The curves that hold anything, those that say most first."""
    rank = {name: n for n, name in enumerate(_FIRST)}
    held = [(name, curve) for name, curve in course.curves.items() if any(real(at) is not None for at in curve.at)]
    return sorted(held, key=lambda item: rank.get(item[0], len(rank)))


def told(name: str, curve: Curve) -> list[str]:
    """What a curve shows, in words: where its numbers begin and end, and how they are drawn."""
    pieces = runs(curve)
    numbers = values(pieces)
    if not numbers:
        return []
    middles = [point.mid for points in pieces for point in points if point.mid is not None]
    if min(numbers) == max(numbers):
        return [f"always {fmt(numbers[0])}"]
    scale = Scale.of(numbers, name)
    said = [f"first {fmt(middles[0])}", f"last {fmt(middles[-1])}"]
    return said if scale is None or scale.kind == "linear" else [*said, "log scale"]


def spoilt(curve: Curve) -> str:
    """How much of it is NaN or Inf; "" where nothing is."""
    bad = sum(point.bad for points in runs(curve) for point in points)
    return f"NaN or Inf {fmt(bad)} time{'s' if bad != 1 else ''}" if bad > 0 else ""


def span(course: Course) -> Span | None:
    """The steps that the charts cover."""
    drawn = [at for _, curve in in_order(course) for at in curve.at]
    return Span.of([*drawn, *course.steps]) if drawn else None


def lanes(course: Course, most: int) -> list[tuple[str, list[float]]]:
    """The events by kind, which is the text up to its first number; the rarest kinds first."""
    kinds: dict[str, list[float]] = {}
    for at, text in course.marks:
        step = real(at)
        if step is not None:
            kind = _BREAK.split(clean(text[:80]), maxsplit=1)[0].strip(" .#-") or "event"
            kinds.setdefault(elide(kind, 40), []).append(step)
    return sorted(kinds.items(), key=lambda item: len(item[1]))[:most]


# -- the record before ---------------------------------------------------------------------------------------


def _share(part: float | None) -> str:
    return "" if part is None else fmt(part) if part != part or not 0 < part <= 1 else f"{100 * part:.3g}%"


_STATE: tuple[tuple[str, Callable[[Step], str]], ...] = (
    ("loss", lambda step: known(step.loss)),
    ("gradient norm", lambda step: known(step.grad_norm)),
    ("norm after clipping", lambda step: known(step.clipped_norm)),
    ("loss scale", lambda step: known(step.loss_scale)),
    ("scale after the step", lambda step: known(step.loss_scale_after)),
    ("learning rate", lambda step: ", ".join(known(rate) for rate in step.lr[:3]) + (" ..." if step.lr[3:] else "")),
    ("batch", lambda step: elide(clean(step.batch or ""), 20)),
    ("step was skipped", lambda step: "" if step.skipped is None else "yes" if step.skipped else "no"),
    ("bad weights", lambda step: "" if step.bad_weights is None else fmt(step.bad_weights)),
    ("update / weight", lambda step: known(step.update_ratio)),
    ("lost updates", lambda step: _share(step.lost_updates)),
    ("zero gradients", lambda step: _share(step.zero_grads)),
    ("subnormal gradients", lambda step: _share(step.small_grads)),
    ("infinite moments", lambda step: _share(step.frozen)),
    ("worst gradient", lambda step: elide(clean(step.worst or ""), 40)),
    ("dead activations", lambda step: elide(", ".join(map(clean, step.dead[:8])), 40)),
    ("autocast", lambda step: clean(step.autocast or "")),
    ("weights", lambda step: ", ".join(map(clean, step.dtypes[:4]))),
    ("optimizer state", lambda step: ", ".join(map(clean, step.state_dtypes[:4]))),
    ("message", lambda step: elide(clean(step.note or ""), 60)),
)


_PARTS = {"losses": "loss: ", "metrics": "metric: "}


def state(symptom: Symptom) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """The last healthy record beside the first bad one: heads of the columns, and (quantity, a text for each)."""
    steps = [(name, step) for name, step in (("last healthy", symptom.before), ("first bad", symptom.first)) if step]
    heads = [f"{name}{_which(step)}" for name, step in steps]
    rows = [(label, [say(step) for _, step in steps]) for label, say in _STATE]
    parts = [(name, "losses") for name in dict.fromkeys(name for _, step in steps for name in step.losses)]
    parts += [(name, "metrics") for name in dict.fromkeys(name for _, step in steps for name in step.metrics)]
    extra = [
        (elide(f"{_PARTS[kind]}{clean(name)}", 40), [known(getattr(step, kind).get(name)) for _, step in steps])
        for name, kind in parts[:12]
    ]
    rows[1:1] = extra
    return heads, [(label, texts) for label, texts in rows if any(texts)]


def _which(step: Step) -> str:
    if step.step is not None:
        return f", step {clean(step.step)}"
    return f", line {clean(step.line)}" if step.line is not None else ""


# -- what was read -------------------------------------------------------------------------------------------


def reading(course: Course) -> str:
    """How much was read, as what, and how much of it was understood."""
    said = f"{many(course.records, 'record')}{of_steps(course)}"
    spacing = real(course.spacing)
    if spacing is not None and spacing > 1:
        said += f", usually {fmt(spacing)} steps apart"
    if course.ranks > 1:
        said += f", of {fmt(course.ranks)} ranks"
    said += f"; format: {clean(course.format)}" if course.format else ""
    if course.lines is not None:
        said += f"; {many(course.lines, 'line')} read"
        if course.understood is not None:
            said += f", {fmt(course.understood)} of them hold a record"
    return f"{said}."


def healthy(course: Course) -> str:
    """What it means that nothing was found."""
    if not course.records:
        return (
            "Nothing can be said about the run: no line was understood as a step. A line that gives its numbers by "
            "name, such as `step 12 | loss 2.31 | grad_norm 0.87 | loss_scale 65536`, is always read."
        )
    return "None of the five symptoms: no NaN or Inf, and nothing in the numbers that speaks of trouble to come."


def unknown(course: Course, most: int) -> Sequence[str]:
    return [elide(clean(line), 200) for line in course.unknown[:most]]
