"""Ranges of a step: measured rightly, written to be reviewed, compared in bits, refreshed on demand."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint

from nanhunt import hunter, pytest_plugin, rerun, roots
from nanhunt.errors import UsageError
from nanhunt.headroom import Peak, close
from nanhunt.meter import Meter
from nanhunt.numerics import FORMATS
from nanhunt.ranges import Range, Ranges, compared, form_of, parsed, room, told, written

LOADED = (hunter, pytest_plugin, rerun, roots)
pytest_plugins = ["pytester"]
Run = Callable[..., pytest.RunResult]
HALF = FORMATS["float16"]


def ranges(*rows: tuple[str, float | None, float | None], dtype: str = "float16") -> Ranges:
    return Ranges(dtype=dtype, modules=tuple(Range(module=m, type="Linear", output=o, gradient=g) for m, o, g in rows))


# --- the file -----------------------------------------------------------------------------------------------

sizes = st.one_of(st.none(), st.just(0.0), st.floats(min_value=1e-300, max_value=1e300))
rows = st.tuples(st.text(max_size=30), sizes, sizes)


@given(st.lists(rows, max_size=6, unique_by=lambda row: row[0]), st.sampled_from(sorted(FORMATS)))
@example([("(the model itself)", 1.0, None), ("", 1.0, None), ("a b", 0.0, 1.0), ('"x"\n#', 1.0, 2.0)], "float16")
def test_what_is_written_is_read_back(modules: list[tuple[str, float | None, float | None]], dtype: str) -> None:
    """Whatever the modules are called; numbers are rounded to three digits."""
    first = ranges(*modules, dtype=dtype)
    again = parsed(written(first), "a file")
    assert again.dtype == dtype and [row.module for row in again.modules] == [row.module for row in first.modules]
    for row, old in zip(again.modules, first.modules):
        for was, now in ((old.output, row.output), (old.gradient, row.gradient)):
            assert now == was if was is None else now == pytest.approx(was, rel=0.006)
    assert written(again) == written(first)


def test_the_file_shows_the_numbers_and_the_bits() -> None:
    text = written(ranges(("", 40960.0, 1e-5), ("fc.0", 1.5, None)))
    head, body = text.split("dtype float16\n")
    assert "--nanhunt-update" in head and "largest number is\n# 65504" in head
    assert body.splitlines() == [
        "#  output   bits  gradient   bits  type  module",
        "  4.1e+04   +0.7     1e-05  +32.6  Linear  (the model itself)",
        "      1.5  +15.4         -      -  Linear  fc.0",
    ]


def test_a_number_that_hardly_moved_is_written_as_it_stood() -> None:
    """A diff shows what matters: noise, and drift in small steps, do not churn the file."""
    old = written(ranges(("fc", 1.5, 2.0), ("out", 3.0, 0.0)))
    before = parsed(old, "a file")
    assert written(ranges(("fc", 1.55, 1.95), ("out", 3.05, 0.0)), before) == old
    changed = written(ranges(("fc", 1.55, 1.95), ("out", 4.0, 0.0)), before)
    assert [a == b for a, b in zip(old.splitlines(), changed.splitlines())].count(False) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a file holds no nanhunt ranges: write it anew with pytest --nanhunt-update"),
        (written(ranges()).replace("format 1", "format 2"), "ranges of format 2, not 1"),
        (written(ranges(("fc", 1.0, 1.0))) + "<<<<<<< HEAD\n", r"a file, line 7: '<<<<<<< HEAD' is no row"),
        (written(ranges(("fc", 1.0, 1.0))) + "nan +1 1 +1 Linear x\n", "is no row of ranges"),
        (written(ranges()).replace("dtype float16", "dtype int8"), "'dtype int8' is no row"),
        (written(ranges()).replace("dtype float16\n", ""), "names no dtype"),
    ],
)
def test_a_file_that_is_none_says_what_to_do(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        parsed(text, "a file")


# --- the comparison -----------------------------------------------------------------------------------------


def test_headroom_that_shrinks_by_more_than_so_many_bits_is_told_worst_first() -> None:
    before = ranges(("", 1.0, 1.0), ("a", 1.0, 1.0), ("b", 1.0, 1.0), ("c", 8.0, 8.0))
    now = ranges(("", 1.9, 1.0), ("a", 4.0, 1.0), ("b", 1.0, 64.0), ("c", 1.0, 1e-3))
    found = compared(before, now, bits=1.0)
    assert [(one.module, one.tensor, one.bits) for one in found.lost] == [("b", "gradient", 6.0), ("a", "output", 2.0)]
    assert not compared(before, now, bits=6.0)
    text = told(found, "x.txt").splitlines()
    assert text[0] == "b (Linear): largest gradient 1 -> 64, 6.0 bits lost, +10.0 left in float16 (and 1 more)"
    assert text[2:4] == [
        "  b (Linear): largest gradient 1 -> 64, 6.0 bits lost, +10.0 left",
        "  a (Linear): largest output 1 -> 4, 2.0 bits lost, +14.0 left",
    ]
    assert text[-1].startswith("The ranges are stored in x.txt.") and "--nanhunt-update" in text[-1]


def test_a_number_that_no_longer_fits_is_told_however_little_it_grew() -> None:
    before, now = ranges(("a", 60000.0, None)), ranges(("a", 70000.0, None))
    assert [one.left < 0 for one in compared(before, now, bits=5.0).lost] == [True]
    assert not compared(now, now, bits=5.0)  # it did not fit when it was reviewed
    assert not compared(ranges(("a", 60000.0, None), dtype="bfloat16"), ranges(("a", 7e4, None), dtype="bfloat16"), 5.0)


def test_what_the_dtype_cannot_hold_at_all_is_no_change() -> None:
    """Below the smallest number of the dtype one size is like another, zero among them."""
    assert not compared(ranges(("a", 0.0, 1e-12)), ranges(("a", 1e-9, 0.0)), bits=0.5)
    (lost,) = compared(ranges(("a", 0.0, None)), ranges(("a", 1.0, None)), bits=0.5).lost
    assert lost.bits == pytest.approx(24.0)


def test_modules_and_gradients_that_are_new_or_gone_are_told() -> None:
    found = compared(ranges(("a", 1.0, 1.0), ("b", 1.0, None)), ranges(("a", 1.0, None), ("c d", 1.0, 1.0)), bits=1.0)
    assert found and found.new == ('"c d"',) and found.gone == ("b", "the gradient of a")
    text = told(found, "x.txt")
    assert text.startswith("the stored ranges are of another model: 1 new, 2 gone\n")
    assert 'New, not in the file: "c d"\nGone, in the file only: b, the gradient of a\n' in text


def test_of_a_tensor_that_is_handed_on_the_innermost_module_is_named_first() -> None:
    before, now = ranges(("", 1.0, 1.0), ("a", 1.0, 1.0)), ranges(("", 9.0, 1.0), ("a", 9.0, 1.0))
    assert [one.module for one in compared(before, now, bits=1.0).lost] == ["a", ""]


def test_room_is_measured_from_the_smallest_number_to_the_largest() -> None:
    assert room(65504.0, HALF) == 0 and room(32752.0, HALF) == pytest.approx(1)
    assert room(2 * 65504.0, HALF) == pytest.approx(-1)
    assert room(0.0, HALF) == room(2.0**-24, HALF) == pytest.approx(40.0, abs=0.001)
    with pytest.raises(UsageError, match=r"dtype='torch\.int8' is no floating-point format: use one of float64"):
        form_of(torch.int8)


def test_peaks_are_held_against_their_own_dtype_or_the_one_that_is_named() -> None:
    def peak(module: str, size: float, dtype: str) -> Peak:
        return Peak(module=module, type="Linear", tensor="output", dtype=dtype, size=size)

    peaks = [peak("a", 30000.0, "float16"), peak("b", 30000.0, "bfloat16"), peak("c", 60000.0, "float16")]
    short = close(peaks, 2.0)
    assert short is not None and short.title() == (
        "c (Linear): largest output 60 000, +0.1 bits of headroom in float16, 2 are asked for (and 1 more)"
    )
    assert close(peaks, 1.0, None, ("c",)) is None
    named = close(peaks, 2.0, "float16")
    assert named is not None and "(and 2 more)" in named.title()


def test_a_shortage_has_a_table_and_says_by_what_factor_and_in_which_dtype_it_ends() -> None:
    peaks = [
        Peak(module="a.b", type="Linear", tensor="gradient", dtype="float16", size=30000.0),
        Peak(module="", type="Net", tensor="output", dtype="float16", size=60000.0),
    ]
    short = close(peaks, 2.0)
    assert short is not None
    page = short.page().splitlines()
    assert page[3:6] == [
        "module              type    tensor    largest  headroom  dtype    its limit",
        "(the model itself)  Net     output     60 000      +0.1  float16     65 504",
        "a.b                 Linear  gradient   30 000      +1.1  float16     65 504",
    ]
    assert "by a factor of 4" in page[8] and "in bfloat16 or float32" in page[9] and len(page) == 10
    short = close(peaks[:1], 2.0)
    assert short is not None
    advice = short.page().splitlines()[-3:]
    assert "by a factor of 2: a smaller loss or loss scale" in advice[0] and 'allow="a.b"' in advice[2]


# --- the measurement ----------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(4, 4), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.act(self.fc(x))
        return {"hidden": hidden, "masked": hidden.masked_fill(hidden > 0, -math.inf), "label": torch.ones(2).long()}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.unused, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)["hidden"] * 3
        return self.head(x)


def _step(net: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    net(torch.randn(8, 4)).square().sum().backward()
    grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    return grads


def _net() -> Net:
    torch.manual_seed(0)
    return Net()


def test_a_meter_measures_what_hooks_of_torch_see() -> None:
    """Outputs and their gradients, the infinities of masks left out, in the order of first calls."""
    net, seen = _net(), {}
    with Meter(net) as meter:
        _step(net)
    handles = []
    for path in ("", "blocks.0.fc", "head"):

        def forward(module: nn.Module, args: Any, out: Tensor, path: str = path) -> None:
            seen[path, "output"] = out.detach().abs().max().item()
            out.register_hook(lambda g: seen.__setitem__((path, "gradient"), g.abs().max().item()))

        handles.append(net.get_submodule(path).register_forward_hook(forward))
    _step(net)
    measured = {row.module: row for row in meter.ranges()}
    for (path, tensor), size in seen.items():
        assert getattr(measured[path], tensor) == size, (path, tensor)
    assert len(seen) == 6 and list(measured) == [
        "", "blocks.0", "blocks.0.fc", "blocks.0.act", "blocks.1", "blocks.1.fc", "blocks.1.act", "head",
    ]  # fmt: skip
    assert all(math.isfinite(row.output or 0.0) for row in measured.values())


def test_gradients_are_told_without_the_loss_scale() -> None:
    plain, scaled = _net(), _net()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(scaled.parameters(), 0.0)
    with Meter(plain) as bare:
        _step(plain)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    with Meter(scaled) as meter:
        scaler.scale(scaled(x).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    with Meter(plain) as expected:
        plain(x).square().sum().backward()
    assert [row.gradient for row in meter.ranges()] == [row.gradient for row in expected.ranges()]
    with Meter(scaled) as later:  # no scale is left on a loss that none was put on
        _step(scaled)
    assert [row.gradient for row in later.ranges()] == [row.gradient for row in bare.ranges()]


def test_measuring_changes_no_gradient_and_leaves_nothing_behind() -> None:
    net, before = _net(), (list(torch_module._global_forward_hooks), torch.autograd._engine_run_backward)
    plain = _step(net)
    with Meter(net):
        measured = _step(net)
    assert all(torch.equal(a, b) for a, b in zip(plain, measured)) and len(plain) == len(measured) > 0
    assert (list(torch_module._global_forward_hooks), torch.autograd._engine_run_backward) == before


def test_a_meter_off_measures_nothing_more() -> None:
    net = _net()
    with Meter(net) as meter:
        out = net(torch.ones(1, 4))
    out.sum().backward()
    _step(net)
    assert all(row.gradient is None for row in meter.ranges())


def test_checkpoints_and_several_calls_count_the_largest() -> None:
    fc = nn.Linear(1, 1, bias=False)
    fc.weight.data.fill_(2.0)
    model = nn.Sequential(fc)
    with Meter(model) as meter:
        for size in (3.0, 5.0, 1.0):
            x = torch.full((1, 1), size, requires_grad=True)
            checkpoint(model, x, use_reentrant=False).sum().backward()
    assert [(row.module, row.output, row.gradient) for row in meter.ranges()] == [("", 10.0, 1.0), ("0", 10.0, 1.0)]


def test_without_a_model_every_model_that_is_called_is_measured() -> None:
    half, single = nn.Sequential(nn.Identity()), nn.Identity()
    with Meter() as meter:
        half(torch.full((1,), 4.0, dtype=torch.float16))
        single(torch.full((1,), 8.0))
        half[0](torch.full((1,), 2.0))
    found = {(peak.module, peak.dtype): peak.size for peak in meter.peaks()}
    assert found == {
        ("Sequential", "float16"): 4.0,
        ("Sequential.0", "float16"): 4.0,
        ("Sequential.0", "float32"): 2.0,
        ("Identity", "float32"): 8.0,
    }


def test_wrappers_leave_no_trace_and_a_shared_module_goes_by_its_first_name() -> None:
    shared = nn.Linear(1, 1)
    net = nn.Sequential(shared, nn.Tanh(), shared)
    with Meter(nn.DataParallel(net)) as meter:
        nn.DataParallel(net)(torch.ones(1, 1))
        net(torch.ones(1, 1))
    assert [(row.module, row.type) for row in meter.ranges()] == [("", "Sequential"), ("0", "Linear"), ("1", "Tanh")]


def test_a_look_that_fails_is_told_at_the_end_and_not_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(numbers: Tensor) -> None:
        raise ValueError("no")

    monkeypatch.setattr("nanhunt.meter._largest", refuse)
    with pytest.raises(RuntimeError, match="could not measure every tensor") as raised, Meter():
        nn.Identity()(torch.ones(1))
        reached = True
    assert reached and isinstance(raised.value.__cause__, ValueError)


# --- nanhunt.check_ranges -----------------------------------------------------------------------------------

CHECK = """
import os
import pytest
import torch
from torch import nn

