"""The command line: exit codes, what it prints, and that showing a finding needs no torch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nanhunt import Finding, TensorStats, UsageError, __version__, cli

ROOT = Path(cli.__file__).parent.parent


def run(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`python -m nanhunt args`, with colours off and a fixed width."""
    return python("-m", "nanhunt", *args, env=env)


def python(*args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    clean = {**os.environ, "PYTHONPATH": path, "NO_COLOR": "1", "COLUMNS": "100"}
    clean.pop("NANHUNT", None)
    return subprocess.run(
        [sys.executable, *args],
        env={**clean, **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
    )


FAULT = Finding(
    phase="forward",
    step=3,
    call=1,
    module="encoder.layer.2",
    module_type="Linear",
    kind="+inf",
    tensor="output",
    cause="overflow",
    why="12 of 64 values.",
    advice=("Use bfloat16.",),
    tensors=(TensorStats(role="output", dtype="float16", shape=(8, 8), pos_inf=12),),
)
CALIBRATION = Finding(phase="backward", step=0, kind="+inf", tensor="grad of fc.weight", handled="loss_scale")


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, str]:
    """Files with one fault, one finding that is none, several findings, and no finding."""
    texts = {
        "fault": FAULT.to_json(indent=2),
        "handled": CALIBRATION.to_json(),
        "list": json.dumps([CALIBRATION.to_dict(), FAULT.to_dict()]),
        "lines": CALIBRATION.to_json() + "\n" + FAULT.to_json() + "\n",
        "none": "[]",
        "broken": '{"format": 1, "phase"',
        "other": '{"loss": 3}',
        "future": '{"format": 2, "phase": "forward"}',
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.json").write_text(text, encoding="utf-8")
    return {name: str(tmp_path / f"{name}.json") for name in texts}


# --- show -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "code"),
    [
        (["fault"], 1),
        (["handled"], 0),
        (["list"], 1),
        (["lines"], 1),
        (["handled", "handled"], 0),
        (["handled", "fault"], 1),
    ],
)
def test_show_ends_with_1_exactly_when_a_finding_is_a_fault(
    saved: dict[str, str], capsys: pytest.CaptureFixture[str], files: list[str], code: int
) -> None:
    paths = [saved[name] for name in files]
    assert cli.main(["show", *paths]) == code
    assert cli.main(["show", "--json", *paths]) == code
    assert capsys.readouterr().err == ""


def test_show_prints_the_page_of_one_finding(saved: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["show", saved["fault"]])
    assert capsys.readouterr().out == f"{FAULT}\n"


def test_show_numbers_several_findings_and_says_which_file_they_are_from(
    saved: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["show", saved["list"], saved["fault"]])
    pages = [
        f"1 of 3: {saved['list']}\n\n{CALIBRATION}\n",
        f"2 of 3: {saved['list']}\n\n{FAULT}\n",
        f"3 of 3: {saved['fault']}\n\n{FAULT}\n",
    ]
    assert capsys.readouterr().out == "\n".join(pages)


def test_show_of_an_empty_list_is_clean(saved: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """It is what a program writes that dumps `hunt.findings` after a healthy run."""
    assert cli.main(["show", saved["none"]]) == 0
    assert capsys.readouterr().out == f"no finding in {saved['none']}\n"
    assert cli.main(["show", "--json", saved["none"]]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_show_json_is_one_list_that_reads_back(saved: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["show", "--json", saved["lines"], saved["fault"]])
    data = json.loads(capsys.readouterr().out)
    assert [Finding.from_dict(one) for one in data] == [CALIBRATION, FAULT, FAULT]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", r"'.*broken\.json' holds no nanhunt findings: it is not JSON \(.*\)"),
        ("other", r"'.*other\.json': not a nanhunt finding: expected an object with the key 'format'"),
        ("future", r"'.*future\.json': this finding has format 2, and this nanhunt reads format 1: .*"),
    ],
)
def test_show_refuses_what_is_no_finding(
    saved: dict[str, str], capsys: pytest.CaptureFixture[str], name: str, message: str
) -> None:
    assert cli.main(["show", saved["fault"], saved[name]]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(f"nanhunt: error: {message}\n", err)


def test_show_refuses_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", str(tmp_path / "gone.json")]) == 2
    out, err = capsys.readouterr()
    path = str(tmp_path / "gone.json")
    assert (out, err) == ("", f"nanhunt: error: cannot read {path!r}: No such file or directory\n")
    assert cli.main(["show", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"nanhunt: error: cannot read {str(tmp_path)!r}: Is a directory\n"


def test_show_survives_a_reader_that_stops_and_a_terminal_without_the_letters(tmp_path: Path) -> None:
    odd = Finding(phase="forward", module="schicht\u00e4", kind="nan")
    (tmp_path / "odd.json").write_text(json.dumps([odd.to_dict()] * 2000), encoding="utf-8")
    shown = run("show", str(tmp_path / "odd.json"), env={"PYTHONIOENCODING": "ascii"})
    assert (shown.returncode, shown.stderr) == (1, "")
    assert "schicht\\xe4" in shown.stdout
    assert python("-c", _READS_ONE_LINE, str(tmp_path / "odd.json")).stdout == "b'' 1\n"


_READS_ONE_LINE = """
import subprocess, sys
show = [sys.executable, "-m", "nanhunt", "show", sys.argv[1]]
show = subprocess.Popen(show, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
show.stdout.readline()
show.stdout.close()
print(show.stderr.read(), show.wait())
"""


# --- help, version, wrong usage ---------------------------------------------------------------------


def test_the_version_is_that_of_the_package() -> None:
    shown = run("--version")
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, f"nanhunt {__version__}\n", "")


def test_the_help_teaches_the_commands_and_the_three_lines() -> None:
    shown = run("--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    for line in ("import nanhunt", "with nanhunt.watch(model):", "NANHUNT=0", "python -m nanhunt demo"):
        assert line in shown.stdout
    assert "exit code: 0 when no file holds a fault, 1 when one does, 2" in run("show", "--help").stdout
    assert "nothing is planted" in run("demo", "--help").stdout.lower()
    for page in (shown.stdout, run("show", "--help").stdout, run("demo", "--help").stdout):
        assert max(len(line) for line in page.splitlines()) <= 110


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["train.py"],
            "nanhunt: error: there is no command 'train.py': use demo or show (python -m nanhunt --help)",
        ),
        (
            ["sho", "a"],
            "nanhunt: error: there is no command 'sho': use demo or show (python -m nanhunt --help)",
        ),
        (["show"], "nanhunt show: error: the following arguments are required: FILE"),
        (["show", "--jso", "x"], "nanhunt: error: unrecognized arguments: --jso"),
        (["--verbose", "show", "x"], "nanhunt: error: unrecognized arguments: --verbose"),
        (["demo", "now"], "nanhunt: error: unrecognized arguments: now"),
        (["demo", "--save"], "nanhunt demo: error: argument --save: expected one argument"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(args)
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert err.splitlines()[-1] == message
    assert err.startswith("usage: nanhunt")


def test_without_a_command_the_help_goes_to_stderr() -> None:
    shown = run()
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr == run("--help").stdout


def test_an_unknown_format_of_the_demo_names_the_legal_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["demo", "--dtype", "float8"])
    assert end.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert all(name in last for name in ("--dtype", "float8", "float16", "bfloat16", "float32"))


def test_the_demo_refuses_a_folder_before_it_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NANHUNT", raising=False)
    assert cli.main(["demo", "--save", str(tmp_path)]) == 2
    message = f"nanhunt: error: cannot write to {str(tmp_path)!r}: it is a folder; name a file in it\n"
    assert capsys.readouterr() == ("", message)


def test_the_switch_is_obeyed_and_checked_by_the_demo() -> None:
    off = run("demo", env={"NANHUNT": "0"})
    assert (off.returncode, off.stderr) == (0, "")
    assert off.stdout == "nanhunt is switched off by NANHUNT=0: unset it to see the demo\n"
    wrong = run("demo", env={"NANHUNT": "maybe"})
    assert (wrong.returncode, wrong.stdout) == (2, "")
    legal = "use NANHUNT=1 (on, the default) or NANHUNT=0 (off)"
    assert wrong.stderr == f"nanhunt: error: NANHUNT='maybe' is not a legal value: {legal}\n"


# --- no torch ---------------------------------------------------------------------------------------

_LOADED = """
import sys
import nanhunt.cli
try:
    nanhunt.cli.main(sys.argv[1:])
except SystemExit:
    pass
print("torch" in sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["show", "fault"], ["show", "--json", "fault"], []])
def test_only_the_demo_loads_torch(saved: dict[str, str], args: list[str]) -> None:
    ended = python("-c", _LOADED, *[saved.get(arg, arg) for arg in args])
    assert ended.stderr.splitlines()[-1] == "False"


def test_the_check_above_can_fail() -> None:
    assert python("-c", "import torch\n" + _LOADED, "--version").stderr.splitlines()[-1] == "True"


def test_usage_errors_are_not_swallowed_by_library_callers(saved: dict[str, str]) -> None:
    """The command turns them into exit code 2; the functions below it raise."""
    from nanhunt.report.files import read_findings

    with pytest.raises(UsageError):
        read_findings(saved["broken"])
