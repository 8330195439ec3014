"""The page in HTML: what it shows, that nothing gets in or out, how it looks in a browser."""

from __future__ import annotations

import dataclasses
import functools
import html.parser
import itertools
import json
import math
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import nanhunt
from nanhunt import listing, outline, probe
from nanhunt.births import Hop
from nanhunt.finding import Call, Finding, TensorStats
from nanhunt.numerics import COMPARED, FORMATS, headrooms
from nanhunt.report.axis import Axis
from nanhunt.report.html import page, pages
from nanhunt.report.text import title

from . import browser
from .test_cases import CASES, FILES
from .test_finding import findings

# --- real findings ------------------------------------------------------------------------------------------


class Normalize(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().sum(-1, keepdim=True) + 1e-8).sqrt()


class Root(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().sqrt()


def _step(first: nn.Module, *, half: bool = False, batch: Any = None, detail: str = "op") -> Finding:
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6))
    model = nn.Sequential(nn.Linear(8, 8), *blocks, first, nn.Linear(8, 2))
    model = model.half() if half else model
    optimizer = torch.optim.Adam(model.parameters())
    with nanhunt.watch(model, optimizer, on_hit="record", detail=detail) as hunt:
        x = torch.randn(4, 8) if batch is None else batch
        loss = model(x.half() if half else x).float().square().mean()
        loss.backward()
        optimizer.step()
    assert hunt.finding is not None
    return hunt.finding


@functools.cache
def real(phase: str) -> Finding:
    """A finding of each phase, made by running a small model."""
    if phase == "input":
        return _step(nn.Tanh(), batch=torch.full((4, 8), math.nan))
    if phase == "state":
        bad = nn.Linear(8, 8)
        nn.init.constant_(bad.weight, math.nan)
        return _step(bad)
    if phase == "forward":
        return _step(nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU(), Zero(), Normalize()), half=True)
    if phase == "backward":
        return _step(nn.Sequential(nn.Linear(8, 8), Zero(), Root()))
    return _step(nn.Tanh(), half=True)  # the eps of Adam is zero in float16