def net(**extra):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    for name, module in extra.items():
        model.add_module(name, module)
    return model

def step(model, by=1.0):
    torch.manual_seed(1)
    (model(torch.randn(8, 4)) * by).sum().backward()

BY = float(os.environ.get("BY", 1))

def test_one(nanhunt):
    model = net()
    with torch.no_grad():
        model[0].weight *= BY
        model[0].bias *= BY
    measured = nanhunt.check_ranges(model, step, model)
    assert [row.module for row in measured.modules] == ["", "0", "1", "2"]
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("COLUMNS", "240")
    for name in ("NANHUNT", "PYTEST_ADDOPTS", "BY"):
        monkeypatch.delenv(name, raising=False)
    importlib.import_module("torch._dynamo")  # a run forgets what it was the first to import; this must not come twice
    plugin = ["-p", "nanhunt.pytest_plugin", "-p", "no:cacheprovider", "-p", "no:unraisableexception"]

    def run(tests: str, *args: str) -> pytest.RunResult:
        (pytester.path / "sub").mkdir(exist_ok=True)
        (pytester.path / "sub" / "test_it.py").write_text(CHECK + tests)
        return pytester.runpytest_inprocess(*plugin, "-W", "ignore::pytest.PytestAssertRewriteWarning", *args)

    return run


