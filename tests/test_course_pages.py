"""A course as a page: what it says on a terminal and in a browser, and that nothing gets out of its place."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import pathlib
import re
import sys

import pytest
from hypothesis import HealthCheck, given, settings

from nanhunt.report import course_page, course_text
from nanhunt.report.course_words import lanes, title
from nanhunt.report.lines import cells
from nanhunt.symptoms.course import Course
from nanhunt.symptoms.steps import SYMPTOMS, Symptom

from . import browser, test_html
from .courses import EVIL, NAN, courses, every, flat, healthy, method, sick

ALL = {course.source: course for course in every()}
needs_browser = test_html.needs_browser


def text(course: Course, **more: object) -> str:
    return course_text.page(course, **{"color": False, "width": 80, "braille": True, **more})  # type: ignore[arg-type]


# --- on a terminal ------------------------------------------------------------------------------------------


def test_the_verdict_stands_first_on_a_line_of_its_own() -> None:
    assert text(method()).split("\n")[0] == "run.log: nan_inf from step 1202 on (certain)"
    assert title(sick("loss_explosion")) == "loss_explosion.csv: loss_explosion from step 4200 on (likely)"
    assert title(dataclasses.replace(method(), source="-")).startswith("standard input: nan_inf")
    assert title(healthy()) == "flow.jsonl: no symptom in 1 200 records, steps 0 to 999"
    assert title(ALL["a.bin"]) == "a.bin: no record of a step was found in it"


def test_without_step_numbers_the_verdict_names_the_line() -> None:
    found = dataclasses.replace(method().symptoms[0], step=None)
    assert title(dataclasses.replace(method(), symptoms=(found,))) == "run.log: nan_inf from line 3 on (certain)"
    nowhere = dataclasses.replace(found, line=None)
    assert title(dataclasses.replace(method(), symptoms=(nowhere,))) == "run.log: nan_inf (certain)"


@pytest.mark.parametrize("source", ALL)
@pytest.mark.parametrize("width", [40, 80, 100])
def test_a_page_tells_all_there_is_to_tell_within_its_width(source: str, width: int) -> None:
    course = ALL[source]
    said = text(course, width=width)
    assert max(map(cells, said.split("\n"))) <= width
    flat_text = " ".join(said.split())
    for fact in (course.cause, *course.advice, *course.evidence, *course.remarks, course.scale):
        assert fact is None or " ".join(fact.split()) in flat_text
    assert "What was read" in said
    assert said.count("\n") < 90


def test_what_to_do_comes_before_the_evidence_and_the_curves() -> None:
    said = text(method())
    order = [
        said.index(f"\n\n{head}\n")
        for head in ("What to do", "Evidence", "The state before it", "The loss scale", "Curves", "What was read")
    ]
    assert order == sorted(order)


def test_the_last_healthy_record_stands_beside_the_first_bad_one() -> None:
    said = text(method()).partition("The state before it\n")[2].partition("\n\n")[0].split("\n")
    assert said[0].split("  ")[-2:] == ["last healthy, step 1201", "first bad, step 1202"]
    rows = {line[:18].strip(): line[18:].split("  ") for line in said[1:]}
    told = {name: [value.strip() for value in values if value.strip()] for name, values in rows.items()}
    assert told["loss"] == ["3.02", "nan"] and told["gradient norm"] == ["1.24", "nan"]
    assert told["loss scale"] == ["65 536", "32 768"] and told["batch"] == ["3fa9c1d2", "88b2e0aa"]
    assert told["learning rate"] == ["0.0003", "0.0003"] and told["step was skipped"] == ["yes"]


def test_metrics_and_parts_of_the_loss_have_rows_of_their_own() -> None:
    said = text(sick("nan_inf"))
    assert re.search(r"^metric: accuracy +0\.71$", said, re.MULTILINE)
    assert re.search(r"^loss: aux +0\.1$", said, re.MULTILINE)
    assert re.search(r"^zero gradients +25%$", said, re.MULTILINE)


def test_a_gap_between_two_records_is_told_of() -> None:
    assert "began after step 4190, by step 4200" in " ".join(text(sick("nan_inf")).split())
    assert "began after step 1201; " in " ".join(text(method()).split()) + "; "


def test_the_charts_are_those_that_speak_of_the_symptom() -> None:
    def charts(course: Course) -> list[str]:
        return re.findall(r"^(\w[\w ]+)  (?:first|always|NaN)", text(course), re.MULTILINE)

    assert charts(method()) == ["loss", "gradient norm", "loss scale"]
    still = dataclasses.replace(method(), curves={**method().curves, "loss_scale": flat(8.0, 8.0)})
    assert charts(still) == ["loss", "gradient norm"]
    assert charts(sick("metric_fluctuation")) == ["loss", "gradient norm", "metric accuracy"]
    other = dataclasses.replace(healthy(), curves={"perplexity": flat(3.0, 2.0)})
    assert charts(other) == ["perplexity"]


def test_curves_that_hold_nothing_have_no_section() -> None:
    for shown in ({}, {"loss": flat()}, {"loss": flat(), "lr": flat()}):
        assert "Curves" not in text(dataclasses.replace(healthy(), curves=shown))


def test_other_symptoms_are_told_in_short() -> None:
    both = dataclasses.replace(method(), symptoms=(*method().symptoms, *sick("non_convergence").symptoms * 6))
    said = text(both)
    assert said.count("- non_convergence from step 4200 on (likely): Numbers") == 4
    assert "To do: The first action." in " ".join(said.split()) and "(and 2 more in the record)" in said


def test_lines_that_were_not_understood_are_shown_without_their_control_characters() -> None:
    said = text(ALL["a.bin"])
    assert "  line 1: \\x1b 12" in said
    assert "2 lines read, 0 of them hold a record" in " ".join(said.split())
    assert "step 12 | loss 2.31" in " ".join(said.split()), "what can be read is taught"


def test_events_are_told_by_kind_the_rarest_first() -> None:
    marks = (
        (1.0, "skipped"),
        (2.0, "skipped"),
        (3.0, "restart from 600"),
        (math.nan, "x"),
        (4.0, "epoch 3"),
        (5.0, "7"),
    )
    found = lanes(dataclasses.replace(healthy(), marks=marks), 9)
    assert found == [("restart", [3.0]), ("epoch", [4.0]), ("event", [5.0]), ("skipped", [1.0, 2.0])]


def test_colour_takes_no_room_and_is_off_when_it_is_not_wanted() -> None:
    for course in ALL.values():
        painted = text(course, color=True)
        assert re.sub(r"\x1b\[\d+m", "", painted) == text(course)
        assert "\x1b[1m" in painted


def test_the_terminal_decides_on_width_braille_and_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    for name, value in (("COLUMNS", "60"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    assert str(method()) == text(method(), width=60, braille=False)
    assert str(method()).isascii()
    monkeypatch.setenv("COLUMNS", "400")
    assert str(method()) == text(method(), width=100, braille=False)


def test_several_pages_begin_with_all_verdicts() -> None:
    said = course_text.pages([method(), healthy()], color=False, width=80, braille=True)
    assert said.split("\n")[:3] == ["2 runs, 1 with a symptom", title(method()), title(healthy())]
    assert f"\n1 of 2\n\n{text(method())}\n\n2 of 2\n\n{text(healthy())}\n" in said
    assert course_text.pages([method()], color=False, width=80, braille=True) == f"{text(method())}\n"


# --- on a page ----------------------------------------------------------------------------------------------


def flattened(shown: str) -> str:
    return " ".join("".join(test_html.read(shown).text).split())


@pytest.mark.parametrize("source", ALL)
def test_every_course_has_a_page_with_all_its_facts(source: str) -> None:
    course = ALL[source]
    shown = course_page.page(course)
    said = flattened(shown)
    assert title(course) in said
    for fact in (course.cause, *course.advice, *course.evidence, *course.remarks, course.scale):
        assert fact is None or " ".join(fact.split()) in said
    assert test_html.size(shown) < 60_000
    first, _, _ = shown.partition("<section")
    assert 'class="advice"' in first or not course.advice


def test_every_curve_has_its_drawing_told_in_words() -> None:
    reader = test_html.read(course_page.page(method()))
    told = [given["aria-label"] for tag, given in reader.elements if tag == "svg" and given.get("role") == "img"]
    assert told == [
        "loss: first 2.31, last 3.02, NaN or Inf 2 times",
        "gradient norm: first 0.87, last 1.24, NaN or Inf 2 times",
        "loss scale: first 65 536, last 16 384, log scale",
        "learning rate: always 0.0003",
        "skipped, 2 times",
    ]


def test_the_symptom_goes_through_every_drawing() -> None:
    shown = course_page.page(method())
    assert shown.count('class="flag through"') == 1 + 4 + 1, "flag, curves, lane"
    assert ">nan_inf 1202</text>" in shown


def test_a_symptom_without_a_step_is_drawn_behind_the_last_healthy_one() -> None:
    found = dataclasses.replace(method().symptoms[0], step=None)
    course = dataclasses.replace(method(), symptoms=(found,))
    assert ">nan_inf after 1201</text>" in course_page.page(course)
    assert text(course).split("Curves")[1].count("▲") == 1


def test_how_to_read_speaks_only_of_what_is_there() -> None:
    said = flattened(course_page.page(healthy()))
    assert "red" not in said and "before a restart is pale" in said
    said = flattened(course_page.page(method()))
    assert "red ground" in said and "The red line" in said and "restart" not in said


def test_several_runs_have_an_index_and_one_alone_has_none() -> None:
    found = every()
    reader = test_html.read(course_page.pages(found, notes=["<from> a folder"]))
    assert reader.links == [f"#run-{n}" for n in range(1, len(found) + 1)]
    assert f"{len(found)} runs, 6 with a symptom" in reader.text and "<from> a folder" in reader.text
    assert course_page.pages([method()]) == course_page.page(method())
    assert "0 runs, 0 with a symptom" in test_html.read(course_page.pages([])).text


def test_many_runs_stay_on_a_page_of_bounded_size() -> None:
    shown = course_page.pages(every() * 20)
    assert test_html.size(shown) < 500_000
    assert "for want of room" in flattened(shown)


def test_the_largest_record_stays_on_a_page_of_bounded_size() -> None:
    name = '"宽' * 3000
    long = flat(*(math.sin(n) for n in range(2000)))
    found = Symptom(
        name=name, form=name, step=3, cause=name, advice=(name,) * 90, evidence=(name,) * 90, confidence=name
    )
    course = Course(
        source=name,
        format=name,
        records=10**9,
        steps=(0, 2000),
        symptoms=(found,) * 90,
        remarks=(name,) * 90,
        scale=name,
        curves={f"{name[:99]}{n}": long for n in range(90)},
        marks=tuple((float(n), f"{n % 7}{name}") for n in range(5000)),
        unknown=(name,) * 90,
    )
    for shown in (course_page.page(course), course_page.pages([course] * 4)):
        assert test_html.size(shown) < 500_000
        assert "Not on this page, but in the record: " in flattened(shown)


def test_the_page_stands_in_a_frame_with_the_text_below_it() -> None:
    shown = method()._repr_html_()
    assert 'sandbox=""' in shown and "srcdoc=" in shown
    assert "nan_inf from step 1202 on (certain)</summary>" in shown
    assert "last healthy, step 1201" in shown.partition("<details>")[2]


# --- any course ---------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(courses)
def test_any_course_has_a_page_of_at_most_100_columns(course: Course) -> None:
    for more in ({"width": 40}, {"width": 100, "braille": False}):
        assert max(map(cells, text(course, **more).split("\n"))) <= more["width"]
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e\u2028]", text(course))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(courses)
def test_no_text_leaves_its_place(course: Course) -> None:
    for shown in (course_page.page(course), course_page.pages([course, course], notes=[EVIL[1]])):
        test_html.read(shown)
        assert shown.count("</style>") == 1
        assert test_html.size(shown) < 500_000


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(courses)
def test_a_course_that_was_saved_and_read_again_has_the_same_pages(course: Course) -> None:
    again = Course.from_dict(json.loads(course.to_json()))
    assert text(again) == text(course)
    assert course_page.page(again) == course_page.page(course)


@pytest.mark.parametrize("evil", ["<script>alert(1)</script>", "<path onclick='x'>", "</svg>", "<!-- -->"])
def test_the_reader_refuses_what_was_not_escaped(evil: str) -> None:
    """Guards the tests above: they would pass with a reader that takes anything."""
    shown = course_page.page(dataclasses.replace(method(), scale="HERE")).replace("HERE", evil)
    with pytest.raises(AssertionError):
        test_html.read(shown)


# --- in a browser -------------------------------------------------------------------------------------------


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(400, False), (1200, True)])
def test_the_page_is_drawn_without_a_complaint(tmp_path: pathlib.Path, width: int, dark: bool) -> None:
    file = tmp_path / "course.html"
    file.write_text(course_page.page(sick("nan_inf")), encoding="utf-8")
    picture, console = browser.screenshot(file, width=width, height=1400, dark=dark)
    assert console == []
    assert len(set(browser.rows(picture))) > 100, "a blank page has one"
    assert (browser.background(picture) < 60) is dark


@needs_browser
def test_every_width_has_room_for_the_page(tmp_path: pathlib.Path) -> None:
    long = "encoder_with_a_very_long_name." * 12 + "wo"
    course = sick("metric_fluctuation")
    middle = dataclasses.replace(course.symptoms[0], step=2900)
    hard = dataclasses.replace(
        course,
        source=f"/a{'/b' * 200}.log",
        symptoms=(*course.symptoms, middle, *(dataclasses.replace(middle, name=long, step=n) for n in (5, 5985))),
        curves={**course.curves, long: flat(1e-300, NAN, 1e300)},
        marks=((10.0, long), (20.0, "skipped")),
        unknown=(long,),
    )
    for shown in (course_page.page(course), course_page.page(hard), course_page.pages([hard, method()])):
        for told in browser.measure(shown, tmp_path, widths=(320, 400, 768, 1280)):
            assert told["needs"] == told["width"], told
            assert told["over"] == []
            assert told["drawings"] and told["flat"] == 0


@needs_browser
@pytest.mark.parametrize("name", SYMPTOMS)
def test_verdict_cause_and_advice_are_on_the_first_screen(tmp_path: pathlib.Path, name: str) -> None:
    (told,) = browser.measure(course_page.page(sick(name)), tmp_path, widths=(1280,))
    assert 0 < told["advice"] < 800