class Zero(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0


PHASES = ("input", "state", "forward", "backward", "optimizer")


# --- a strict reader ----------------------------------------------------------------------------------------

_TAGS = set(
    "html head meta title style body nav article header section h1 h2 h3 p a ol ul li dl dt dd div figure figcaption "
    "pre code span i b wbr details summary table thead tbody tfoot tr th td svg line rect circle path text".split()
)
_VOID = {"meta", "wbr"}
_ATTRIBUTES = set(
    "lang charset content name http-equiv class id href title role aria-label aria-hidden tabindex scope colspan open "
    "width height x y dx x1 x2 y1 y2 cx cy r d overflow text-anchor viewbox preserveaspectratio".split()
)


class Reader(html.parser.HTMLParser):
    """Reads a page as a browser does, and refuses what a page of ours never holds."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.stack: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in _TAGS, tag
        names = [name for name, _ in attrs]
        assert set(names) <= _ATTRIBUTES, names
        assert len(names) == len(set(names)), names
        given = dict(attrs)
        self.elements.append((tag, given))
        if "id" in given:
            self.ids.append(str(given["id"]))
        if "href" in given:
            self.links.append(str(given["href"]))
        if tag not in _VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack and self.stack.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if not (self.stack and self.stack[-1] == "style"):
            self.text.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)

    def handle_pi(self, data: str) -> None:
        raise AssertionError(data)

    def unknown_decl(self, data: str) -> None:
        raise AssertionError(data)


def read(shown: str) -> Reader:
    reader = Reader()
    reader.feed(shown)
    reader.close()
    assert reader.stack == []
    assert len(set(reader.ids)) == len(reader.ids)
    assert all(link.startswith("#") and link[1:] in reader.ids for link in reader.links)
    style = shown.partition("<style>")[2].partition("</style>")[0]
    assert style and not re.search(r"url\(|@import|@font-face|expression", style)
    return reader


def size(shown: str) -> int:
    return len(shown.encode("utf-8"))


@pytest.mark.parametrize(
    "evil",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        '<b onclick="x">',
        "<p style='x'>",
        "</article>",
        "<!-- -->",
        '<a href="http://example.org">x</a>',
        "<title",
    ],
)
def test_the_reader_refuses_what_was_not_escaped(evil: str) -> None:
    """Guards the tests below: they would pass with a reader that takes anything."""
    shown = page(Finding(phase="forward", why="HERE")).replace("HERE", evil)
    with pytest.raises(AssertionError):
        read(shown)


# --- what is shown ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
def test_a_real_finding_of_every_phase_becomes_a_page(phase: str) -> None:
    finding = real(phase)
    assert finding.phase == phase
    shown = page(Finding.from_json(finding.to_json()))
    said = " ".join(read(shown).text)
    assert size(shown) < 60_000
    flat = " ".join("".join(read(shown).text).split())
    for fact in (finding.cause, *finding.advice):
        assert fact is not None and " ".join(fact.replace("_", " ").split()) in flat
    assert title(finding).casefold() in flat.casefold()
    assert "Where in the model" in said
    first, _, rest = shown.partition('class="advice"')
    assert f"<b>{finding.cause.replace('_', ' ') if finding.cause else ''}</b>" in first
    assert "Where the numbers lie" in rest or not finding.tensors


def test_the_page_needs_nothing_but_the_record(tmp_path: pathlib.Path) -> None:
    finding = real("forward")
    moved = dataclasses.replace(finding, line=f"/nowhere/{(finding.line or '').rpartition('/')[2]}")
    shown = page(moved)
    assert "def forward(self, x: torch.Tensor) -&gt; torch.Tensor:" in shown
    assert shown.count('class="line hit"') == 1


def test_the_source_line_stands_among_its_neighbours() -> None:
    lines = ("    def forward(self, x):", "", "        return x / 0", "\treturn 1")
    finding = Finding(
        phase="forward",
        line="/a/b.py:7",
        source="return x / 0",
        context={"source_context": {"first": 5, "lines": lines}},
    )
    shown = re.findall(r'<span class="(line|line hit)"><i>(\d+)</i>(.*)\n', page(finding))
    assert shown == [
        ("line", "5", "def forward(self, x):"),
        ("line", "6", ""),
        ("line hit", "7", "    return x / 0"),
        ("line", "8", "return 1"),
    ]


@pytest.mark.parametrize(
    "around",
    [None, 3, "x", {}, {"first": "5", "lines": ("a",)}, {"first": 99, "lines": ("a",)}, {"first": 7, "lines": ()}],
)
def test_without_neighbours_that_fit_the_line_stands_alone(around: Any) -> None:
    finding = Finding(phase="forward", line="b.py:7", source="return 1", context={"source_context": around})
    assert '<span class="line hit"><i>7</i>return 1\n</span>' in page(finding)


def test_a_record_of_an_older_nanhunt_still_has_a_page() -> None:
    data = json.loads(real("forward").to_json())
    for row in data["tensors"]:
        del row["exponents"]
    del data["context"]["modules"], data["context"]["source_context"]
    shown = page(Finding.from_dict(data))
    read(shown)
    assert "Where the numbers lie" in shown
    assert "Where in the model" not in shown
    assert 'class="count' not in shown


def test_the_culprit_and_what_is_around_it_are_lit() -> None:
    shown = page(real("forward"))
    module = real("forward").module or ""
    label = re.findall(r'<span class="module lit made"><code>(.*?)</code>.*?<b class="chip">(.*?)</b>', shown)
    assert label == [(module.rpartition(".")[2], "made here")]
    opened = re.findall(r'<details open="?"?><summary><span class="module lit"><code>(.*?)</code>', shown)
    assert opened == ["(the model itself)", module.rpartition(".")[0]]


def test_the_way_to_where_it_was_noticed_is_lit() -> None:
    hops = (
        "forward: aten.exp.default in a.b gave +inf  /x/y.py:3  x.exp()",
        "... 3 more ops ...",
        "forward: aten.sub.Tensor in the root gave nan  /x/y.py:9  x - x",
        "forward: aten.mean.default in c gave nan  ?",
    )
    types = {"": "M", "a": "A", "a.b": "B", "c": "C"}
    finding = Finding(phase="forward", module="a.b", context={"path": hops})
    finding = dataclasses.replace(
        finding, context={"path": hops, "modules": outline.outline(types, outline.lit(finding))}
    )
    assert outline.lit(finding) == {"a.b": "made", "": "way", "c": "noticed"}
    said = [part for part in read(page(finding)).text if part.strip()]
    for word in ("made here", "handed on", "noticed here", "y.py:9  x - x", "... 3 more ops ..."):
        assert word in said


@pytest.mark.parametrize("module", [None, "", "a.b", "in the gave nan  b", "<x>"])
@pytest.mark.parametrize("site", [None, (__file__, 1)])
def test_a_hop_is_read_as_it_is_written(module: str | None, site: tuple[str, int] | None) -> None:
    told = outline.HOP.fullmatch(str(Hop("aten.exp.default", "forward", module, site, "+inf", (), None)))
    assert told is not None
    if module != "in the gave nan  b":
        assert (told["op"], told["module"]) == ("aten.exp.default", "the root" if module == "" else module)
        assert told["kind"] == "+inf"


def row(role: str, absmax: float | None, dtype: str = "float16", **more: Any) -> TensorStats:
    return TensorStats(role=role, dtype=dtype, shape=(2, 3), numel=6, absmax=absmax, headroom=headrooms(absmax), **more)


def _drawing(shown: str, name: str) -> list[dict[str, str]]:
    inside = shown.partition(f'aria-label="{name}')[2].partition("</svg>")[0]
    return [dict(re.findall(r'([\w-]+)="([^"]*)"', found)) for found in re.findall(r"<rect ([^>]*)>", inside)]


def _ends(rect: dict[str, str]) -> tuple[float, float]:
    left = float(rect["x"].rstrip("%"))
    return left, left + float(rect["width"].rstrip("%"))


@pytest.mark.parametrize("dtype", sorted(FORMATS))
def test_a_tensor_that_fills_its_format_covers_its_band(dtype: str) -> None:
    form = FORMATS[dtype]
    finding = Finding(phase="forward", tensors=(row("output", form.max, dtype, smallest_nonzero=form.smallest_normal),))
    rects = {rect["class"]: _ends(rect) for rect in _drawing(page(finding), "output")}
    assert rects["range"] == pytest.approx(rects["normal"], abs=0.03)
    assert 0 <= rects["normal"][0] < rects["normal"][1] <= 100


def test_every_compared_format_and_the_own_one_is_marked_with_its_numbers() -> None:
    shown = page(Finding(phase="forward", tensors=(row("output", 1e300, "float64"),)))
    for name in (*COMPARED, "float64"):
        assert f'aria-label="{name}: smallest number ' in shown
    assert "largest 65 504" in shown and "smallest normal number 6.1e-05" in shown


def test_the_columns_of_a_histogram_stand_at_their_exponents() -> None:
    finding = Finding(
        phase="forward",
        tensors=(row("output", 2.0**15, smallest_nonzero=2.0**-20, exponents=(-20, (5, *[0] * 34, 7))),),
    )
    columns = [rect for rect in _drawing(page(finding), "output") if rect["class"].startswith("count")]
    band = next(rect for rect in _drawing(page(finding), "output") if rect["class"] == "normal")
    assert [rect["class"] for rect in columns] == ["count tiny", "count"]
    assert _ends(columns[1])[0] < _ends(band)[1] < _ends(columns[1])[1] + 1
    assert float(columns[0]["height"]) < float(columns[1]["height"])
    said = "".join(read(page(finding)).text)
    assert "5 between 2^-20 and 2^-19" in said


def test_growth_is_seen_from_row_to_row() -> None:
    calls = tuple(Call(module=f"a.{n}", absmax_in=10.0**n, absmax_out=10.0 ** (n + 1)) for n in range(4))
    shown = page(Finding(phase="forward", trail=(*calls, Call(module="b", absmax_in=1e4, absmax_out=math.inf))))
    places = [float(x) for x in re.findall(r'<circle cx="([\d.]+)%" cy="14" r="4.5" class="out">', shown)]
    assert len(places) == 4 and places == sorted(places)
    steps = [b - a for a, b in itertools.pairwise(places)]
    assert steps == pytest.approx([steps[0]] * 3, abs=0.03), "a factor of ten is the same length everywhere"
    assert shown.count('class="cross"') == 1


def test_every_picture_has_its_text_and_its_numbers_stand_in_a_table() -> None:
    finding = real("forward")
    reader = read(page(finding))
    drawings = [given for tag, given in reader.elements if tag == "svg" and given.get("role") == "img"]
    assert len(drawings) >= len(finding.tensors) + len(COMPARED)
    assert all(given.get("aria-label") for given in drawings)
    cells = "".join(reader.text)
    for tensor in finding.tensors:
        assert tensor.absmax is None or nanhunt.numerics.fmt(tensor.absmax) in cells


# --- several ------------------------------------------------------------------------------------------------


def test_several_findings_have_an_index_with_where_they_are_from() -> None:
    found = [real(phase) for phase in PHASES]
    reader = read(pages(found, [f"{phase}.json" for phase in PHASES]))
    assert reader.links == [f"#finding-{n}" for n in range(1, 6)]
    assert "5 findings" in reader.text
    for phase in PHASES:
        assert f"{phase}.json" in reader.text


def test_no_finding_is_a_page_too() -> None:
    assert "No finding" in read(pages([])).text


def test_titles_are_one_for_each() -> None:
    with pytest.raises(nanhunt.UsageError, match="1 titles for 2 findings: give one title for each, or none at all"):
        pages([real("input"), real("state")], ["one"])
    with pytest.raises(nanhunt.UsageError, match="2 titles for 1 findings"):
        pages([real("input")], ["one", "two"])


def test_notes_stand_below_the_heading_and_within_the_room() -> None:
    reader = read(pages([], notes=["python -m nanhunt <train>.py", "watched 3 models (Net), 5 steps, nothing found"]))
    at = [reader.text.index(said) for said in ("No finding", "python -m nanhunt <train>.py")]
    assert at == sorted(at) and "watched 3 models (Net), 5 steps, nothing found" in reader.text
    assert len(pages([real("input")] * 40, notes=["x" * 1000] * 30).encode()) < 500_000


def test_a_hundred_findings_stay_on_a_page_of_bounded_size() -> None:
    shown = pages([real(phase) for phase in PHASES] * 20)
    assert size(shown) < 500_000
    assert "for want of room" in "".join(read(shown).text)
    assert shown.count("<article") == 100


# --- nothing gets out or in ---------------------------------------------------------------------------------

EVIL = (
    "<script>alert(1)</script>",
    "</style><img src=x onerror=alert(1)>",
    '" onload="alert(1)',
    "' onclick='alert(1)",
    "</title></pre></svg><!--",
    "]]><![CDATA[",
    "&lt;script&gt;&#60;",
    "\ud800\x00\u202e\u2028\x1b[31m",
    "http://example.org/x.js",
    "javascript:alert(1)",
    "a." * 3000,
    "\n\n\t\\",
)
evil = st.sampled_from(EVIL) | st.text(max_size=20)


@st.composite
def hostile(draw: st.DrawFn) -> Finding:
    """Any finding, with texts that try to leave their place, and pictures of the wrong shape."""
    base = draw(findings)
    number = st.integers() | st.floats() | st.none() | evil
    context = {
        draw(evil): draw(evil),
        "path": (f"forward: aten.x in {draw(evil)} gave nan  {draw(evil)}", draw(evil), draw(evil)),
        "modules": draw(
            st.fixed_dictionaries({"rows": st.lists(st.lists(number, max_size=6)), "left_out": number}) | number
        ),
        "source_context": draw(st.fixed_dictionaries({"first": number, "lines": st.lists(evil)}) | number),
        "ledger": draw(st.dictionaries(evil, number)),
    }
    texts = ("module", "module_type", "op", "line", "source", "kind", "tensor", "cause", "why", "handled")
    rows = tuple(dataclasses.replace(one, role=draw(evil), name=draw(evil), dtype=draw(evil)) for one in base.tensors)
    calls = tuple(dataclasses.replace(one, module=draw(evil), module_type=draw(evil)) for one in base.trail)
    return dataclasses.replace(
        base,
        **{name: draw(evil) for name in texts},
        advice=(draw(evil),),
        tensors=rows,
        trail=calls,
        context=base.context | context,
    )


@settings(deadline=None, max_examples=60)
@given(hostile())
@example(Finding(phase="forward", module="<script>", line="</style>:3", source="</style>", why="</style>"))
def test_no_text_leaves_its_place(finding: Finding) -> None:
    for shown in (page(finding), pages([finding], [EVIL[1]])):
        read(shown)
        assert shown.count("</style>") == 1
        assert size(shown) < 500_000


@settings(deadline=None, max_examples=40)
@given(findings)
def test_any_finding_has_a_page(finding: Finding) -> None:
    assert size(page(finding)) < 500_000
    read(page(finding))


def test_the_largest_record_stays_on_a_page_of_bounded_size() -> None:
    name = '"' * 5000
    tensors = tuple(
        row(name, 1e300, "float64", name=name, nan=1, exponents=(-1074, (10**30,) * 2098), first_bad=(1,) * 500)
        for _ in range(300)
    )
    finding = Finding(
        phase="forward",
        line=f"{name}:10",
        advice=(name,) * 500,
        tensors=tensors,
        trail=tuple(Call(module=name, module_type=name, absmax_in=1.0, absmax_out=math.inf) for _ in range(900)),
        context={
            **{f"{name}{n}": name for n in range(500)},
            "path": (name,) * 500,
            "modules": {"rows": tuple((n % 50, name, name) for n in range(9000))},
            "source_context": {"first": 1, "lines": (name,) * 20},
        },
        **dict.fromkeys(("module", "module_type", "op", "source", "kind", "tensor", "cause", "why", "handled"), name),
    )
    shown = page(finding)
    assert size(shown) < 500_000
    assert "Not on this page, but in the record: " in "".join(read(shown).text)
    assert size(pages([finding] * 30)) < 500_000


def test_nothing_is_loaded_and_nothing_runs() -> None:
    policy = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page(real("forward")))
    assert len(policy) == 1
    assert policy[0].startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy[0]


# --- the record's pictures ----------------------------------------------------------------------------------


def _exponents(values: list[float]) -> dict[int, int]:
    found: dict[int, int] = {}
    for value in values:
        if value and math.isfinite(value):
            exponent = math.frexp(value)[1] - 1
            found[exponent] = found.get(exponent, 0) + 1
    return found


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "complex64"]
)
def test_the_exponents_are_those_of_every_number(dtype: str) -> None:
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    sizes = torch.ldexp(torch.randn(4000, dtype=torch.float64), torch.randint(-1080, 1030, (4000,)))
    near = torch.ldexp(torch.randn(4000, dtype=torch.float64), torch.randint(-28, 16, (4000,)))
    values = torch.cat([sizes, near, torch.tensor([0.0, math.nan, math.inf, -math.inf, 2.0**-149, 2.0**-24])])
    tensor = torch.complex(values.float(), -values.float()) if kind.is_complex else values.to(kind)
    stats = probe.stats(tensor, "output")
    plain = torch.view_as_real(tensor) if kind.is_complex else tensor.double()
    assert stats.exponents is not None
    first, counts = stats.exponents
    held = {first + n: count for n, count in enumerate(counts) if count}
    assert held == _exponents(plain.double().reshape(-1).tolist())
    assert counts[0] and counts[-1], "no empty ends"
    finite = sum(counts)
    assert finite + sum(n or 0 for n in (stats.zero, stats.nan, stats.pos_inf, stats.neg_inf)) == stats.numel


def test_repeated_and_absent_numbers_are_counted_too() -> None:
    wide = probe.stats(torch.full((1,), 2.0**-3).expand(5, 7), "output")
    assert wide.exponents == (-3, (35,))
    for empty in (torch.zeros(3), torch.full((3,), math.nan), torch.arange(3), torch.empty(0)):
        assert probe.stats(empty, "output").exponents is None
    assert wide == TensorStats.from_dict(json.loads(json.dumps(wide.to_dict())))


def test_a_line_is_kept_with_its_neighbours_while_the_file_says_the_same(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "a b:c.py"
    lines = [f"x{n} = {'1' * 300}" for n in range(1, 30)]
    file.write_text("\n".join(lines))
    assert listing.around(f"{file}:12", lines[11]) == {
        "first": 8,
        "lines": tuple(line[:240] for line in lines[7:16]),
    }
    assert listing.around(f"{file}:1", f"  {lines[0]} ") == {"first": 1, "lines": tuple(x[:240] for x in lines[:5])}
    for line, source in ((f"{file}:12", "y = 1"), (f"{file}:99", "x"), (f"{file}:0", "x"), (f"{file}:x", "x")):
        assert listing.around(line, source) is None
    for line, source in ((None, "x"), ("", "x"), (f"{file}:12", None), ("/nowhere.py:3", "x"), ("x", "x")):
        assert listing.around(line, source) is None


def _types(blocks: int) -> dict[str, str]:
    types = {"": "Model", "embed": "Embedding", "blocks": "ModuleList"}
    for n in range(blocks):
        types |= {
            f"blocks.{n}": "Block",
            f"blocks.{n}.norm": "Norm",
            f"blocks.{n}.ff": "FF",
            f"blocks.{n}.ff.up": "Linear",
        }
    return types | {"head": "Linear"}


def test_alike_blocks_share_a_row_and_the_culprit_has_its_own() -> None:
    told = outline.outline(_types(48), ["blocks.7.ff"])
    assert told["modules"] == 196 and told["left_out"] == 0
    assert told["rows"] == (
        (0, "", "Model"),
        (1, "embed", "Embedding"),
        (1, "blocks", "ModuleList"),
        (2, "0", "Block", 7, "6"),
        (2, "7", "Block"),
        (3, "norm", "Norm"),
        (3, "ff", "FF"),
        (4, "up", "Linear"),
        (2, "8", "Block", 40, "47"),
        (1, "head", "Linear"),
    )


def test_blocks_that_nobody_speaks_of_show_one_of_their_kind() -> None:
    rows = outline.outline(_types(48), ["head"])["rows"]
    assert rows[3:7] == ((2, "0", "Block", 48, "47"), (3, "norm", "Norm"), (3, "ff", "FF"), (4, "up", "Linear"))


def test_neighbours_with_names_that_tell_keep_them() -> None:
    types = {"": "M", "q": "Linear", "k": "Linear", "v": "Linear"}
    assert [row[1] for row in outline.outline(types, [])["rows"]] == ["", "q", "k", "v"]


@pytest.mark.parametrize("deep", [False, True])
def test_an_outline_has_four_hundred_rows_at_most_and_keeps_the_culprit(deep: bool) -> None:
    types = {"": "M"}
    for n in range(3000):
        parent = f"m{n - 1}." if deep and n % 3 else ""
        types[f"{types and parent}m{n}"] = f"T{n}"
    types |= {"z": "Z", "z.y": "Y", "z.y.culprit": "C"}
    told = outline.outline(types, ["z.y.culprit"])
    assert len(told["rows"]) == 400 and told["left_out"] > 0
    assert told["rows"][-3:] == ((1, "z", "Z"), (2, "y", "Y"), (3, "culprit", "C"))
    assert "rows more, the deepest of the model" in page(Finding(phase="forward", context={"modules": told}))


_trees = st.lists(st.tuples(st.integers(0, 30), st.sampled_from("abc"), st.sampled_from("XY")), max_size=40)


@settings(deadline=None, max_examples=60)
@given(_trees, st.integers(0, 40))
def test_an_outline_stands_for_every_module_and_shows_those_of_interest(
    tree: list[tuple[int, str, str]], at: int
) -> None:
    inside: dict[str, list[str]] = {"": []}
    kinds = {"": "M"}
    for parent, name, kind in tree:
        above = list(inside)[parent % len(inside)]
        path = f"{above}.{name}".lstrip(".")
        if path not in inside:
            inside[above].append(path)
            inside[path], kinds[path] = [], kind

    def walk(path: str) -> Iterator[str]:
        yield path
        for child in inside[path]:
            yield from walk(child)

    types = {path: kinds[path] for path in walk("")}
    of_interest = list(types)[at % len(types)]
    rows = outline.outline(types, [of_interest])["rows"]
    names: list[str] = []
    shown = set()
    for row in rows:
        assert row[0] <= len(names)
        names[row[0] :] = [row[1]]
        shown.add(".".join(names[1:]))
    assert of_interest in shown
    assert shown <= set(types)


def test_a_model_of_thousands_of_modules_is_outlined_in_a_moment() -> None:
    import time

    types = _types(5000)
    began = time.perf_counter()
    outline.outline(types, ["blocks.7.ff"])
    assert time.perf_counter() - began < 2


@settings(deadline=None)
@given(st.lists(st.floats(-1100, 1100), min_size=1, max_size=6), st.sampled_from([2, 10]))
def test_an_axis_keeps_order_and_has_a_few_ticks(exponents: list[float], base: int) -> None:
    axis = Axis.around(exponents, pad=1)
    places = [axis.place(e) for e in sorted(exponents)]
    assert places == sorted(places)
    assert all(0 <= place <= 100 for place in places)
    ticks = list(axis.ticks(base))
    assert 1 <= len(ticks) <= 8
    assert all(axis.place(power * math.log2(base)) == place for place, power in ticks)


# --- in a browser -------------------------------------------------------------------------------------------

needs_browser = pytest.mark.skipif(browser.found() is None, reason="no Chromium or Chrome on PATH")


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(400, False), (1200, False), (400, True)])
def test_the_page_is_drawn_without_a_complaint(tmp_path: pathlib.Path, width: int, dark: bool) -> None:
    file = tmp_path / "finding.html"
    file.write_text(page(real("forward")), encoding="utf-8")
    picture, console = browser.screenshot(file, width=width, height=1000, dark=dark)
    assert console == []
    lines = set(browser.rows(picture))
    assert len(lines) > 100, "a blank page has one"
    assert (browser.background(picture) < 60) is dark


@needs_browser
def test_a_script_would_be_refused_and_told_of(tmp_path: pathlib.Path) -> None:
    """Guards the test above: the policy works, and the console is read."""
    file = tmp_path / "evil.html"
    file.write_text(page(real("forward")).replace("</article>", "<script>document.title = 1</script></article>"))
    assert any("Content Security Policy" in line for line in browser.screenshot(file, width=400, height=300)[1])


@needs_browser
def test_every_width_has_room_for_the_page(tmp_path: pathlib.Path) -> None:
    long = "encoder_with_a_very_long_name." * 12 + "wo"
    calls = tuple(Call(module=f"{long}{n}", module_type="T" * 90, absmax_in=1e30, absmax_out=1e-30) for n in range(3))
    finding = real("forward")
    hard = dataclasses.replace(
        finding,
        module=long,
        why="x" * 900,
        line="/a" * 200 + ".py:9",
        source="y" * 200,
        tensor=long,
        op="aten." + "z" * 90,
        trail=calls,
        tensors=tuple(dataclasses.replace(row, name=long) for row in finding.tensors * 4),
    )
    for shown in (page(finding), page(hard), pages([real("backward"), hard], ["a" * 300, "b/c.json"])):
        for told in browser.measure(shown, tmp_path, widths=(320, 400, 768, 1280)):
            assert told["needs"] == told["width"], told
            assert told["over"] == []
            assert told["margin"] == "0px", "the style applies"
            assert told["drawings"] and told["flat"] == 0


@needs_browser
def test_verdict_line_cause_and_advice_are_on_the_first_screen(tmp_path: pathlib.Path) -> None:
    (told,) = browser.measure(page(real("backward")), tmp_path, widths=(1280,))
    assert 0 < told["advice"] < 800


# --- the graded cases ---------------------------------------------------------------------------------------


@pytest.mark.skipif(not FILES, reason="the graded cases (../shared/cases) are not beside this checkout")
@pytest.mark.parametrize(
    "name",
    [
        "forward/01_t5_ff_wo_overflow",
        "forward/13_uninitialised_parameter",
        "forward/16_input_already_nan_minmax",
        "forward/47_adam_eps_on_fp16_weights",
        "training/01_sqrt_identical_pair",
        "training/39_grad_accumulation_fp16",
    ],
)
def test_the_finding_of_a_real_bug_has_a_page(name: str) -> None:
    from .test_cases import _case, _locate

    *_, run = _case(CASES / f"{name}.py")
    finding = _locate(run, detail="op")
    assert finding is not None
    shown = page(Finding.from_json(finding.to_json()))
    read(shown)
    assert size(shown) < 80_000
