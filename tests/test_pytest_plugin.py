"""The pytest plugin as its users meet it: what fails, what is told, who decides, what it costs."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.modules import module as torch_module

import nanhunt
from nanhunt import hunter, meter, options, pytest_plugin, pytest_settings, rerun, roots
from nanhunt.errors import UsageError
from nanhunt.finding import Finding
from nanhunt.pytest_reports import file_name
from nanhunt.report import html
from nanhunt.report.files import read_findings

# A run inside this process forgets what it was the first to import: what must not come twice is imported before.
LOADED = (hunter, meter, pytest_plugin, rerun, roots, html, torch)
pytest_plugins = ["pytester"]

# The plugins of the environment are left out of the runs in here, so that this one is loaded the same way whether it
# is installed or not; without hypothesis and the garbage that is collected at the end, a run takes a tenth of the time.
PLUGIN = ["-p", "nanhunt.pytest_plugin", "-p", "no:cacheprovider", "-p", "no:unraisableexception"]
PLUGIN += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
XDIST = ["-p", "xdist"]
INSTALLED = any(entry.value == "nanhunt.pytest_plugin" for entry in importlib.metadata.entry_points(group="pytest11"))
Run = Callable[..., pytest.RunResult]
ROOT = Path(nanhunt.__file__).parents[1]

MODEL = """
import pytest
import torch
from torch import nn

class Exp(nn.Module):
    def forward(self, x):
        return x.exp()

def model():
    net = nn.Sequential(nn.Linear(4, 4), Exp(), nn.Linear(4, 2))
    for parameter in net.parameters():  # torch.manual_seed would import the compiler
        parameter.data.fill_(0.5)
    return net

GOOD, BAD = torch.ones(2, 4), torch.full((2, 4), 1e4)
"""
VERDICT = "1 (Exp) made the first +inf, in forward, step 0"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("NANHUNT")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("COLUMNS", "240")


@pytest.fixture(autouse=True, scope="module")
def what_torch_imports_late() -> None:
    """Not when this file is collected: a watch must do without it where the program does."""
    importlib.import_module("torch._dynamo")


@pytest.fixture
def run(pytester: pytest.Pytester) -> Run:
    """Run tests, written after the lines of MODEL, in this process."""

    def run(tests: str, *args: str, **files: str) -> pytest.RunResult:
        pytester.makepyfile(test_it=MODEL + tests, **files)
        return pytester.runpytest_inprocess(*PLUGIN, *args)

    return run


def process(pytester: pytest.Pytester, *args: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a process of its own."""
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    return subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGIN, *args],
        cwd=pytester.path,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


# --- what it costs ------------------------------------------------------------------------------------------

TORCH_IS_LEFT_ALONE = "def test_it({fixture}):\n    {use}\n    import sys\n    assert 'torch' not in sys.modules\n"


def test_a_run_that_does_not_use_it_does_not_import_torch(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TORCH_IS_LEFT_ALONE.format(fixture="", use="pass"))
    ran = process(pytester)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "nanhunt:" not in ran.stdout


def test_the_check_for_torch_can_fail(pytester: pytest.Pytester) -> None:
    """Guards the test above: the same test, with the plugin in use, finds torch imported."""
    pytester.makepyfile(TORCH_IS_LEFT_ALONE.format(fixture="nanhunt", use="nanhunt.Watch"))
    ran = process(pytester)
    assert ran.returncode == 1 and "assert 'torch' not in" in ran.stdout


def test_asking_for_the_fixture_alone_does_not_import_torch(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TORCH_IS_LEFT_ALONE.format(fixture="nanhunt", use="nanhunt.Finding"))
    assert process(pytester).returncode == 0


@pytest.mark.skipif(not INSTALLED, reason="the plugin is not installed, it runs from a folder")
def test_an_installed_plugin_is_found_by_its_entry_point(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    pytester.makepyfile("def test_it(nanhunt):\n    assert nanhunt.Finding")
    assert subprocess.run([sys.executable, "-m", "pytest"], cwd=pytester.path, check=False).returncode == 0


# --- --nanhunt ----------------------------------------------------------------------------------------------

TWO = """
def test_good():
    model()(GOOD).sum().backward()

def test_bad():
    net = model()
    net(BAD).sum().backward()
"""


def test_the_option_fails_the_test_that_makes_a_bad_value_and_no_other(run: Run) -> None:
    result = run(TWO, "--nanhunt")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "nanhunt: every test is watched",
            ">*net(BAD).sum().backward()",
            f"E   nanhunt: {VERDICT}",
            "*- nanhunt -*",
            VERDICT,
            "*return x.exp()",
            "What to do",
            "Tensors*",
            "nanhunt: 1 of 2 tests made a NaN or Inf",
            f"FAILED test_it.py::test_bad - nanhunt: {VERDICT}",
        ]
    )


