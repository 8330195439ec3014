"""Courses for the tests of their pages: real-looking ones, and any at all."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from hypothesis import strategies as st

from nanhunt.symptoms.course import Course, Curve
from nanhunt.symptoms.steps import SYMPTOMS, Step, Symptom

NAN = math.nan


def curve(series: Sequence[tuple[float, float]], stretches: int = 200) -> Curve:
    """The curve of (step, value), thinned out as a diagnosis does it."""
    wide = -(-len(series) // stretches) or 1
    rows = []
    for n in range(0, len(series), wide):
        part = series[n : n + wide]
        held = sorted(value for _, value in part if math.isfinite(value))
        ends = (held[0], held[len(held) // 2], held[-1]) if held else (NAN, NAN, NAN)
        rows.append((float(part[0][0]), *ends, len(part) - len(held)))
    at, low, mid, high, bad = (tuple(column) for column in zip(*rows)) if rows else ((),) * 5
    return Curve(at=at, low=low, mid=mid, high=high, bad=bad)


def flat(*values: float, first: int = 0) -> Curve:
    """A stretch for each value."""
    return curve(list(enumerate(values, first)), max(len(values), 1))


def method() -> Course:
    """The example of the method: NaN at step 1202, and the loss scale falls with it."""
    symptom = Symptom(
        name="nan_inf",
        form="loss",
        step=1202,
        line=3,
        confidence="certain",
        cause="The loss is NaN at step 1202; it was 3.02 one step before. A skipped step cannot make the loss NaN.",
        advice=("Find the first bad operator with nanhunt.hunt.", "Leave the loss scale alone."),
        evidence=("step 1202: loss nan, gradient norm nan", "step 1201: loss 3.02, gradient norm 1.24"),
        before=Step(step=1201, loss=3.02, grad_norm=1.24, loss_scale=65536.0, lr=(3e-4,), batch="3fa9c1d2"),
        first=Step(step=1202, loss=NAN, grad_norm=NAN, loss_scale=32768.0, lr=(3e-4,), batch="88b2e0aa", skipped=True),
        seen=1202,
    )
    return Course(
        source="run.log",
        format="key=value lines",
        records=4,
        steps=(1200, 1203),
        spacing=1.0,
        symptoms=(symptom,),
        scale="It fell from 65 536 to 16 384 with the NaN and not before it.",
        curves={
            "lr": flat(3e-4, 3e-4, 3e-4, 3e-4, first=1200),
            "loss": flat(2.31, 3.02, NAN, NAN, first=1200),
            "grad_norm": flat(0.87, 1.24, NAN, NAN, first=1200),
            "loss_scale": flat(65536.0, 65536.0, 32768.0, 16384.0, first=1200),
        },
        marks=((1202, "skipped"), (1203, "skipped")),
        lines=4,
        understood=4,
    )


def healthy(records: int = 1000) -> Course:
    """A run with a restart at step 600 and nothing wrong."""
    draw = random.Random(7)
    steps = [*range(800), *range(600, records)]
    loss = [(step, 2 * math.exp(-step / 300) + 0.3 + draw.gauss(0, 0.02)) for step in steps]
    return Course(
        source="flow.jsonl",
        format="JSON lines",
        records=len(loss),
        steps=(0, records - 1),
        spacing=1.0,
        curves={"loss": curve(loss)},
        marks=((600.0, "restart from 600"), *((float(n), f"epoch {n // 100}") for n in range(0, records, 100))),
        remarks=("Restarted at line 801: steps 600 to 799 stand in it twice.",),
        lines=len(loss) + 2,
        understood=len(loss),
        unknown=("line 4: tokens 4.1e9 | mfu 41.2%",),
    )


def sick(name: str) -> Course:
    """A run of 6000 steps that has the symptom from step 4200 on."""
    draw = random.Random(name)
    steps = range(0, 6000, 10)

    def late(step: int) -> float:
        return max(step - 4200, 0) / 220

    loss = [(step, 2 + draw.gauss(0, 0.05)) for step in steps]
    norm = [(step, 0.7 + abs(draw.gauss(0, 0.1))) for step in steps]
    curves = {"loss": curve(loss), "grad_norm": curve(norm), "lr": curve([(step, 1e-3) for step in steps])}
    if name == "loss_explosion":
        curves["loss"] = curve([(step, value * math.exp(late(step))) for step, value in loss])
    if name == "vanishing_gradient":
        curves["grad_norm"] = curve([(step, value * math.exp(-2 * late(step))) for step, value in norm])
    if name == "nan_inf":
        curves["grad_norm"] = curve([(step, NAN if late(step) else value) for step, value in norm])
    curves["metric accuracy"] = curve([(step, 0.7 + draw.gauss(0, 0.05)) for step in range(0, 6000, 500)])
    symptom = Symptom(
        name=name,
        form=name,
        step=4200,
        line=423,
        confidence="likely",
        cause="Numbers that a diagnosis would tell.",
        advice=("The first action.", "The second one."),
        evidence=("loss 2.06 before step 4200",),
        before=Step(step=4190, loss=2.06, metrics={"accuracy": 0.71}, losses={"aux": 0.1}),
        first=Step(step=4200, loss=2.31, note="Gradient overflow.", worst="encoder.layer.3.weight", zero_grads=0.25),
        seen=4400,
    )
    return Course(
        source=f"{name}.csv",
        format="CSV",
        records=600,
        ranks=2,
        steps=(0, 5990),
        spacing=10.0,
        symptoms=(symptom,),
        curves=curves,
        lines=601,
        understood=600,
    )


def every() -> list[Course]:
    """One for each symptom, a healthy one, the method's example, and one of which nothing was understood."""
    nothing = Course(source="a.bin", format="unknown", records=0, lines=2, understood=0, unknown=("line 1: \x1b 12",))
    return [method(), healthy(), *map(sick, SYMPTOMS), nothing]


