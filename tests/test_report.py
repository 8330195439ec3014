"""The page: right words for every phase, never too long or too wide, plain unless a terminal asks for colour."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
import threading

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanhunt.errors import UsageError
from nanhunt.finding import Call, Finding, TensorStats
from nanhunt.numerics import headroom_bits, headrooms
from nanhunt.report.files import read_findings, write_whole
from nanhunt.report.lines import cells, clean, elide, wrap
from nanhunt.report.text import page, title

from .test_finding import findings

# --- titles -----------------------------------------------------------------------------------------


def found(**changes):
    known = {"phase": "forward", "step": 0, "call": 1, "module": "enc.wo", "module_type": "Linear", "kind": "+inf"}
    return Finding(**(known | changes))


TITLES = [
    (
        found(module="encoder.block.2.layer.1.wo"),
        "encoder.block.2.layer.1.wo (Linear) made the first +inf, in forward, step 0",
    ),
    (found(call=2, step=7), "enc.wo (Linear) made the first +inf, in forward (2nd call), step 7"),
    (found(call=11), "enc.wo (Linear) made the first +inf, in forward (11th call), step 0"),
    (found(call=23), "enc.wo (Linear) made the first +inf, in forward (23rd call), step 0"),
    (found(rank=3), "enc.wo (Linear) made the first +inf, in forward, step 0, on rank 3"),
    (found(rank=0), "enc.wo (Linear) made the first +inf, in forward, step 0, on rank 0"),
    (
        found(module="", module_type="DualEncoder"),
        "the model's own forward (DualEncoder) made the first +inf, in forward, step 0",
    ),
    (found(module=None, module_type=None), "code outside the model made the first +inf, in forward, step 0"),
    (
        found(phase="input", module=None, kind="nan", tensor="batch['image']", step=3),
        "batch['image'] already held a nan when the model was called, step 3",
    ),
    (
        found(phase="state", kind="nan", tensor="enc.wo.weight", cause="bad_parameter"),
        "parameter enc.wo.weight already held a nan before step 0",
    ),
    (
        found(phase="state", kind="-inf", tensor="bn.running_var", cause="bad_buffer", step=12),
        "buffer bn.running_var already held a -inf before step 12",
    ),
    (
        found(phase="backward", op="aten.sqrt.default", kind="nan"),
        "enc.wo (Linear) made the first nan, in the backward of sqrt, step 0",
    ),
    (
        found(phase="backward", op="mylib.attention.default", module=""),
        "the model's own code (Linear) made the first +inf, in the backward of mylib.attention.default, step 0",
    ),
    (found(phase="backward"), "enc.wo (Linear) made the first +inf, in backward, step 0"),
    (
        found(phase="backward", op="AccumulateGrad", tensor="grad of enc.wo.bias"),
        "enc.wo (Linear) made the first +inf, in backward, in the sum of grad of enc.wo.bias, step 0",
    ),
    (
        found(phase="backward", module=None, module_type=None, op="aten.div.Tensor"),
        "code outside the model made the first +inf, in the backward of div, step 0",
    ),
    (
        found(phase="optimizer", module=None, tensor="enc.wo.weight", kind="nan", step=4),
        "the optimizer step made the first nan, in parameter enc.wo.weight, step 4",
    ),
    (
        found(phase="optimizer", module=None, tensor="grad of enc.wo.weight", kind="nan"),
        "the optimizer step made the first nan, in grad of enc.wo.weight, step 0",
    ),
    (
        found(phase="backward", handled="loss_scale"),
        "enc.wo (Linear) made a +inf, in backward, step 0 "
        "(not a fault: the GradScaler skips this step and lowers the scale)",
    ),
    (
        found(handled="absorbed"),
        "enc.wo (Linear) made a +inf, in forward, step 0 (not a fault: it reached neither the loss nor a gradient)",
    ),
    (found(handled="by hand"), "enc.wo (Linear) made a +inf, in forward, step 0 (not a fault: by hand)"),
    (Finding(phase="forward"), "code outside the model made the first non-finite value, in forward"),
    (Finding(phase="input"), "the input already held a non-finite value when the model was called"),
    (Finding(phase="state", module="fc"), "fc already held a non-finite value before the step"),
]


@pytest.mark.parametrize(("finding", "expected"), TITLES, ids=[t for _, t in TITLES])
def test_the_title_says_who_what_when(finding, expected):
    assert title(finding) == finding.title() == expected


@pytest.mark.parametrize(("finding", "expected"), TITLES, ids=[t for _, t in TITLES])
def test_the_page_begins_with_the_title(finding, expected):
    first, _, _ = str(finding).partition("\n\n")
    assert " ".join(first.split()) == expected
    if len(expected) <= 100:
        assert str(finding).splitlines()[0] == expected


# --- the page ---------------------------------------------------------------------------------------


def row(role, absmax, dtype="float16", **more):
    return TensorStats(
        role=role,
        shape=(2, 6, 64),
        dtype=dtype,
        device="cpu",
        numel=768,
        min=-absmax / 2,
        max=absmax,
        absmax=absmax,
        smallest_nonzero=0.5,
        headroom_bits=headroom_bits(absmax, dtype),
        headroom=headrooms(absmax),
        **({"nan": 0, "pos_inf": 0, "neg_inf": 0, "zero": 0, "subnormal": 0, "below_normal": 0.0} | more),
    )


FULL = Finding(
    phase="forward",
    step=0,
    call=1,
    module="encoder.block.2.wo",
    module_type="Linear",
    op="aten.mm.default",
    line="/home/me/t5.py:88",
    source="        return self.wo(hidden)\n",
    kind="+inf",
    tensor="output",
    cause="overflow",
    why="The sum reaches 71 280 and float16 ends at 65 504. 1 of 768 elements, first at [0, 3, 5].",
    advice=("Run this layer in bfloat16.", "Clamp the hidden states before it."),
    tensors=(
        row("input", 36928.0),
        dataclasses.replace(row("weight", 4.0), name="encoder.block.2.wo.weight"),
        row("output", 3.0, pos_inf=1),
    ),
    trail=(
        Call(module="encoder.block.2.wi", module_type="Linear", call=1, phase="forward", absmax_in=90, absmax_out=9e3),
        Call(module="", module_type="T5", call=2, phase="forward", absmax_in=9e3, absmax_out=36928),
    ),
    context={
        "autocast": "float16",
        "loss_scale": 65536.0,
        "lr": None,
        "torch": "2.13.0",
        "not_seen": ("a ScriptModule: head",),
    },
)

PAGE = """\
encoder.block.2.wo (Linear) made the first +inf, in forward, step 0