def test_without_the_option_nothing_is_watched_and_nothing_said(run: Run) -> None:
    result = run(TWO)
    result.assert_outcomes(passed=2)
    result.stdout.no_fnmatch_line("*nanhunt:*")


def test_the_traceback_ends_at_the_line_of_the_user(run: Run) -> None:
    """The frames of torch and of nanhunt below it are of no use, unless --full-trace asks for them."""
    result = run(TWO, "--nanhunt")
    result.stdout.no_fnmatch_line("*_call_impl*")
    result.stdout.no_fnmatch_line("*observer.py*")
    assert result.stdout.str().count("What to do") == 1  # the page stands in its section, not in the error as well
    run(TWO, "--nanhunt", "--full-trace").stdout.fnmatch_lines(["*_call_impl*"])


def test_a_test_that_swallows_the_stop_fails_all_the_same(run: Run) -> None:
    result = run(
        """
def test_it():
    try:
        model()(BAD)
    except FloatingPointError:
        pass
""",
        "--nanhunt",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["The test's own checks have passed*", f"FAILED * - nanhunt: {VERDICT}"])


RECORDS = """
@pytest.mark.nanhunt(on_hit="record")
def test_goes_on(record_property):
    model()(BAD)
    record_property("reached", "the end")

@pytest.mark.nanhunt(on_hit="record")
def test_fails_by_itself():
    assert model()(BAD).isfinite().all()
"""


def test_what_is_only_recorded_fails_the_test_at_its_end(run: Run, pytester: pytest.Pytester) -> None:
    result = run(RECORDS, "--junitxml=junit.xml")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [f"FAILED *test_goes_on - nanhunt: {VERDICT}", "FAILED *test_fails_by_itself - assert*"]
    )
    assert result.stdout.str().count("What to do") == 2  # one section each
    report = (pytester.path / "junit.xml").read_text()
    assert 'name="reached"' in report and report.count('name="nanhunt" value="1 (Exp) made') == 2


def test_on_hit_warn_only_warns(run: Run) -> None:
    result = run(TWO, "--nanhunt", "--nanhunt-on-hit=warn")
    result.assert_outcomes(passed=2, warnings=1)
    result.stdout.fnmatch_lines(["*NonFiniteWarning: 1 (Exp) made*", "nanhunt: 1 of 2 tests made a NaN or Inf"])


def test_a_program_that_dies_of_its_nan_is_explained(run: Run) -> None:
    result = run(
        """
def test_it():
    torch.multinomial((model()(BAD) * 0).softmax(-1)[0].detach(), 1)
""",
        "--nanhunt",
        "--nanhunt-on-hit=record",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*- nanhunt -*", VERDICT])
    assert result.stdout.str().count("What to do") == 1


def test_cases_of_unittest_are_watched_too(run: Run) -> None:
    result = run(
        """
import unittest

class Case(unittest.TestCase):
    def test_bad(self):
        model()(BAD)
""",
        "--nanhunt",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"FAILED * - nanhunt: {VERDICT}"])


def test_an_expected_failure_may_be_a_bad_value(run: Run) -> None:
    run(
        "@pytest.mark.xfail(raises=FloatingPointError, strict=True)" + TWO[TWO.index("\ndef test_bad") :], "--nanhunt"
    ).assert_outcomes(xfailed=1)


def test_a_model_that_cannot_be_watched_is_told(run: Run) -> None:
    result = run(
        """
def test_it():
    net = model()
    torch.compile(lambda x: net(x), backend="eager")(GOOD)
""",
        "--nanhunt",
    )
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "nanhunt: none of 1 test made a NaN or Inf in what was watched",
            "nanhunt: not watched: code under torch.compile*",
        ]
    )


def test_nothing_is_left_attached(run: Run) -> None:
    before = list(torch_module._global_forward_hooks), torch.autograd._engine_run_backward
    run(TWO + RECORDS, "--nanhunt", "--nanhunt-headroom-bits=1")
    assert (list(torch_module._global_forward_hooks), torch.autograd._engine_run_backward) == before


