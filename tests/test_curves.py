"""Curves: the scale they are drawn on, the dots of a terminal, the paths of a page."""

from __future__ import annotations

import io
import itertools
import math
import re
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanhunt.report.curves import Lines, drawing, flags, foot, lane
from nanhunt.report.dots import Chart, can_show, draw
from nanhunt.report.extent import Scale, Span, runs, spoilt_stretches, thinned, values
from nanhunt.report.lines import cells
from nanhunt.report.paint import painter
from nanhunt.symptoms.course import Curve

from .courses import NAN, curve, curves, flat

finite = st.floats(allow_nan=False, allow_infinity=False)


def charted(
    shown: Curve, *, name: str = "loss", here: float | None = None, braille: bool = True, **more: object
) -> list[str]:
    span = Span.of(shown.at)
    assert span is not None
    chart = Chart(name=name, label=name, told="", curve=shown, height=5)
    given_options = {"width": 60, "paint": painter(False), "lanes": (), **more}
    return draw([chart], span, here=here, braille=braille, **given_options)  # type: ignore[arg-type]


def plotted(lines: list[str], side: str = "│") -> list[str]:
    """What stands right of the axis, line by line."""
    return [line.partition(side)[2] for line in lines if side in line]


# --- points -------------------------------------------------------------------------------------------------


def test_a_restart_begins_a_new_piece() -> None:
    steps = (0.0, 10.0, 20.0, 10.0, 20.0, 30.0)
    one = Curve(at=steps, low=steps, mid=steps, high=steps, bad=(0,) * 6)
    assert [[point.at for point in points] for points in runs(one)] == [[0, 10, 20], [10, 20, 30]]


def test_points_at_no_step_are_left_out_and_odd_ends_are_put_in_order() -> None:
    one = Curve(at=(math.nan, 1.0, 2.0), low=(1.0, 9.0, NAN), mid=(1.0, 5.0, NAN), high=(1.0, 2.0, NAN), bad=(0, 0, 3))
    assert runs(one) == [[(1.0, 2.0, 5.0, 9.0, 0), (2.0, None, None, None, 3)]]


def test_what_is_thinned_out_keeps_ends_and_counts() -> None:
    (points,) = runs(flat(*map(float, range(95)), NAN, NAN, NAN))
    few = thinned(points, 10)
    assert len(few) <= 10
    assert min(values([few])) == 0 and max(values([few])) == 94
    assert sum(point.bad for point in few) == 3
    assert thinned(points, 1000) == points


@given(st.lists(finite, min_size=1, max_size=50), st.integers(1, 60))
def test_thinning_holds_any_curve_between_the_same_ends(numbers: list[float], most: int) -> None:
    (points,) = runs(flat(*numbers))
    few = thinned(points, most)
    assert 1 <= len(few) <= max(most, 1)
    assert (min(values([few])), max(values([few]))) == (min(numbers), max(numbers))


def test_a_stretch_that_is_bad_in_part_turns_bad_at_the_step_that_is_known() -> None:
    pieces = runs(curve([(n, NAN if n >= 25 else 1.0) for n in range(40)], 4))
    assert list(spoilt_stretches(pieces, None)) == [(20.0, 30.0)]
    assert list(spoilt_stretches(pieces, 25.0)) == [(25.0, 30.0)]
    assert list(spoilt_stretches(pieces, 5.0)) == [(20.0, 30.0)], "5 lies in another stretch"


# --- scales -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numbers", "name", "kind"),
    [
        ([2.0, 3.0], "loss", "linear"),
        ([2.0, 3e4], "loss", "log"),
        ([0.0, 1e-8, 1.0], "grad_norm", "log"),
        ([0.0, 1e-8, 1.0], "lr", "linear"),
        ([32768.0, 65536.0], "loss_scale", "log"),
        ([-5.0, -3.0], "loss", "linear"),
        ([-1e9, -3.0, -4.0, 5.0], "loss", "signed"),
        ([0.0, 0.0], "grad_norm", "linear"),
    ],
)
def test_numbers_that_span_decades_are_drawn_by_their_logarithm(numbers: list[float], name: str, kind: str) -> None:
    scale = Scale.of(numbers, name)
    assert scale is not None and scale.kind == kind