def test_a_check_fails_until_its_file_is_written_and_then_guards_it(
    run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing; written on demand; the same again; 4 times as large: 2 bits lost; meant, and written anew."""
    missing = run("")
    missing.assert_outcomes(failed=1)
    file = pytester.path / "sub" / "ranges" / "test_it" / "test_one.txt"
    missing.stdout.fnmatch_lines(
        [
            ">*nanhunt.check_ranges(model, step, model)",
            "FAILED * - nanhunt: no ranges are stored in sub/ranges/test_it/test_one.txt: run *--nanhunt-update*",
        ]
    )
    missing.stdout.no_fnmatch_line("*pytest_trial.py*")
    assert not file.exists()

    update = run("", "--nanhunt-update")
    update.assert_outcomes(passed=1)
    update.stdout.fnmatch_lines(["nanhunt: ranges were written, review them: sub/ranges/test_it/test_one.txt"])
    text = file.read_text()
    assert [line.split()[4:] for line in text.splitlines()[5:]] == [
        ["Sequential", "(the", "model", "itself)"], ["Linear", "0"], ["ReLU", "1"], ["Linear", "2"],
    ]  # fmt: skip
    run("").assert_outcomes(passed=1)
    again = run("", "--nanhunt-update")
    again.stdout.no_fnmatch_line("*were written*")
    assert file.read_text() == text

    monkeypatch.setenv("BY", "4")
    grown = run("")
    grown.assert_outcomes(failed=1)
    grown.stdout.fnmatch_lines(
        ["*2.0 bits lost, +* left in float16 (and *", "FAILED * - nanhunt: 1 (ReLU): largest output * 2.0 bits lost*"]
    )
    assert file.read_text() == text
    run("", "--nanhunt-update").assert_outcomes(passed=1)
    assert file.read_text() != text
    run("").assert_outcomes(passed=1)
    monkeypatch.setenv("BY", "1")
    run("").assert_outcomes(passed=1)  # room that was gained is no fault


MANNERS = """
@pytest.mark.parametrize("name", ["a/b", "c"])
def test_each_parameter_has_its_file(nanhunt, name):
    model = net()
    nanhunt.check_ranges(model, step, model)

class TestIn:
    def test_a_class(self, nanhunt):
        model = net()
        nanhunt.check_ranges(model, step, model, dtype=torch.bfloat16)
        nanhunt.check_ranges(model, step, model, 100.0, name="large")
        with pytest.raises(nanhunt.UsageError, match="under name=None already"):
            nanhunt.check_ranges(model, step, model)

@pytest.mark.nanhunt(dtype="float8_e5m2")
def test_the_dtype_of_the_marker(nanhunt):
    model = net()
    nanhunt.check_ranges(model, step, model)
"""


def test_every_check_has_a_file_of_its_own(run: Run, pytester: pytest.Pytester) -> None:
    run(MANNERS, "--nanhunt-update").assert_outcomes(passed=5)
    folder = pytester.path / "sub" / "ranges" / "test_it"
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) == 6 and {"TestIn.test_a_class.txt", "TestIn.test_a_class.large.txt", "test_one.txt"} <= set(
        names
    )
    assert [name.startswith("test_each_parameter_has_its_file[") for name in names].count(True) == 2
    assert "\ndtype bfloat16\n" in (folder / "TestIn.test_a_class.txt").read_text()
    assert "\ndtype float8_e5m2\n" in (folder / "test_the_dtype_of_the_marker.txt").read_text()
    run(MANNERS).assert_outcomes(passed=5)


CHANGES = """
def test_another_dtype(nanhunt):
    model = net()
    nanhunt.check_ranges(model, step, model, dtype="{dtype}")

def test_another_model(nanhunt):
    model = net({extra})
    nanhunt.check_ranges(model, step, model)
"""


def test_another_dtype_and_another_model_are_told(run: Run) -> None:
    run(CHANGES.format(dtype="float16", extra=""), "--nanhunt-update").assert_outcomes(passed=3)
    result = run(CHANGES.format(dtype="bfloat16", extra="last=nn.Tanh()"))
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        [
            "*test_another_dtype.txt was written for float16, and the test asks for bfloat16: *--nanhunt-update*",
            "*New, not in the file: last",
        ]
    )


MISUSED = """
def test_arguments(nanhunt):
    model = net()
    for arguments, message in [
        (dict(step=3), "needs a function that runs one step, got a int"),
        (dict(dtype="int8"), "dtype='int8' is no floating-point format"),
        (dict(bits=-1), "bits=-1: give the bits of headroom"),
        (dict(model=3), "needs a torch.nn.Module"),
        (dict(step=lambda: None), "has not called the model"),
    ]:
        given = dict(model=model, step=lambda: step(model), name=message[:5]) | arguments
        with pytest.raises(nanhunt.UsageError, match=message):
            nanhunt.check_ranges(**given)

def test_bad_step(nanhunt):
    model = net()
    nanhunt.check_ranges(model, step, model, float("inf"))
"""


def test_misuse_is_refused_and_a_bad_step_is_a_finding(run: Run, pytester: pytest.Pytester) -> None:
    result = run(MISUSED, "--nanhunt-update")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["FAILED *test_bad_step - nanhunt: * made the first *, in *"])
    assert [path.name for path in (pytester.path / "sub" / "ranges" / "test_it").iterdir()] == ["test_one.txt"]


def test_a_file_with_a_conflict_is_refused_and_written_anew(run: Run, pytester: pytest.Pytester) -> None:
    run("", "--nanhunt-update")
    file = pytester.path / "sub" / "ranges" / "test_it" / "test_one.txt"
    text = file.read_text()
    file.write_text(text + "<<<<<<< HEAD\n")
    result = run("")
    result.stdout.fnmatch_lines(["*test_one.txt, line 10: '<<<<<<< HEAD' is no row of ranges (a merge conflict?)*"])
    run("", "--nanhunt-update").assert_outcomes(passed=1)
    assert file.read_text() == text
