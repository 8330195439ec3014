"""Symptoms from a record of steps: each kind by its own signature, and nothing where nothing is wrong."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import sys
from collections.abc import Iterable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanhunt.errors import UsageError
from nanhunt.symptoms.course import Course
from nanhunt.symptoms.diagnosis import Diagnosis
from nanhunt.symptoms.steps import SYMPTOMS, Step, Symptom

NAN, INF = math.nan, math.inf


def diagnosed(steps: Iterable[Step]) -> Course:
    diagnosis = Diagnosis()
    for step in steps:
        diagnosis.see(step)
    diagnosis.end()
    return diagnosis.course(source="run", format="live")


def steps(
    losses: Sequence[float],
    *,
    norms: Sequence[float] | None = None,
    scales: Sequence[float] | None = None,
    lrs: Sequence[float] | None = None,
    accuracy: Sequence[float] | None = None,
    spacing: int = 1,
) -> Iterator[Step]:
    """One record for each loss, numbered from `spacing` on."""
    for i, loss in enumerate(losses):
        yield Step(
            step=(i + 1) * spacing,
            line=i + 1,
            loss=loss,
            grad_norm=None if norms is None else norms[i],
            loss_scale=None if scales is None else scales[i],
            lr=() if lrs is None else (lrs[i],),
            metrics={} if accuracy is None else {"accuracy": accuracy[i]},
        )


def noisy(values: Iterable[float], sigma: float, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [value + draw.gauss(0, sigma) for value in values]


def learning(count: int, first: float = 2.3, last: float = 1.0, sigma: float = 0.03) -> list[float]:
    return noisy((last + (first - last) * math.exp(-3 * i / count) for i in range(count)), sigma)


# --- the method's own example -------------------------------------------------------------------------


def method_example(ahead: int = 0) -> list[Step]:
    """Fine at 1200 and 1201; NaN from 1202 on, the scale halved at each step."""
    told = [
        (1200, 2.31, 0.87, 65536.0),
        (1201, 3.02, 1.24, 65536.0),
        (1202, NAN, NAN, 32768.0),
        (1203, NAN, NAN, 16384.0),
    ]
    before = [
        Step(step=1200 - ahead + i, loss=loss, grad_norm=0.9, loss_scale=65536.0)
        for i, loss in enumerate(learning(ahead, 2.4, 2.3, 0.1))
    ]
    return before + [Step(step=s, loss=loss, grad_norm=n, loss_scale=scale) for s, loss, n, scale in told]


@pytest.mark.parametrize("ahead", (0, 60))
def test_the_methods_example_is_a_nan_at_1202_that_the_scale_fell_with(ahead: int) -> None:
    course = diagnosed(method_example(ahead))
    (symptom,) = course.symptoms
    assert (course.symptom, course.first_bad_step) == ("nan_inf", 1202)
    assert "65 536 to 32 768" in symptom.cause
    assert "cannot make the loss NaN" in symptom.cause
    assert "forward, in the weights or in the data" in symptom.cause
    assert symptom.before is not None and symptom.before.step == 1201
    assert symptom.confidence == "certain"
    said = " ".join(symptom.evidence)
    assert "at step 1201: loss 3.02, gradient norm 1.24, loss scale 65 536" in said


def test_a_record_at_every_tenth_step_says_between_which_steps_it_was_born() -> None:
    course = diagnosed(steps([*learning(20), NAN], spacing=10))
    assert course.first_bad_step == 210
    assert "between step 200, which was fine, and step 210" in " ".join(course.evidence)
    assert course.spacing == 10


# --- nan_inf ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "first", "form"),
    (
        ([NAN] * 4, 1, "from_start"),
        ([*learning(20), INF, NAN], 21, "sudden"),
        ([0.8, NAN, NAN], 2, "sudden"),
        ([1.5, 1.4, 0.0, 0.0, 0.0, 0.0], 3, "hidden"),
        ([8.5, *[0.0] * 6], 2, "hidden"),
    ),
)
def test_a_nan_out_of_the_blue_is_nan_inf_from_its_first_record_on(losses: list[float], first: int, form: str) -> None:
    course = diagnosed(steps(losses))
    assert (course.symptom, course.first_bad_step, course.symptoms[0].form) == ("nan_inf", first, form)


def test_a_loss_that_comes_down_to_zero_hides_no_nan() -> None:
    assert diagnosed(steps([2.0 * 0.5**i for i in range(40)] + [0.0] * 20)).symptom == "none"


def test_a_bad_gradient_norm_that_stays_is_told_and_one_that_passes_is_remarked() -> None:
    losses = learning(40)
    lasting = diagnosed(steps(losses, norms=[1.0] * 20 + [NAN] * 20))
    assert (lasting.symptom, lasting.first_bad_step, lasting.symptoms[0].form) == ("nan_inf", 21, "gradient")
    passing = diagnosed(steps(losses, norms=[INF] + [1.0] * 16 + [INF] + [1.0] * 22))
    assert passing.symptom == "none"
    assert "2 records (1, 18)" in passing.remarks[0]


def test_weights_that_are_bad_are_told_though_the_loss_is_fine() -> None:
    fine = list(steps(learning(20)))
    course = diagnosed([*fine, dataclasses.replace(fine[-1], step=21, bad_weights=3)])
    assert (course.symptom, course.first_bad_step, course.symptoms[0].form) == ("nan_inf", 21, "weights")


def test_a_validation_loss_alone_may_be_nan() -> None:
    fine = list(steps(learning(20)))
    fine[9] = dataclasses.replace(fine[9], metrics={"val_loss": NAN, "bleu": NAN})
    course = diagnosed(fine)
    assert (course.symptom, course.first_bad_step, course.symptoms[0].form) == ("nan_inf", 10, "metric")


# --- the loss scale -----------------------------------------------------------------------------------------


def overflows(first: int, scale: float, count: int) -> list[Step]:
    return [
        Step(step=first + i, skipped=True, loss_scale=scale / 2**i, loss_scale_after=scale / 2 ** (i + 1))
        for i in range(count)
    ]


def test_a_scale_that_is_being_found_is_healthy_and_said_to_be() -> None:
    course = diagnosed([*overflows(1, 65536.0, 9), *(dataclasses.replace(s, step=s.step + 9, loss_scale=128.0)
                        for s in steps(learning(60)) if s.step is not None)])  # fmt: skip
    assert course.symptom == "none"
    assert course.scale is not None and "9 of them at the start" in course.scale


def test_now_and_then_a_step_back_is_healthy() -> None:
    run = [Step(step=i, loss=2.0 - i * 1e-4, grad_norm=1.0, loss_scale=65536.0, skipped=i % 500 == 499)
           for i in range(3000)]  # fmt: skip
    course = diagnosed(run)
    assert course.symptom == "none"
    assert course.scale is not None and "often" not in course.scale


def test_bad_gradients_at_every_scale_are_no_calibration() -> None:
    course = diagnosed([*steps(learning(5)), *overflows(6, 65536.0, 17)])
    assert (course.symptom, course.first_bad_step) == ("nan_inf", 6)
    assert course.symptoms[0].form == "scale_collapse"
    assert "lowering" not in course.advice[0] and "Do not lower" in course.advice[0]


def test_a_run_that_was_under_way_need_not_fall_to_the_bottom() -> None:
    told = diagnosed([*steps(learning(60)), *overflows(61, 65536.0, 9)])
    assert (told.symptom, told.first_bad_step) == ("nan_inf", 61)
    back = diagnosed([*steps(learning(60)), *overflows(61, 65536.0, 4), *steps(learning(60, 1.0, 0.9))])
    assert back.symptom == "none"


def test_steps_without_a_number_have_a_line() -> None:
    quiet = [Step(step=None, line=line, skipped=True, loss_scale_after=65536.0 / 2**line) for line in range(1, 60)]
    course = diagnosed(quiet)
    assert (course.symptom, course.first_bad_step, course.first_bad_line) == ("nan_inf", None, 1)


def test_a_scale_that_falls_often_is_remarked_with_the_parameter_that_overflows() -> None:
    run = [
        Step(step=i, loss=1.0, grad_norm=INF if i % 20 == 19 else 1.0, loss_scale=2.0**15, skipped=i % 20 == 19,
             worst="head.weight" if i % 20 == 19 else None)
        for i in range(400)
    ]  # fmt: skip
    course = diagnosed(run)
    assert course.scale is not None and "overflow often, first in head.weight" in course.scale


# --- loss_explosion -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "first", "form"),
    (
        ([2.35, 2.31, 2.28, 15.8, 1.2e4, NAN, NAN], 4, "growth"),
        ([0.69, 1.2, 5.3, 40.0, 900.0, 2e4, NAN], 1, "growth"),
        ([*learning(20), 350.0, NAN, NAN], 21, "growth"),
        ([*learning(20), 300.0, 4e4, INF], 21, "growth"),
        ([*learning(20), *(1e4 + i % 7 for i in range(40))], 21, "level"),
        ([*learning(60, 7, 3.5, 0.05), 4.7, 5.3, 6.2, 6.9, *noisy([7.3] * 60, 0.05)], 61, "level"),
    ),
)
def test_a_loss_that_rises_is_an_explosion_from_where_it_left_its_level(
    losses: list[float], first: int, form: str
) -> None:
    course = diagnosed(steps(losses))
    assert (course.symptom, course.first_bad_step, course.symptoms[0].form) == ("loss_explosion", first, form)
    assert [symptom.name for symptom in course.symptoms] == ["loss_explosion"]  # the NaN is only the end of it


def test_an_explosion_begins_where_the_gradient_norm_leaves_its_level() -> None:
    losses = [*learning(30, 10, 9), 9.1, 9.4, 10.4, 12.0, 14.4]
    norms = [*noisy([0.9] * 30, 0.05), 2.6, 7.7, 16.2, 28.0, 43.0]
    course = diagnosed(steps(losses, norms=norms, spacing=100))
    assert (course.symptom, course.first_bad_step) == ("loss_explosion", 3100)
    assert "gradient norm" in course.evidence[1].lower()


def test_slow_growth_is_found_though_the_level_goes_along_with_it() -> None:
    losses = [*learning(100, 4, 2, 0.05), *noisy((2 * 1.01**i for i in range(300)), 0.05)]
    course = diagnosed(steps(losses))
    assert course.symptom == "loss_explosion"
    assert course.symptoms[0].form in ("slow", "growth")
    assert course.first_bad_step is not None and 95 <= course.first_bad_step <= 170


def test_an_explosion_is_retold_as_far_as_it_has_got() -> None:
    diagnosis = Diagnosis()
    for step in steps([*learning(20), *(2.0 * 3**i for i in range(1, 12)), NAN]):
        diagnosis.see(step)
    (told,) = diagnosis.symptoms
    (now,) = diagnosis.course(source="run", format="live").symptoms
    assert "354 294" in now.cause and "354 294" not in told.cause
    assert "nan at step 32 is only the end of it" in now.cause
    assert (now.step, now.seen) == (told.step, told.seen)


def test_a_spike_that_recovers_is_a_remark() -> None:
    losses = [*learning(50), 9.0, 5.0, 2.0, 1.3, *noisy([1.0] * 50, 0.03)]
    course = diagnosed(steps(losses))
    assert course.symptom == "none"
    assert "1 spike of the loss recovered: 9 at step 51" in course.remarks[0]


def test_a_restart_goes_back_and_is_remarked() -> None:
    first = list(steps(learning(50)))
    course = diagnosed([*first, *first[20:]])
    assert course.symptom == "none"
    assert "from 50 to 21" in course.remarks[0]
    assert (21, "restart") in course.marks


# --- vanishing_gradient -----------------------------------------------------------------------------------------


def flat(count: int, level: float = 2.303) -> list[float]:
    return noisy([level] * count, 0.003)


@pytest.mark.parametrize(
    ("changes", "form"),
    (
        ({"grad_norm": 0.0}, "no_gradient"),
        ({"grad_norm": 3e-8}, "tiny"),
        ({"grad_norm": 0.3, "autocast": "float16", "small_grads": 0.9, "zero_grads": 0.5}, "under_scaled"),
        ({"grad_norm": 0.3, "frozen": 0.01}, "frozen"),
        ({"grad_norm": 0.3, "dead": ("net.3",), "small_grads": 0.0}, "dead"),
        ({"grad_norm": 0.3, "faint": 0.6}, "cut_off"),
        ({"grad_norm": 0.3, "clipped_norm": 1 / 65536, "loss_scale": 65536.0}, "clipped_before_unscale"),
        ({"grad_norm": 1 / 65536, "loss_scale": 65536.0}, "clipped_before_unscale"),
    ),
)
def test_each_way_in_which_a_gradient_vanishes_has_its_name(changes: dict[str, object], form: str) -> None:
    run = [Step(step=i, loss=loss, lr=(0.1,), **changes) for i, loss in enumerate(flat(40))]  # type: ignore[arg-type]
    course = diagnosed(run)
    assert (course.symptom, course.first_bad_step) == ("vanishing_gradient", 0)
    assert form in [symptom.form for symptom in course.symptoms]


def test_gradients_may_vanish_when_there_is_nothing_left_to_learn() -> None:
    losses = [2.0 * 0.8**i for i in range(120)]
    assert diagnosed(steps(losses, norms=losses)).symptom == "none"


def test_a_short_log_of_zero_gradients_is_enough() -> None:
    assert diagnosed(steps(flat(4), norms=[0.0] * 4)).symptom == "vanishing_gradient"


# --- non_convergence -----------------------------------------------------------------------------------------------


def test_updates_below_half_an_ulp_are_lost() -> None:
    run = [
        Step(step=i, loss=loss, lr=(1e-3,), dtypes=("bfloat16",), lost_updates=0.9, grad_norm=0.2)
        for i, loss in enumerate(flat(20, 0.045))
    ]
    course = diagnosed(run)
    assert (course.symptom, course.symptoms[0].form) == ("non_convergence", "lost_updates")
    assert "bfloat16" in course.symptoms[0].cause
    sharp = [dataclasses.replace(step, dtypes=("float32",)) for step in run]
    assert diagnosed(sharp).symptom == "none"


def test_a_learning_rate_of_zero_trains_nothing_and_one_that_ends_there_is_a_schedule() -> None:
    assert diagnosed(steps(flat(40), norms=[0.3] * 40, lrs=[0.0] * 40)).symptoms[0].form == "no_lr"
    skipped = [Step(step=i, lr=(0.0,), skipped=True, loss_scale=2.0 ** (32 - i)) for i in range(15)]  # of a warm-up
    assert diagnosed([*skipped, *steps(learning(40), lrs=[1e-4] * 40)]).symptom == "none"
    falling = [max(1 - i / 60, 0.0) for i in range(80)]
    assert diagnosed(steps(learning(80), norms=[0.3] * 80, lrs=falling)).symptom == "none"


@pytest.mark.parametrize("level", (math.log(2), math.log(10), 10.82))
def test_a_loss_that_stands_at_the_level_of_chance_does_not_converge(level: float) -> None:
    course = diagnosed(steps(noisy([level] * 60, 0.004 * level)))
    assert (course.symptom, course.symptoms[0].form) == ("non_convergence", "plateau")
    assert course.symptoms[0].confidence == "possible"


def test_a_fine_tuning_that_stands_where_it_began_is_left_alone() -> None:
    assert diagnosed(steps(noisy([0.42] * 200, 0.02), norms=[0.3] * 200)).symptom == "none"


def test_low_precision_state_is_named_where_the_loss_stands() -> None:
    run = [
        Step(step=i, loss=loss, dtypes=("bfloat16",), state_dtypes=("bfloat16",), grad_norm=0.2)
        for i, loss in enumerate(noisy([0.42] * 200, 0.01))
    ]
    course = diagnosed(run)
    assert (course.symptom, course.symptoms[0].form) == ("non_convergence", "low_precision_state")


# --- metric_fluctuation ---------------------------------------------------------------------------------------------


def test_a_metric_that_jumps_without_a_trend_fluctuates() -> None:
    jumping = [0.52, 0.71, 0.43, 0.69, 0.38, 0.74, 0.45, 0.70, 0.36, 0.72]
    course = diagnosed(steps(learning(10, sigma=0.01), accuracy=jumping))
    assert (course.symptom, course.symptoms[0].form) == ("metric_fluctuation", "jumps")
    rising = [0.3 + 0.05 * i + 0.02 * (-1) ** i for i in range(12)]
    assert diagnosed(steps(learning(12, sigma=0.01), accuracy=rising)).symptom == "none"


def test_jumps_beside_a_churning_scale_are_laid_to_it() -> None:
    accuracy = noisy([0.8] * 40, 0.07)
    run = [
        Step(step=i, loss=1.0, grad_norm=INF if i % 10 == 9 else 1.0, loss_scale=2.0**15, skipped=i % 10 == 9,
             metrics={"accuracy": accuracy[i // 10]} if i % 10 == 0 else {})
        for i in range(400)
    ]  # fmt: skip
    course = diagnosed(run)
    assert (course.symptom, course.symptoms[0].form) == ("metric_fluctuation", "scale_churn")


def test_a_training_reward_is_no_validation_metric() -> None:
    run = [Step(step=i, loss=0.0 + i % 3, metrics={"reward": float(i % 5)}) for i in range(60)]
    assert diagnosed(run).symptom == "none"


# --- the record, and what it withstands ---------------------------------------------------


def test_what_a_run_suffers_from_comes_first() -> None:
    jumping = [0.5 + 0.2 * (-1) ** i for i in range(40)]
    course = diagnosed([*steps(learning(40), accuracy=jumping), Step(step=41, loss=NAN)])
    assert [symptom.name for symptom in course.symptoms] == ["nan_inf", "metric_fluctuation"]


def test_a_course_goes_to_json_and_back() -> None:
    course = diagnosed([*method_example(40), Step(step=None, line=3, note="text", metrics={"a": NAN})])
    text = course.to_json()
    again = Course.from_dict(json.loads(text))
    assert again.to_json() == text
    assert again.symptoms[0].before == course.symptoms[0].before
    assert json.loads(text)["symptom"] == "nan_inf" and json.loads(text)["first_bad_step"] == 1202
    for wrong in ({}, {"nanhunt_course": 99}, [], {**json.loads(text), "symptoms": [{"name": 1}]}):
        with pytest.raises(UsageError, match="not a"):
            Course.from_dict(wrong)


def test_a_step_goes_to_json_and_back() -> None:
    step = Step(step=3, loss=INF, lr=(0.1, 0.2), metrics={"a": 1.0}, losses={"b": -INF}, dead=("x",), skipped=False)
    assert Step.from_dict(json.loads(json.dumps(step.to_dict(), allow_nan=False))) == step
    with pytest.raises(UsageError, match="unknown fields"):
        Step.from_dict({"speed": 3})


def test_every_form_has_its_advice() -> None:
    from nanhunt.symptoms import breaks, stillness
    from nanhunt.symptoms.counsel import ADVICE

    assert set(stillness._FORMS) <= set(ADVICE)
    assert all(ADVICE.values())
    assert breaks is not None


def test_memory_is_bounded_however_long_the_run_is() -> None:
    def size(thing: object, seen: set[int]) -> int:
        if id(thing) in seen or isinstance(thing, type):
            return 0
        seen.add(id(thing))
        total = sys.getsizeof(thing)
        if isinstance(thing, dict):
            return total + sum(size(k, seen) + size(v, seen) for k, v in thing.items())
        if isinstance(thing, (list, tuple, set, frozenset)) or type(thing).__name__ == "deque":
            return total + sum(size(item, seen) for item in thing)  # type: ignore[attr-defined]
        inside = [getattr(thing, name, None) for name in getattr(type(thing), "__slots__", ())]
        return total + size(getattr(thing, "__dict__", {}), seen) + sum(size(item, seen) for item in inside)

    draw = random.Random(0)
    diagnosis, sizes = Diagnosis(), []
    for i in range(30_000):
        value = draw.choice((draw.gauss(1, 5), NAN, 1e30 * draw.random(), 0.0))
        diagnosis.see(
            Step(step=i, loss=value, grad_norm=abs(value), loss_scale=2.0 ** draw.randrange(20), skipped=i % 7 == 0,
                 metrics={f"m{i % 5 if i < 9_000 else i}": value}, losses={f"l{i % 5 if i < 9_000 else i}": value})
        )  # fmt: skip
        if i in (10_000, 29_999):
            sizes.append(size(diagnosis, set()))
    assert sizes[1] < 1.2 * sizes[0] < 2**22


numbers = st.one_of(st.none(), st.floats(), st.sampled_from((0.0, 1.0, 1e-300, 1e300, -1e300, NAN, INF)))
anything = st.builds(
    Step,
    step=st.one_of(st.none(), st.integers(-(10**12), 10**12)),
    line=st.one_of(st.none(), st.integers(1, 10**9)),
    loss=numbers,
    grad_norm=numbers,
    clipped_norm=numbers,
    lr=st.lists(st.floats(), max_size=2).map(tuple),
    loss_scale=numbers,
    loss_scale_after=numbers,
    skipped=st.one_of(st.none(), st.booleans()),
    update_ratio=numbers,
    lost_updates=numbers,
    zero_grads=numbers,
    small_grads=numbers,
    faint=numbers,
    frozen=numbers,
    bad_weights=st.one_of(st.none(), st.integers(0, 5)),
    metrics=st.dictionaries(st.text(max_size=4), st.floats(), max_size=2),
    losses=st.dictionaries(st.text(max_size=4), st.floats(), max_size=2),
    dtypes=st.sampled_from(((), ("bfloat16",), ("float16", "float32"))),
    autocast=st.sampled_from((None, "float16", "bfloat16")),
    note=st.sampled_from((None, "Minimum loss scale reached", "loss is exploding", "infinite or NaN")),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(anything, max_size=80), st.integers(1, 6))
def test_no_record_whatever_it_holds_breaks_the_diagnosis(records: list[Step], times: int) -> None:
    course = diagnosed(record for record in records for _ in range(times))
    assert course.symptom in (*SYMPTOMS, "none")
    assert json.loads(course.to_json()) == json.loads(Course.from_dict(json.loads(course.to_json())).to_json())
    for symptom in course.symptoms:
        assert isinstance(symptom, Symptom) and symptom.cause and symptom.advice


# --- shapes that were taken for something else


def _shape(losses: Sequence[float], norms: Sequence[float] | None = None) -> Diagnosis:
    """The diagnosis of a run with these losses, and gradient norms where they are given."""
    diagnosis = Diagnosis()
    for i, loss in enumerate(losses):
        diagnosis.see(Step(step=i, loss=loss, grad_norm=None if norms is None else norms[i]))
    diagnosis.end()
    return diagnosis


def test_a_loss_that_jumps_above_its_beginning_has_exploded_though_the_gradient_is_smaller() -> None:
    """Where it only falls back to chance, the units have died, which is another symptom."""
    rng = random.Random(0)
    for top, want in ((7.8, "loss_explosion"), (6.9, "none")):
        losses = [2 + 5 * math.exp(-i / 60) if i < 300 else top for i in range(400)]
        noisy = [loss + rng.gauss(0, 0.05) for loss in losses]
        norms = [0.5 if i < 300 else 0.05 for i in range(400)]
        told = _shape(noisy, norms).symptoms
        assert [symptom.name for symptom in told][:1] == ([want] if want != "none" else [])
        assert want == "none" or told[0].step in range(299, 304)


def test_an_explosion_that_is_told_late_began_where_the_loss_left_its_level() -> None:
    """Not where it had a tenth of its height: of growth by a fifth a step that is long after."""
    rng = random.Random(0)
    losses = [-100 * (1 - math.exp(-i / 100)) + rng.gauss(0, 1) for i in range(500)]
    losses += [-100 + 3 * 1.2**i for i in range(60)]
    told = _shape(losses).symptoms
    assert told[0].name == "loss_explosion" and told[0].step in range(490, 516)


def test_a_surrogate_loss_may_rise_while_a_reward_is_made_large() -> None:
    """Of GRPO and PPO; without the reward the same loss is one that rises slowly."""
    rng = random.Random(0)
    for metrics, want in (({"reward": 0.5}, "none"), ({}, "loss_explosion")):
        diagnosis = Diagnosis()
        for i in range(400):
            loss = abs(rng.gauss(0, 3e-4)) + i * 1e-5
            diagnosis.see(Step(step=i, loss=loss, grad_norm=0.3, metrics=metrics))
        diagnosis.end()
        assert [symptom.name for symptom in diagnosis.symptoms] == ([want] if want != "none" else [])


def test_a_loss_that_stands_at_chance_is_told_from_few_records_far_apart() -> None:
    """30 lines over 60,000 steps; and the page says what chance is. As many steps in a row are too few."""
    rng = random.Random(0)
    for apart, want in ((2000, "non_convergence"), (1, "none")):
        diagnosis = Diagnosis()
        for i in range(30):
            diagnosis.see(Step(step=i * apart, loss=math.log(10) + rng.gauss(0, 0.002)))
        diagnosis.end()
        course = diagnosis.course(source="run.log", format="live")
        assert course.symptom == want
        assert want == "none" or "guessing among 10 classes" in (course.cause or "")


def test_an_accuracy_of_nearly_nothing_does_not_fluctuate() -> None:
    """A jump from 0.9% to 1.1% is no jump, before anything is learned; one from 20% to 80% is."""
    rng = random.Random(0)
    for values, want in (([0.009, 0.011, 0.007, 0.012], "none"), ([0.2, 0.8, 0.3, 0.7], "metric_fluctuation")):
        diagnosis = Diagnosis()
        for i in range(400):
            metrics = {"val_acc": rng.choice(values)} if i % 10 == 0 else {}
            diagnosis.see(Step(step=i, loss=3 * math.exp(-i / 50), metrics=metrics))
        diagnosis.end()
        assert [symptom.name for symptom in diagnosis.symptoms] == ([want] if want != "none" else [])


def test_a_metric_that_leaps_once_and_stays_does_not_fluctuate() -> None:
    """As where a model that had learned by heart begins to generalise."""
    rng = random.Random(0)
    diagnosis = Diagnosis()
    for i in range(1000):
        value = 0.01 + 0.98 / (1 + math.exp(-(i - 700) / 20)) + rng.gauss(0, 0.002)
        diagnosis.see(Step(step=i, loss=3 * math.exp(-i / 50), metrics={"val_acc": value} if i % 10 == 0 else {}))
    diagnosis.end()
    assert diagnosis.symptoms == []


def test_a_nan_that_has_passed_is_told_so() -> None:
    """The update was held back, or one batch was bad: what to do is to look at that batch."""
    losses = [2.0 - 0.01 * i if i != 30 else math.nan for i in range(60)]
    diagnosis = _shape(losses)
    course = diagnosis.course(source="run.log", format="live")
    assert course.first_bad_step == 30 and "All is finite again from step 31 on" in (course.cause or "")
    assert course.advice[0].startswith("Look at that batch")
    stays = _shape([2.0 - 0.01 * i if i < 30 else math.nan for i in range(60)])
    assert "finite again" not in (stays.course(source="run.log", format="live").cause or "")


# --- records from elsewhere


@pytest.mark.parametrize(
    "wrong",
    [
        {"source": 5},
        {"steps": ["a", "b"], "records": "many"},
        {"marks": [["here", 5]]},
        {"remarks": [3]},
        {"curves": {"loss": {"at": ["x"], "low": [1.0], "mid": [1.0], "high": [1.0], "bad": [0]}}},
        {"curves": {"loss": None}},
        {"scale": 7},
        {"understood": [1]},
    ],
    ids=lambda wrong: ",".join(wrong),
)
def test_a_course_of_wrong_types_is_refused_when_it_is_read(wrong: dict[str, object]) -> None:
    """Not later, in a page."""
    data = json.loads(diagnosed(steps([2.0, 1.5, NAN, NAN])).to_json())
    assert Course.from_dict(data).symptom == "nan_inf"
    with pytest.raises(UsageError, match="course"):
        Course.from_dict({**data, **wrong})
    data["symptoms"][0]["advice"] = [1]
    with pytest.raises(UsageError, match="symptom"):
        Course.from_dict(data)


@pytest.mark.parametrize(
    "wrong",
    [{"loss": "high"}, {"metrics": {"acc": "x"}}, {"lr": ["a"]}, {"lr": 3}, {"step": 1.5}, {"losses": [1]}],
    ids=str,
)
def test_a_step_of_wrong_types_is_refused_when_it_is_read(wrong: dict[str, object]) -> None:
    """A torn or edited line of a record is left out, and does not stop the diagnosis of the rest."""
    assert Step.from_dict({"step": 1, "loss": "nan", "lr": [0.1]}).bad() == ("loss",)
    with pytest.raises(UsageError, match="step"):
        Step.from_dict({"step": 1, **wrong})


def test_what_the_scale_did_is_put_into_words() -> None:
    """Growth, a step lost now and then, and a scale that falls are different things."""
    grown = [2.0**10 * 2 ** (i // 100) for i in range(400)]
    course = diagnosed(steps([2.0] * 400, norms=[1.0] * 400, scales=grown))
    assert course.scale == "The loss scale went from 1 024 to 8 192 without a skipped step, as it should."
    rare = Diagnosis()
    for i in range(400):
        lost = i in (100, 300)
        scale = 2.0**16 if i <= 100 else 2.0**15
        rare.see(Step(step=i, loss=2.0, grad_norm=INF if lost else 1.0, loss_scale=scale, skipped=lost))
    rare.end()
    assert rare.symptoms == [] and (rare.scale or "").endswith(
        "2 steps were skipped: now and then is as it should be, that is how the largest scale is found."
    )