def test_a_factor_of_ten_is_the_same_height_on_a_logarithmic_scale() -> None:
    scale = Scale.of([1e-4, 1e4])
    assert scale is not None
    heights = [scale.place(10.0**n) for n in range(-4, 5)]
    steps = [b - a for a, b in itertools.pairwise(heights)]
    assert heights[0] == 0 and heights[-1] == 1 and steps == pytest.approx([1 / 8] * 8)


def test_zero_stands_below_all_numbers_of_a_logarithmic_scale() -> None:
    scale = Scale.of([0.0, 1e-30, 1.0])
    assert scale is not None
    assert scale.place(0.0) == 0 < scale.place(1e-30) < scale.place(1.0) == 1
    assert scale.labels(0.2)[-1] == 0.0


@settings(deadline=None)
@given(st.lists(finite, min_size=1, max_size=20), st.sampled_from(["loss", "lr", "loss_scale"]))
@example([1.7e308, -1.7e308, 0.0], "loss")
@example([5e-324, 1.7e308], "loss")
@example([5e-324, 1e-323], "lr")
@example([0.0, 5e-324], "loss_scale")
@example([1e16, 1e16 + 2], "lr")
def test_a_scale_keeps_the_order_of_all_numbers_and_has_a_few_labels(numbers: list[float], name: str) -> None:
    scale = Scale.of(numbers, name)
    assert scale is not None
    places = [scale.place(number) for number in sorted(numbers)]
    assert places == sorted(places) and all(0 <= place <= 1 for place in places)
    labels = scale.labels(0.2)
    assert 1 <= len(labels) <= 7 and labels == sorted(labels, reverse=True)
    assert max(labels) == max(numbers) and (min(labels) == min(numbers))


def test_labels_that_would_read_alike_have_more_digits() -> None:
    scale = Scale.of([1.990e-4, 1.99012e-4], "lr")
    assert scale is not None
    assert [text for _, text in scale.texts(0.4)] == ["0.000199012", "0.000199005", "0.000199"]
    near = Scale.of([1.0, 1.0 + 2**-52])
    assert near is not None and [text for _, text in near.texts(0.2)] == ["1"]


def test_nothing_has_no_scale_and_no_span() -> None:
    assert Scale.of([]) is None
    assert Span.of([None, NAN, "x", True]) is None


@given(st.floats(-1e18, 1e18), st.floats(-1e18, 1e18))
def test_steps_have_few_ticks_inside_their_span(first: float, last: float) -> None:
    span = Span.of([first, last])
    assert span is not None
    ticks = list(span.ticks(4))
    assert len(ticks) <= 6
    assert all(span.first <= tick <= span.last for tick in ticks)


# --- on a terminal ------------------------------------------------------------------------------------------


def test_a_rising_curve_rises() -> None:
    rows = plotted(charted(flat(*map(float, range(200))), name="lr"))[:5]
    first_lit = [next(n for n, char in enumerate(row) if char != " ") for row in rows]
    assert first_lit == sorted(first_lit, reverse=True) and len(set(first_lit)) == 5


@pytest.mark.parametrize("braille", [True, False])
def test_the_first_bad_step_is_marked_in_every_line_and_the_bad_ones_have_a_line_of_their_own(braille: bool) -> None:
    lines = charted(flat(*[2.0, 1.0] * 50, *[NAN] * 100), here=100.0, braille=braille)
    side, bad, here, foot_mark = ("│", "\N{MULTIPLICATION SIGN}", "┊", "▲") if braille else ("|", "x", "|", "^")
    marked = next(line for line in lines if line.lstrip().startswith("nan/inf")).partition(side)[2]
    at = marked.index(bad)
    assert set(marked[at:]) == {bad} and not marked[:at].strip()
    body = [line.partition(side)[2] for line in lines if re.match(r"\s*[\d.]* [│|]", line)]
    assert len(body) == 5 and all(line[at] == here for line in body[1:4])
    floor, numbers = lines[-2], lines[-1]
    assert floor.index(foot_mark) == numbers.index("100") + 1
    assert numbers.split() == ["0", "100", "199"]