# --- the marker ---------------------------------------------------------------------------------------------


def test_the_marker_watches_a_test_and_takes_one_out(run: Run) -> None:
    result = run(
        """
@pytest.mark.nanhunt
def test_watched():
    model()(BAD)

@pytest.mark.nanhunt(on=False)
def test_left_out():
    model()(BAD)

@pytest.mark.nanhunt(kinds="nan")
def test_infinities_do_not_count():
    model()(BAD)

@pytest.mark.nanhunt(allow=["1"])
def test_allowed():
    model()(BAD)
"""
    )
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["nanhunt: 1 of 4 tests made a NaN or Inf (3 watched)", "FAILED *::test_watched *"])
    run("@pytest.mark.nanhunt(on=False)" + TWO[TWO.index("\ndef test_bad") :], "--nanhunt").assert_outcomes(passed=1)


def test_the_closest_of_several_markers_decides(run: Run) -> None:
    result = run(
        """
@pytest.mark.nanhunt(kinds="nan", on=True)
class TestAll:
    def test_infinities_do_not_count(self):
        model()(BAD)

    @pytest.mark.nanhunt(kinds="+inf")
    def test_here_they_do(self):
        model()(BAD)
"""
    )
    result.assert_outcomes(passed=1, failed=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("kindz='nan'", "has no argument 'kindz': use on, on_hit, detail, *headroom_bits*"),
        ("report='x'", "has no argument 'report'*"),
        ("'nan'", "takes named arguments only, got 'nan'"),
        ("detail='all'", "detail='all' is not known: use one of auto, module, op"),
        ("headroom_bits=-1", "headroom_bits=-1 is not known: give a number of bits*"),
        ("dtype='int8'", "dtype='int8' is not known: use one of float64*float16*"),
        ("kinds=()", "kinds=() is not known: name at least one"),
        ("on=3", "on=3 is not known: use true or false"),
    ],
)
def test_a_wrong_marker_is_an_error_of_collection(pytester: pytest.Pytester, arguments: str, message: str) -> None:
    pytester.makepyfile(f"import pytest\n@pytest.mark.nanhunt({arguments})\ndef test_it(): pass\n")
    ran = pytester.runpytest_inprocess(*PLUGIN)
    ran.assert_outcomes(errors=1)
    ran.stdout.re_match_lines([r"test_a_wrong_marker\w+\.py::test_it: @pytest\.mark\.nanhunt"])
    ran.stdout.fnmatch_lines([f"*{message}".replace("[", "[[]")])


# --- headroom -----------------------------------------------------------------------------------------------

HEADROOM = """
class Large(nn.Module):
    def forward(self, x):
        return x * self.by

def scaled(by, dtype):
    net = nn.Sequential(nn.Identity(), Large())
    net[1].by = by
    out = net(torch.ones(2, dtype=dtype, requires_grad=True))
    (out.float() * 2.0 ** -20).sum().backward()

@pytest.mark.nanhunt(headroom_bits=2)
@pytest.mark.parametrize("by", [16000.0, 20000.0])
def test_in_its_own_dtype(by):
    scaled(by, torch.float16)

@pytest.mark.nanhunt(headroom_bits=2, dtype="float16")
def test_in_a_dtype_that_is_named():
    scaled(1e6, torch.float32)

@pytest.mark.nanhunt(headroom_bits=2)
def test_float32_has_room():
    scaled(1e6, torch.float32)

@pytest.mark.nanhunt(headroom_bits=2, dtype="float16", allow="1,Sequential")
def test_that_is_allowed(nanhunt):
    scaled(1e3, torch.float32)
"""


def test_headroom_names_the_module_the_number_and_the_bits(run: Run) -> None:
    """65504 / 16000 leaves 2.03 bits, 65504 / 20000 leaves 1.7."""
    result = run(HEADROOM)
    result.assert_outcomes(passed=3, failed=2)
    result.stdout.fnmatch_lines(
        [
            "FAILED *own_dtype[[]20000.0] - nanhunt: 1 (Large): largest output 20 000, +1.7 bits of headroom in "
            "float16, 2 are asked for (and 1 more)",
            "FAILED *a_dtype_that_is_named - nanhunt: 1 (Large): largest output 1 000 000, -3.9 bits of headroom *",
        ]
    )
    result.stdout.fnmatch_lines(["(the model itself)  Sequential  output   20 000      +1.7  float16 *", "What to do"])
    result.stdout.fnmatch_lines(
        ["nanhunt: none of 5 tests made a NaN or Inf, 2 came too close to the limit of a dtype"]
    )