at      /home/me/t5.py:88
        return self.wo(hidden)
op      aten.mm.default in float16
tensor  output
cause   overflow

The sum reaches 71 280 and float16 ends at 65 504. 1 of 768 elements, first at [0, 3, 5].

What to do
1. Run this layer in bfloat16.
2. Clamp the hidden states before it.

Tensors (headroom: how many bits the largest number may still grow; own dtype, then others)
tensor  type             min     max  absmax  smallest  +inf  headroom    bf16  e4m3   e5m2
input   f16[2,6,64]  -18 464  36 928  36 928       0.5            +0.8  +112.8  -6.4   +0.6
weight  f16[2,6,64]       -2       4       4       0.5           +14.0  +126.0  +6.8  +13.8
output  f16[2,6,64]     -1.5       3       3       0.5     1     +14.4  +126.4  +7.2  +14.2

The calls before it, oldest first (largest number in and out)
module              type    call     in     out  growth
encoder.block.2.wi  Linear           90   9 000   x 100
(the model itself)  T5         2  9 000  36 928   x 4.1

Context
autocast float16, loss scale 65 536, torch 2.13.0
not seen a ScriptModule: head"""


def test_the_whole_page():
    assert str(FULL) == PAGE


def test_a_narrow_page_gives_up_the_least_important_columns():
    lines = page(FULL, color=False, width=60).splitlines()
    assert max(map(len, lines)) <= 60
    header = next(line for line in lines if line.startswith("tensor  type"))
    assert header.split() == ["tensor", "type", "min", "max", "+inf", "headroom", "e4m3"]


def test_what_is_not_known_takes_no_room():
    assert str(Finding(phase="forward", kind="nan", step=1)) == (
        "code outside the model made the first nan, in forward, step 1"
    )


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({"phase": "input", "op": None, "module": None}, ["called at  /home/me/t5.py:88"]),
        ({"phase": "state"}, ["read at  /home/me/t5.py:88", "op       aten.mm.default in float16"]),
        (
            {"phase": "backward", "op": "aten.sqrt.default", "tensor": "grad_input"},
            ["forward at  /home/me/t5.py:88", "op          derivative of aten.sqrt.default in float16"],
        ),
        (
            {"phase": "backward", "op": "AccumulateGrad", "tensor": "grad of fc.weight"},
            ["summed at  /home/me/t5.py:88", "op         AccumulateGrad in float16"],
        ),
    ],
)
def test_the_line_says_what_happened_there(changes, lines):
    shown = str(dataclasses.replace(FULL, **changes)).splitlines()
    for line in lines:
        assert line in shown


def test_an_op_that_changes_the_dtype_shows_both():
    mixed = dataclasses.replace(FULL, tensors=(row("self", 3.0, "float32"), row("output", 3.0)))
    assert "op      aten.mm.default float32 -> float16" in str(mixed).splitlines()


def test_counts_nobody_took_hide_their_column_or_show_as_unknown():
    known, unknown = row("output", 3.0, nan=5), row("input", 3.0, nan=None, pos_inf=None)
    table = str(dataclasses.replace(FULL, tensors=(unknown, known)))
    header, first, second = table[table.index("tensor  type") :].splitlines()[:3]
    assert "nan" in header
    assert "+inf" not in header
    assert " ? " in first
    assert " 5 " in second


def test_headroom_is_explained_only_where_it_is_shown():
    bare = str(dataclasses.replace(FULL, op=None, tensors=(TensorStats(role="loss", dtype="float32", nan=1),)))
    assert "\nTensors\ntensor  type  nan\nloss    f32     1\n" in bare
    assert "\ndtype   float32\n" in bare


def test_the_bad_rows_are_shown_first_when_not_all_can_be():
    rows = (*(row(f"operand{i}", 1.0) for i in range(30)), row("culprit", 1.0, nan=1))
    shown = str(dataclasses.replace(FULL, tensors=rows))
    assert "culprit" in shown
    assert "(and 22 more in the record)" in shown


def test_the_trail_ends_with_the_last_call():
    trail = tuple(Call(module=f"layer.{i}", absmax_in=1.0, absmax_out=2.0) for i in range(21))
    shown = str(dataclasses.replace(FULL, trail=trail))
    assert "layer.20" in shown
    assert "layer.12 " not in shown
    assert "(and 13 earlier)" in shown


def test_a_long_path_keeps_its_end():
    path = ".".join(["language_model", "layers", *map(str, range(60)), "mlp", "down_proj"])
    shown = str(dataclasses.replace(FULL, module=path)).splitlines()
    assert "mlp.down_proj (Linear)" in " ".join(shown[:3])
    assert "..." in shown[0] + shown[1]


def test_names_cannot_drive_the_terminal():
    evil = "a\x1b[31m\n\r\x07\u202eb\ud800\u2028c\u3000d"
    shown = str(dataclasses.replace(FULL, module=evil, why=evil, tensor=evil, context={evil: evil}))
    assert r"a\x1b[31m\n\r\x07\u202eb\ud800\u2028c d" in shown
    assert all(line.isprintable() for line in shown.split("\n"))
    shown.encode()


# --- the limits hold whatever stands in the record ---------------------------------------------------

hostile = st.one_of(
    st.text(max_size=40),
    st.text(alphabet="漢ａ🙂é\u0301\u200b\x1b\n\t \ud800", max_size=400),
    st.sampled_from(["x" * 1000, "a.b." * 400, "漢" * 1000, "\n" * 200, "word " * 900, "\x1b[2J" * 50, "🙂" * 3000]),
)


@st.composite
def hostile_findings(draw):
    base = draw(findings)
    names = ("module", "module_type", "op", "line", "source", "kind", "tensor", "cause", "why", "handled")
    changes = {name: draw(hostile) for name in names if draw(st.booleans())}
    rows = tuple(
        dataclasses.replace(r, role=draw(hostile), name=draw(hostile), dtype=draw(hostile)) for r in base.tensors
    )
    calls = tuple(dataclasses.replace(c, module=draw(hostile), phase=draw(hostile)) for c in base.trail)
    return dataclasses.replace(
        base,
        **changes,
        tensors=rows * draw(st.integers(0, 9)),
        trail=calls * draw(st.integers(0, 9)),
        advice=tuple(draw(st.lists(hostile, max_size=12))),
        context=base.context | {draw(hostile): draw(hostile) for _ in range(draw(st.integers(0, 9)))},
    )


@settings(deadline=None, max_examples=60)
@given(hostile_findings(), st.sampled_from([40, 80, 100]))
@example(dataclasses.replace(FULL, advice=("word " * 900,) * 99, why="word " * 9000, trail=FULL.trail * 99), 100)
@example(dataclasses.replace(FULL, context={f"not_seen{i}": "word " * 99 for i in range(99)}), 100)
def test_a_page_never_exceeds_60_lines_of_100_columns(finding, width):
    lines = page(finding, color=False, width=width).split("\n")
    assert len(lines) <= 60
    for line in lines:
        assert cells(line) <= width
        assert len(line) <= width
        assert line.isprintable()
        assert line == line.rstrip()
    assert "\n" not in title(finding)
    page(finding, color=False).encode()
    assert page(finding, color=True).count("\n") + 1 <= 60


@settings(deadline=None)
@given(hostile, st.integers(0, 120))
def test_elided_text_fits_and_keeps_its_ends(text, width):
    line = clean(text)
    short = elide(line, width)
    assert cells(short) <= width
    if cells(line) <= width:
        assert short == line
    elif width > 20 and line.isascii():
        assert len(short) == width
        assert short[-8:] == line[-8:]


@settings(deadline=None)
@given(hostile, st.integers(40, 120), st.integers(1, 5))
def test_wrapped_text_fits_and_loses_nothing_it_does_not_say(text, width, most):
    lines = wrap(text, width, most=most, first="1. ", rest="   ")
    assert len(lines) <= most
    assert all(cells(line) <= width for line in lines)
    if lines and not lines[-1].endswith(" ..."):
        assert "".join("".join(lines).split()) == "".join(("1." + clean(text)).split())


# --- colour -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "tty", "colored"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"NO_COLOR": "1"}, True, False),
        ({"NO_COLOR": ""}, True, True),
        ({"FORCE_COLOR": "1"}, False, True),
        ({"FORCE_COLOR": ""}, False, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
        ({"TERM": "dumb"}, True, False),
    ],
)
def test_colour_is_for_terminals_and_those_who_ask(monkeypatch, environment, tty, colored):
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", type("Out", (), {"isatty": lambda self: tty})())
    assert ("\x1b[" in page(FULL)) is colored
    assert "\x1b[" not in str(FULL), "text for logs and tracebacks is always plain"


def test_colour_changes_nothing_but_colour():
    import re

    colored = page(FULL, color=True)
    assert re.sub(r"\x1b\[\d+m", "", colored) == PAGE
    assert "\x1b[31moutput" in colored


# --- files ------------------------------------------------------------------------------------------


def test_a_file_is_written_with_its_folders(tmp_path):
    target = tmp_path / "a" / "b" / "found.json"
    assert write_whole(target, FULL.to_json()) == target
    assert read_findings(target) == [FULL]
    write_whole(target, "é\ud800")
    assert target.read_bytes() == "é\\ud800".encode()
    assert os.listdir(target.parent) == ["found.json"]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, error):
    target = tmp_path / "found.json"
    write_whole(target, "old")

    def fail(*_):
        raise error

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(type(error)):
        write_whole(target, "new")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["found.json"]


def test_a_file_keeps_its_mode_and_a_link_its_place(tmp_path):
    target, link = tmp_path / "real.txt", tmp_path / "link.txt"
    write_whole(target, "old")
    assert target.stat().st_mode & 0o444 == 0o444 & ~_umask()
    target.chmod(0o640)
    link.symlink_to(target)
    write_whole(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def _umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_what_is_no_plain_file_is_written_to_and_a_folder_is_refused(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    write_whole(pipe, "through")
    reader.join(10)
    assert got == ["through"]
    with pytest.raises(UsageError, match="it is a folder; name a file in it"):
        write_whole(tmp_path, "x")


def test_findings_are_read_one_many_or_by_line(tmp_path):
    other = Finding(phase="input", kind="nan")
    target = tmp_path / "found"
    for written in (
        json.dumps([FULL.to_dict(), other.to_dict()], indent=1),
        f"{FULL.to_json()}\n\n{other.to_json()}\n",
    ):
        write_whole(target, written)
        assert read_findings(target) == [FULL, other]
    write_whole(target, FULL.to_json(indent=2))
    assert read_findings(target) == [FULL]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xff\xfe\x00", "it is not text"),
        (b"hello", "it is not JSON"),
        (b'{"a": 1}', "expected an object with the key 'format'"),
        (b"[1]", "expected an object with the key 'format'"),
        (b"", "it is empty"),
    ],
)
def test_a_file_without_findings_is_refused_by_name(tmp_path, data, message):
    target = tmp_path / "found.json"
    target.write_bytes(data)
    with pytest.raises(UsageError) as caught:
        read_findings(target)
    assert message in str(caught.value)
    assert "found.json" in str(caught.value)


def test_numbers_beyond_all_formats_do_not_break_the_page():
    odd = dataclasses.replace(FULL, context={"seed": 10**500, "lr": math.nan, "on": True})
    assert "seed 1e+500, lr nan, on yes" in str(odd)