def test_a_curve_of_nothing_but_nan_is_a_line_of_marks() -> None:
    lines = charted(flat(NAN, math.inf, -math.inf), here=0.0)
    assert [line.partition("│")[0].strip() for line in lines if "│" in line] == ["nan/inf"]
    assert set(plotted(lines)[0]) == {"\N{MULTIPLICATION SIGN}"}


def test_one_point_and_a_constant_curve_are_drawn_in_the_middle() -> None:
    for shown in (flat(3.0), flat(3.0, 3.0, 3.0)):
        rows = plotted(charted(shown))[:5]
        assert [bool(row.strip()) for row in rows] == [False, False, True, False, False]


def test_a_gap_of_nan_is_not_bridged() -> None:
    rows = plotted(charted(flat(*[1.0] * 40, *[NAN] * 40, *[1.0] * 40)))
    middle = next(row for row in rows[1:] if row.strip())
    third = len(middle) // 3
    assert (
        middle[: third - 1].strip()
        and not middle[third + 2 : 2 * third - 2].strip()
        and middle[2 * third + 1 :].strip()
    )


def test_a_spike_inside_a_stretch_is_seen() -> None:
    series = [(n, 50.0 if n == 5001 else 1.0) for n in range(10_000)]
    rows = plotted(charted(curve(series, 100), name="lr"))
    assert rows[0].strip() and rows[4].strip()


def test_a_loss_scale_moves_in_stairs() -> None:
    """Between two records it has not been anything between."""
    lit = plotted(charted(flat(65536.0, 65536.0, 1.0, 1.0), name="loss_scale"))
    assert all(len(row.strip()) == 1 for row in lit[1:4]), "a wall, no slope"


def test_without_braille_there_is_ascii_alone() -> None:
    lines = charted(flat(1.0, 5.0, NAN, 2.0), here=2.0, braille=False, lanes=[("skipped", [2.0])])
    assert "\n".join(lines).isascii()
    assert "".join(plotted(lines, "|")).strip()


@pytest.mark.parametrize(
    ("encoding", "there"), [("utf-8", True), ("ascii", False), ("cp1252", False), ("cp437", False)]
)
def test_the_encoding_of_the_terminal_says_whether_braille_can_be_shown(
    monkeypatch: pytest.MonkeyPatch, encoding: str, there: bool
) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    assert can_show() is there


def test_events_have_a_line_for_each_kind() -> None:
    lines = charted(flat(*map(float, range(100))), lanes=[("skipped", [0.0, 99.0, 500.0]), ("epoch", [50.0])])
    skipped, epoch = (next(line for line in lines if line.lstrip().startswith(name)) for name in ("skipped", "epoch"))
    assert skipped.count("•") == 2 and epoch.count("•") == 1


def test_marks_are_red_and_take_no_more_room() -> None:
    plain = charted(flat(1.0, NAN), here=1.0)
    red = charted(flat(1.0, NAN), here=1.0, paint=painter(True))
    assert [re.sub(r"\x1b\[\d+m", "", line) for line in red] == plain
    assert sum("\x1b[31m" in line for line in red) >= 3


@settings(deadline=None, max_examples=80)
@given(curves(), st.integers(40, 100), st.booleans(), st.none() | st.floats())
def test_any_curve_fits_its_width(shown: Curve, width: int, braille: bool, here: float | None) -> None:
    span = Span.of(shown.at)
    if span is None:
        return
    chart = Chart(name="loss", label="宽" * 90, told="x" * 200, curve=shown, height=4)
    lanes = [("y" * 90, [span.first])]
    lines = draw([chart], span, here=here, lanes=lanes, width=width, paint=painter(False), braille=braille)
    assert all(cells(line) <= width for line in lines)


# --- on a page ----------------------------------------------------------------------------------------------


def paths(shown: str, kind: str) -> list[list[tuple[float, float]]]:
    found = re.findall(rf'<path d="M([^"Z]*)Z?" class="{kind}">', shown)
    return [[(float(x), float(y)) for x, y in re.findall(r"(-?\d+) (-?\d+)", one)] for one in found]


def svg(shown: Curve, name: str = "loss", lines: Lines | None = None) -> str:
    span = Span.of(shown.at)
    assert span is not None
    return drawing(name, shown, span, lines or Lines(), said="said", high=100)