def test_a_shortage_of_headroom_is_written_down_too(run: Run, pytester: pytest.Pytester) -> None:
    result = run(HEADROOM, "--nanhunt-report=out")
    result.stdout.fnmatch_lines(["nanhunt: none of 5 tests *, 2 came too close *; reports in out"])
    files = list((pytester.path / "out").iterdir())
    assert len(files) == 2 and all(file.name.endswith(".headroom.txt") for file in files)
    assert any(file.read_text().startswith("1 (Large): largest output 20 000") for file in files)


def test_a_capsule_is_kept_of_what_a_test_has_found(run: Run, pytester: pytest.Pytester) -> None:
    """Of a watched test and of a hunt of the fixture, both from the folder that pytest was started in."""
    body = """
import os
import torch
from torch import nn

class Root(nn.Module):
    def forward(self, x):
        return x.sqrt()

def test_watched():
    Root()(-torch.ones(2))

def test_hunted(nanhunt, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = Root()
    assert nanhunt.hunt(model, -torch.ones(2), model=model).context["capsule"].startswith("{folder}")
"""
    folder = pytester.path / "faults"
    run(body.replace("{folder}", str(folder)), "--nanhunt", "--nanhunt-capsule=faults").assert_outcomes(
        passed=1, failed=1
    )
    assert sorted(one.name for one in folder.iterdir()) == ["step0.forward", "step0.forward-2"]
    (pytester.path / "taken").write_text("")
    result = run("def test_one(): pass", "--nanhunt", "--nanhunt-capsule=taken")
    result.stderr.fnmatch_lines(["ERROR: --nanhunt-capsule: cannot write into '*taken': *"])


# --- the fixture --------------------------------------------------------------------------------------------


def test_the_fixture_offers_every_public_name(run: Run) -> None:
    run(
        """
import nanhunt as package

def test_names(nanhunt):
    for name in package.__all__:
        assert getattr(nanhunt, name) is not None and name in dir(nanhunt)
        if name not in ("watch", "hunt"):
            assert getattr(nanhunt, name) is getattr(package, name)
    assert "check_ranges" in dir(nanhunt)
    with pytest.raises(AttributeError, match="it offers"):
        nanhunt.wach
"""
    ).assert_outcomes(passed=1)


FIXTURE = """
from torch.nn.modules import module as hooks

def test_raises(nanhunt):
    with nanhunt.watch(model()):
        pass
    net = model()
    with nanhunt.watch(net):
        net(BAD)

def test_hunts(nanhunt):
    net = model()
    finding = nanhunt.hunt(lambda: net(BAD), model=net)
    assert finding.op == "aten.exp.default"
    assert finding is None

def test_expects(nanhunt):
    net = model()
    with pytest.raises(nanhunt.NonFiniteError), nanhunt.watch(net):
        net(BAD)

def test_leaves_open(nanhunt):
    nanhunt.watch(model())
    test_leaves_open.watch = nanhunt.watch(model())

@pytest.mark.nanhunt(on=False)
def test_is_closed():
    assert not hooks._global_forward_hooks
"""


def test_the_fixture_raises_returns_and_closes(run: Run) -> None:
    """A test that holds the fixture is in charge: --nanhunt does not fail it for what it expects."""
    for args in ((), ("--nanhunt",)):
        result = run(FIXTURE, *args)
        result.assert_outcomes(passed=3, failed=2)
        result.stdout.fnmatch_lines(
            [f"FAILED *::test_raises - nanhunt: {VERDICT}", f"FAILED *::test_hunts - *assert nanhunt: {VERDICT}"]
        )
        assert result.stdout.str().count("What to do") == 2


def test_a_fault_that_only_the_last_look_sees_fails_the_test_itself(run: Run) -> None:
    """A watch that the test leaves open looks once more when the test ends, not in the teardown."""
    result = run(
        """
def test_it(nanhunt):
    net = model()
    nanhunt.watch(net)
    net(GOOD).sum().backward()
    with torch.no_grad():
        net[0].weight.fill_(float("nan"))
"""
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["FAILED * - nanhunt: *0.weight*"])


