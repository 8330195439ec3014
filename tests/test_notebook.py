"""A finding in a notebook: the page in a frame of its own, and the text where frames are not shown."""

from __future__ import annotations

import html.parser
import pathlib
import re

import pytest
from hypothesis import given, settings

from nanhunt.finding import Finding
from nanhunt.report.html import page

from . import browser
from .test_finding import findings
from .test_html import EVIL, hostile, needs_browser, real


class Cell(html.parser.HTMLParser):
    """The elements of an output cell with their attributes, and the text outside of the frame."""

    def __init__(self, shown: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(shown)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def _frame(cell: Cell) -> dict[str, str | None]:
    (frame,) = [given for tag, given in cell.elements if tag == "iframe"]
    return frame


def test_the_page_stands_in_a_frame_that_may_do_nothing() -> None:
    finding = real("forward")
    frame = _frame(Cell(finding._repr_html_()))
    assert frame["srcdoc"] == page(finding)
    assert frame["sandbox"] == ""
    assert "height:640px" in (frame["style"] or "")
    assert frame["title"] == finding.title()


def test_where_frames_are_taken_out_the_text_is_left() -> None:
    finding = real("forward")
    left = re.sub(r"<iframe.*?</iframe>", "", finding._repr_html_(), flags=re.DOTALL)
    assert Cell(left).text == finding.title() + str(finding)


@settings(deadline=None, max_examples=40)
@given(hostile() | findings)
def test_a_cell_holds_nothing_but_ours(finding: Finding) -> None:
    cell = Cell(finding._repr_html_())
    assert [tag for tag, _ in cell.elements] == ["div", "iframe", "details", "summary", "pre"]
    assert {name for _, given in cell.elements for name in given} == {"class", "sandbox", "title", "style", "srcdoc"}
    assert _frame(cell)["srcdoc"] == page(finding)


@pytest.mark.parametrize("evil", EVIL)
def test_a_module_with_an_evil_name_is_harmless(evil: str) -> None:
    shown = Finding(phase="forward", module=evil, module_type="A&B", kind="nan")._repr_html_()
    assert "<script" not in shown and "<img" not in shown
    assert "\x1b" not in shown
    shown.encode("utf-8")


@needs_browser
def test_the_styles_of_a_notebook_stay_outside(tmp_path: pathlib.Path) -> None:
    foreign = "* { font-size: 60px !important; margin: 40px !important; color: red !important }"
    (told,) = browser.measure(page(real("forward")), tmp_path, widths=(900,), foreign=foreign)
    assert (told["font"], told["margin"]) == ("16px", "0px")


@needs_browser
def test_a_cell_is_drawn_without_a_complaint(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "cell.html"
    file.write_text(f"<!DOCTYPE html><meta charset='utf-8'><body>{real('forward')._repr_html_()}", encoding="utf-8")
    picture, console = browser.screenshot(file, width=900, height=800)
    assert console == []
    assert len(set(browser.rows(picture))) > 100