# --- any at all ---------------------------------------------------------------------------------------------

EVIL = (
    "<script>alert(1)</script>",
    "</style><img src=x onerror=alert(1)>",
    '" onload="alert(1)',
    "</title></pre></svg><!--",
    "&lt;script&gt;&#60;",
    "\ud800\x00\u202e\u2028\x1b[31m",
    "宽" * 90,
    "a." * 3000,
    "\n\n\t\\",
    "skipped: overflow at 12",
)
texts = st.sampled_from(EVIL) | st.text(max_size=20)
whole = st.integers(-5, 10**6) | st.none() | st.sampled_from([2**70, -(2**70), 10**400])
numbers = (
    st.floats(-10, 10)
    | st.floats()
    | st.sampled_from([0.0, -0.0, 5e-324, 1e-300, 65504.0, 2.0**24, 1.7e308, -1.7e308, math.inf, -math.inf, NAN])
)
known = st.none() | numbers
several = st.lists(texts, max_size=4).map(tuple)


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    """Of any length, with steps that rise, fall back, or are none."""
    length = draw(st.integers(0, 40) | st.sampled_from([0, 1, 2, 900]))
    if length > 40:
        seed = random.Random(draw(st.integers(0, 99)))
        return flat(*(seed.choice((seed.gauss(0, 1), 10 ** seed.gauss(0, 9), NAN)) for _ in range(length)))
    row = st.tuples(numbers, numbers, numbers, st.integers(-1, 9))
    steps = draw(st.lists(numbers, min_size=length, max_size=length) | st.just([float(n) for n in range(length)]))
    low, mid, high, bad = zip(*draw(st.lists(row, min_size=length, max_size=length))) if length else ((),) * 4
    return Curve(at=tuple(steps), low=low, mid=mid, high=high, bad=bad)


steps = st.builds(
    Step,
    step=whole,
    line=whole,
    loss=known,
    losses=st.dictionaries(texts, numbers, max_size=3),
    grad_norm=known,
    lr=st.lists(numbers, max_size=5).map(tuple),
    loss_scale=known,
    skipped=st.none() | st.booleans(),
    zero_grads=known,
    small_grads=known,
    dead=several,
    bad_weights=whole,
    worst=st.none() | texts,
    batch=st.none() | texts,
    metrics=st.dictionaries(texts, numbers, max_size=3),
    dtypes=several,
    note=st.none() | texts,
)
symptoms = st.builds(
    Symptom,
    name=st.sampled_from(SYMPTOMS) | texts,
    form=texts,
    step=whole,
    line=whole,
    cause=texts,
    advice=several,
    evidence=several,
    confidence=texts,
    before=st.none() | steps,
    first=st.none() | steps,
    seen=whole,
)
courses = st.builds(
    Course,
    source=texts,
    format=texts,
    records=st.integers(0, 10**9),
    ranks=st.integers(1, 9),
    steps=st.tuples(whole, whole),
    spacing=known,
    symptoms=st.lists(symptoms, max_size=5).map(tuple),
    remarks=several,
    scale=st.none() | texts,
    curves=st.dictionaries(
        st.sampled_from(["loss", "grad_norm", "lr", "loss_scale", "metric accuracy"]) | texts, curves(), max_size=5
    ),
    marks=st.lists(st.tuples(numbers, texts), max_size=8).map(tuple),
    lines=st.none() | st.integers(0, 10**9),
    understood=st.none() | st.integers(0, 10**9),
    unknown=several,
)