# --- four sources -------------------------------------------------------------------------------------------

ASKS = """
@pytest.mark.nanhunt({marker})
def test_it(nanhunt):
    watch = nanhunt.watch(model())
    assert watch._options.detail == "{expected}"
"""
SOURCES = {"marker": "op", "cli": "module", "env": "auto", "ini": "op"}


@pytest.mark.parametrize("first", SOURCES)
def test_marker_goes_before_command_line_before_environment_before_ini(
    run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Each source in turn is the first that says something; those after it say something else."""
    after = list(SOURCES)[list(SOURCES).index(first) :]
    if "ini" in after:
        pytester.makeini(f"[pytest]\nnanhunt_detail = {SOURCES['ini']}\n")
    if "env" in after:
        monkeypatch.setenv("NANHUNT_DETAIL", SOURCES["env"])
    marker = f"detail='{SOURCES['marker']}'" if "marker" in after else ""
    args = [f"--nanhunt-detail={SOURCES['cli']}"] if "cli" in after else []
    run(ASKS.format(marker=marker, expected=SOURCES[first]), *args).assert_outcomes(passed=1)


def test_every_source_can_switch_it_on(run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANHUNT_PYTEST", "1")
    run(TWO).assert_outcomes(passed=1, failed=1)
    monkeypatch.setenv("NANHUNT_PYTEST", "0")
    pytester.makeini("[pytest]\nnanhunt = true\nnanhunt_kinds = nan, +inf\n")
    run(TWO).assert_outcomes(passed=2)
    monkeypatch.delenv("NANHUNT_PYTEST")
    run(TWO).assert_outcomes(passed=1, failed=1)
    monkeypatch.setenv("NANHUNT_KINDS", "nan")
    run(TWO).assert_outcomes(passed=2)


def test_the_switch_of_all_of_nanhunt_is_obeyed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANHUNT", "0")
    checks = """
def test_ranges(nanhunt):
    calls = []
    assert nanhunt.check_ranges(model(), calls.append, 1) is None
    assert calls == [1]
"""
    result = run(
        TWO + FIXTURE[FIXTURE.index("\ndef test_raises") : FIXTURE.index("\ndef test_hunts")] + checks, "--nanhunt"
    )
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["nanhunt: switched off by NANHUNT=0"])
    result.stdout.fnmatch_lines(["nanhunt: no test was watched: switched off by NANHUNT=0"])
    assert "none of" not in result.stdout.str()
    assert "nanhunt: " not in run("def test_it():\n    pass\n").stdout.str()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("NANHUNT", "2", "NANHUNT='2' is not a legal value: use NANHUNT=1 * or NANHUNT=0 *"),
        ("NANHUNT_PYTEST", "x", "NANHUNT_PYTEST='x' is not known: use true or false"),
        ("NANHUNT_DETAIL", "x", "NANHUNT_DETAIL='x' is not known: use one of auto, module, op"),
        ("NANHUNT_KINDS", "inf", "NANHUNT_KINDS='inf' is not known: use some of nan, +inf, -inf"),
        ("--nanhunt-stop", "x", "*argument --nanhunt-stop: 'x' is not known: use one of confirmed, first"),
        ("--nanhunt-headroom-bits", "x", "*argument --nanhunt-headroom-bits: 'x' is not known: give a number*"),
        ("nanhunt_compiled", "x", "nanhunt_compiled='x' is not known: use one of error, eager, retrace"),
    ],
)
def test_bad_values_are_refused_with_the_legal_ones(
    run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    args = [f"{name}={value}"] if name.startswith("-") else []
    if name.isupper():
        monkeypatch.setenv(name, value)
    elif not args:
        pytester.makeini(f"[pytest]\n{name} = {value}\n")
    result = run(TWO, *args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{message}"])


def test_a_boolean_of_the_ini_file_that_is_none_names_its_option(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nnanhunt = maybe\n")
    result = run(TWO)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*nanhunt in the ini file: *'maybe'*: use true or false"])


@pytest.mark.parametrize("args", [["--nanhunt-headroom-bits=3"], ["--nanhunt-detail=op", "--nanhunt-report=zz"]])
def test_options_without_a_test_that_they_are_for_are_told(run: Run, args: list[str]) -> None:
    result = run(TWO, *args)
    result.assert_outcomes(passed=2)
    of = ", ".join(one.partition("=")[0] for one in args)
    result.stdout.fnmatch_lines([f"nanhunt: no test was watched: {of} need* --nanhunt, the marker nanhunt or *"])
    assert "no test was watched" not in run(TWO + "\ndef test_uses(nanhunt):\n    pass\n", *args).stdout.str()
    assert "no test was watched" not in run(TWO, "--nanhunt", *args).stdout.str()


ENDS = """
@pytest.fixture
def broken():
    raise ValueError

def test_that_cannot_begin(broken):
    pass

@pytest.mark.skip
def test_that_is_left_out():
    pass

@pytest.fixture
def breaks_later():
    yield
    raise ValueError

def test_that_ends_badly(breaks_later):
    pass
"""


def test_each_test_counts_once_whatever_part_of_it_fails(run: Run) -> None:
    """Of these, one has never begun and one was skipped: neither was watched."""
    result = run(TWO + ENDS, "--nanhunt")
    result.assert_outcomes(passed=2, failed=1, errors=2, skipped=1)
    result.stdout.fnmatch_lines(["nanhunt: 1 of 4 tests made a NaN or Inf (3 watched)"])


@pytest.mark.parametrize("folder", ["taken", "taken/inside", "/proc/nanhunt"])
@pytest.mark.parametrize("xdist", [[], ["-n", "1"]])
def test_a_folder_that_reports_cannot_go_to_is_refused_before_any_test(
    run: Run, pytester: pytest.Pytester, folder: str, xdist: list[str]
) -> None:
    (pytester.path / "taken").write_text("a file")
    result = run(TWO, "--nanhunt", f"--nanhunt-report={folder}", *(XDIST + xdist if xdist else []))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: --nanhunt-report: cannot write into '*{folder}': *"])
    assert "INTERNALERROR" not in result.stdout.str() + result.stderr.str()
    assert "passed" not in result.stdout.str()


def test_an_ini_file_with_such_a_folder_is_no_matter_where_nothing_is_watched(
    run: Run, pytester: pytest.Pytester
) -> None:
    pytester.makeini("[pytest]\nnanhunt_report = taken\n")
    (pytester.path / "taken").write_text("a file")
    run(TWO).assert_outcomes(passed=2)
    assert run(TWO, "--nanhunt").ret == pytest.ExitCode.USAGE_ERROR


def test_a_report_that_fails_later_is_told_and_costs_no_test(run: Run) -> None:
    """A folder that goes bad while the tests run."""
    spoils = """
def test_spoils():
    import pathlib
    pathlib.Path("out").rmdir()
    pathlib.Path("out").write_text("")

def test_bad_too():
    model()(BAD)
"""
    result = run(spoils + TWO, "--nanhunt", "--nanhunt-report=out")
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(
        [
            "nanhunt: 2 of 4 tests made a NaN or Inf",
            "nanhunt: the report of test_it.py::test_bad_too (and 1 more) could not be written: *",
        ]
    )


def test_a_file_where_ranges_belong_is_told(run: Run, pytester: pytest.Pytester) -> None:
    (pytester.path / "ranges").write_text("")
    checks = "def test_it(nanhunt):\n    net = model()\n    nanhunt.check_ranges(net, net, GOOD)\n"
    for args in ([], ["--nanhunt-update"]):
        result = run(checks, *args)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(
            ["E * ranges is a file, and ranges are stored in a folder of that name: move it away"]
        )


def test_the_words_are_those_of_watch() -> None:
    """They stand here once more, because the file of options imports torch."""
    assert pytest_settings._LEGAL["detail"] == options._DETAIL
    assert pytest_settings._LEGAL["stop"] == options._STOP
    assert pytest_settings._LEGAL["compiled"] == options._COMPILED
    assert set(pytest_settings._LEGAL["on_hit"]) == set(options._ON_HIT)


def test_a_setting_that_says_nothing_leaves_room_for_the_next() -> None:
    above = pytest_settings.Settings(on=False, kinds=("nan",))
    below = pytest_settings.Settings(on=True, kinds=("+inf",), detail="op")
    assert above.over(below) == pytest_settings.Settings(on=False, kinds=("nan",), detail="op")
    assert pytest_settings.of_environment({"NANHUNT_DETAIL": ""}) == pytest_settings.Settings()
    with pytest.raises(UsageError, match="NANHUNT_DTYPE='int8' is not known: use one of float64"):
        pytest_settings.of_environment({"NANHUNT_DTYPE": "int8"})


def test_help_and_markers_teach(pytester: pytest.Pytester) -> None:
    """Every setting has its option, its ini twin and, but for the folders, its argument of the marker."""
    help_text = pytester.runpytest_inprocess(*PLUGIN, "--help").stdout.str()
    group = help_text.split("nanhunt: where the first NaN or Inf of a test was made")[1].split("\n\n")[0]
    told = re.sub(r"\s+", " ", help_text)
    for name in pytest_settings.NAMES:
        assert f"  {pytest_settings.flag(name)}" in group
        assert re.search(rf"^  {pytest_settings.ini(name)} \(", help_text, re.MULTILINE)
    assert "--nanhunt-update" in group
    for words in ("NANHUNT=0 turns all of it off", "marker goes before the command line", "NANHUNT_DETAIL=op"):
        assert words in told
    markers = pytester.runpytest_inprocess(*PLUGIN, "--markers").stdout.str()
    line = next(line for line in markers.splitlines() if line.startswith("@pytest.mark.nanhunt("))
    folders = pytest_settings.FOLDERS
    assert all((f"{name}=" in line) is (name not in folders) for name in pytest_settings.NAMES)
    assert "on=False leaves it out" in line


# --- reports ------------------------------------------------------------------------------------------------

SAVES = (
    TWO
    + """
@pytest.mark.parametrize("text", ["a/b", "a:b", "../../c"])
def test_names(text):
    model()(BAD)

def test_fails_otherwise():
    assert 1 == 2
"""
)


def test_each_failing_test_leaves_a_page_and_its_json(run: Run, pytester: pytest.Pytester) -> None:
    result = run(SAVES, "--nanhunt", "--nanhunt-report=out/here")
    result.assert_outcomes(passed=1, failed=5)
    result.stdout.fnmatch_lines(["nanhunt: 4 of 6 tests made a NaN or Inf; reports in out/here"])
    folder = pytester.path / "out" / "here"
    files = sorted(path.name for path in folder.iterdir())
    assert len(files) == 8 and len([name for name in files if name.startswith("test_it.py-test_bad-")]) == 2
    for path in folder.glob("*.json"):
        (finding,) = read_findings(path)
        assert finding == Finding.from_json(path.read_text()) and finding.title() == VERDICT
        assert "1 (Exp)" in path.with_suffix(".html").read_text()


def test_a_folder_of_the_ini_file_lies_beside_it(
    run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makeini("[pytest]\nnanhunt = true\nnanhunt_report = pages\n")
    pytester.mkdir("elsewhere")
    monkeypatch.chdir(pytester.path / "elsewhere")
    result = run(TWO, str(pytester.path))
    result.stdout.fnmatch_lines(["nanhunt: 1 of 2 tests made a NaN or Inf; reports in ../pages"])
    assert len(list((pytester.path / "pages").iterdir())) == 2


def test_file_names_are_safe_and_tell_tests_apart() -> None:
    nodes = [
        "a/b.py::test[x/y]",
        "a/b.py::test[x:y]",
        "a/b.py::test[X/y]",
        "/etc/passwd",
        "..",
        "",
        "é" * 400,
        "a" * 400,
    ]
    names = [file_name(node) for node in nodes]
    assert len({name.lower() for name in names}) == len(nodes)
    for name in names:
        assert re.fullmatch(r"[A-Za-z0-9_.\-\[\]]{8,140}", name) and not name.startswith(".")
    assert file_name("TestAll.test_it[float16]") == "TestAll.test_it[float16]"


def test_it_works_under_xdist(pytester: pytest.Pytester) -> None:
    """Workers watch and write, the last line counts for all of them."""
    pytester.makepyfile(test_one=MODEL + TWO, test_two=MODEL + RECORDS, test_three="def test_other(): pass")
    ran = process(pytester, *XDIST, "-n2", "--nanhunt", "--nanhunt-report=out")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "nanhunt: 3 of 5 tests made a NaN or Inf; reports in out\n" in ran.stdout
    assert ran.stdout.count("What to do") == 3 and ran.stdout.count("nanhunt: 3 of 5") == 1
    assert re.search(rf"FAILED test_one.py::test_bad - nanhunt: {re.escape(VERDICT)}", ran.stdout)
    assert len(list((pytester.path / "out").glob("*.html"))) == 3