def test_the_line_goes_through_the_medians_from_left_to_right() -> None:
    ((*line,),) = paths(svg(flat(0.0, 1.0, 4.0)), "median")
    assert line == [(0, 1000), (1000, 750), (2000, 0)]


def test_the_band_reaches_from_the_least_to_the_largest() -> None:
    one = Curve(at=(0.0, 1.0), low=(0.0, 1.0), mid=(2.0, 2.0), high=(4.0, 3.0), bad=(0, 0))
    assert paths(svg(one), "band") == [[(0, 0), (2000, 250), (2000, 750), (0, 1000)]]
    assert paths(svg(flat(1.0, 2.0)), "band") == [], "without a range there is none"


def test_nan_cuts_the_line_and_stands_on_a_red_ground_with_a_cross() -> None:
    shown = svg(flat(1.0, 2.0, NAN, NAN, 2.0, 1.0))
    assert len(paths(shown, "median")) == 2
    assert len(re.findall('class="spoilt"', shown)) == 1 and shown.count('class="cross"') == 1
    assert re.search(r'<rect x="40%" width="20%"[^>]*class="spoilt"', shown)
    assert 'x="40%"' in shown.partition('class="spoilt"')[2].partition('class="cross"')[0]


def test_what_was_before_a_restart_is_pale() -> None:
    steps = (0.0, 10.0, 20.0, 10.0, 20.0)
    shown = svg(Curve(at=steps, low=steps, mid=steps, high=steps, bad=(0,) * 5))
    assert len(paths(shown, "median past")) == 1 and len(paths(shown, "median")) == 1


def test_symptoms_and_rare_events_go_through_every_drawing() -> None:
    shown = svg(flat(1.0, 2.0, 3.0), lines=Lines(symptoms=[1.0, 2.0, 99.0], events=[0.0]))
    assert re.findall(r'x1="([\d.]+%)"[^>]*class="([\w ]+ through)"', shown) == [
        ("0%", "event through"),
        ("50%", "flag through"),
        ("100%", "flag other through"),
    ]


@pytest.mark.parametrize("shown", [flat(3.0), flat(3.0, 3.0, 3.0), flat(NAN), flat(NAN, NAN), flat(1e-300, 1e300, 0.0)])
def test_odd_curves_have_a_drawing_without_odd_numbers(shown: Curve) -> None:
    drawn = svg(shown, lines=Lines(symptoms=[0.0]))
    assert 'role="img" aria-label="said"' in drawn
    numbers = re.findall(r'\b(?:x|x1|x2|y|y1|y2|width|height|d)="([^"]*)"', drawn)
    assert numbers and not any("nan" in number or "inf" in number for number in numbers)
    assert bool(paths(drawn, "dot") or paths(drawn, "median")) is bool(values(runs(shown)))


def test_a_long_curve_stays_small_and_keeps_its_ends() -> None:
    drawn = svg(flat(*(math.sin(n / 900) for n in range(30_000)), 7.0))
    assert len(drawn) < 14_000
    (band,) = paths(drawn, "band")
    assert min(y for _, y in band) == 0 and max(y for _, y in band) == 1000


def test_flags_lanes_and_the_axis_stand_at_their_steps() -> None:
    span = Span(0.0, 200.0)
    drawn = flags([(0.0, "a"), (100.0, "b"), (200.0, "<c>")], span)
    anchors = re.findall(r'x="([\d.]+%)"[^>]*text-anchor="(\w+)"[^>]*>([^<]*)<', drawn)
    assert anchors == [("0%", "start", "a"), ("50%", "middle", "b"), ("100%", "end", "&lt;c&gt;")]
    events = lane("skipped", [50.0, 50.0, 999.0], span, Lines(), said="skipped")
    assert re.findall(r'x1="([\d.]+%)"[^>]*class="event"', events) == ["25%"]
    ticks = re.findall(r'x="([\d.]+%)"[^>]*class="label">([^<]*)<', foot(span))
    assert ticks == [("0%", "0"), ("25%", "50"), ("50%", "100"), ("75%", "150"), ("100%", "200")]


def test_thousands_of_events_are_thinned_out() -> None:
    drawn = lane("skipped", [float(n) for n in range(100_000)], Span(0.0, 99_999.0), Lines(), said="skipped")
    assert drawn.count('class="event"') <= 200
