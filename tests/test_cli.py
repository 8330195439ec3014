"""The command line: exit codes, what it prints, and that showing a finding needs no torch."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nanhunt import Finding, TensorStats, UsageError, __version__, arguments, cli

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


def test_show_html_writes_one_page_beside_the_first_file(
    saved: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["show", "--html", saved["lines"], saved["fault"]]) == 1
    path = Path(saved["lines"]).with_suffix(".html")
    assert capsys.readouterr().out == f"written to {path}\n"
    assert path.read_text(encoding="utf-8").count("encoder.layer.2") >= 2


@pytest.mark.parametrize("form", [[], ["--json"], ["--html"]])
def test_show_writes_to_a_file_of_any_name(
    saved: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], form: list[str]
) -> None:
    out = tmp_path / "new" / "out"
    assert cli.main(["show", *form, "-o", str(out), saved["fault"]]) == 1
    assert capsys.readouterr().out == f"written to {out}\n"
    assert "encoder.layer.2" in out.read_text(encoding="utf-8")


def test_show_does_not_write_over_what_it_reads(saved: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Nor over a folder."""
    for form in ([], ["--json"], ["--html"]):
        assert cli.main(["show", *form, "-o", saved["fault"], saved["fault"]]) == 2
        assert "is read and would be written: name another file with -o" in capsys.readouterr().err
    assert cli.main(["show", "-o", str(Path(saved["fault"]).parent), saved["fault"]]) == 2
    assert "it is a folder" in capsys.readouterr().err


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
    message = f"nanhunt: error: {str(tmp_path)!r} is a folder without a .json file in it: name a file of findings\n"
    assert capsys.readouterr().err == message


def test_show_reads_a_folder_of_reports_a_byte_order_mark_and_standard_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a folder the files that the launcher writes, and where there are none, all JSON of it."""
    text = FAULT.to_json()
    for name in ("finding.json", "finding.rank1.json"):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
    (tmp_path / "other.json").write_text("{}")
    assert cli.main(["show", "--json", str(tmp_path)]) == 1
    assert len(json.loads(capsys.readouterr().out)) == 2
    for name in ("finding.json", "finding.rank1.json"):
        (tmp_path / name).unlink()
    (tmp_path / "other.json").write_text(text)
    assert cli.main(["show", str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"{FAULT}\n"
    for args, code in (([], 1), (["--html"], 2), (["--html", "-o", str(tmp_path / "page.html")], 1)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        assert cli.main(["show", *args, "-"]) == code
    assert "needs a name: add -o OUT" in capsys.readouterr().err
    assert (tmp_path / "page.html").is_file()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no such device here")
def test_show_onto_a_full_device_is_an_error_without_a_traceback(saved: dict[str, str]) -> None:
    for form in ("", "--json "):
        ran = python("-c", f"import os; os._exit(os.system({sys.executable + ' -m nanhunt show ' + form!r} + "
                     f"{saved['fault'] + ' > /dev/full'!r}) >> 8)")  # fmt: skip
        assert (ran.returncode, ran.stdout) == (2, "")
        assert ran.stderr == "nanhunt: error: cannot write to standard output: No space left on device\n"


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
    for line in ("import nanhunt", "with nanhunt.watch(model):", "NANHUNT=0", "python -m nanhunt demo", "torchrun"):
        assert line in shown.stdout
    for command in cli.COMMANDS:
        assert f"\n       nanhunt {command} " in shown.stdout and f"\n  python -m nanhunt {command}" in shown.stdout
    for option in (
        "--detail",
        "--on-hit",
        "--stop",
        "--steps",
        "--every",
        "--kinds",
        "--allow",
        "--compiled",
        "--report",
    ):
        assert f"  {option}" in shown.stdout or f", {option}" in shown.stdout
    assert "exit code: 0 when no file holds a fault, 1 when one does, 2" in run("show", "--help").stdout
    assert "nothing is planted" in run("demo", "--help").stdout.lower()
    for page in (shown.stdout, run("show", "--help").stdout, run("demo", "--help").stdout):
        assert max(len(line) for line in page.splitlines()) <= 110


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["show"], "nanhunt show: error: the following arguments are required: FILE"),
        (["show", "--jso", "x"], "nanhunt show: error: unrecognized arguments: --jso"),
        (["show", "--json", "--html", "x"], "nanhunt show: error: argument --html: not allowed with argument --json"),
        (["--verbose", "show", "x"], "nanhunt: error: options of show come after the word: nanhunt show --help"),
        (["--verbose", "train.py"], "nanhunt: error: unrecognized arguments: --verbose"),
        (["--verbose", "3", "train.py"], "nanhunt: error: unrecognized arguments: --verbose"),
        (["--det", "op", "train.py"], "nanhunt: error: unrecognized arguments: --det"),
        (["-q"], "nanhunt: error: name a program to run: a script, -m module or -c code (python -m nanhunt --help)"),
        (["--detail"], "nanhunt: error: argument --detail: expected one argument"),
        (["-q", "-m"], "nanhunt: error: argument -m: expected one argument"),
        (["demo", "now"], "nanhunt demo: error: unrecognized arguments: now"),
        (["demo", "--save"], "nanhunt demo: error: argument --save: expected one argument"),
        (
            ["--steps", "7", "x.py"],
            "nanhunt: error: argument --steps: '7': give A:B with 0 <= A < B, such as 100:200, 100: or :200",
        ),
        (
            ["--steps=5:5", "x.py"],
            "nanhunt: error: argument --steps: '5:5': give A:B with 0 <= A < B, such as 100:200, 100: or :200",
        ),
        (
            ["--every", "0", "x.py"],
            "nanhunt: error: argument --every: '0': give a whole number of steps, 1 or more",
        ),
        (
            ["--kinds", "-inf,inf", "x.py"],
            "nanhunt: error: argument --kinds: 'inf' is not known: use one or more of nan,+inf,-inf",
        ),
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


# --- running a program ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["gone.py"], r"can't open file '.*gone\.py': \[Errno 2\] No such file or directory"),
        (["-m", "nanhunt_gone.x"], r"No module named nanhunt_gone\.x .*"),
        (["-m", "nanhunt.report"], r"No module named nanhunt\.report\.__main__; 'nanhunt\.report' is a package .*"),
        (["{folder}"], r"can't find '__main__' module in '.*'"),
        (["-o", "{folder}/a.txt", "x.py"], r"cannot write a report to '.*a\.txt': name a file that ends in \.json .*"),
        (
            ["-o", "{folder}/new.txt", "x.py"],
            r"cannot write a report to '.*new\.txt': .* or a folder, which gets both .*",
        ),
        (["-o", "{folder}/a.txt/x", "x.py"], r"cannot write into '.*x': Not a directory"),
        (["-o", "{folder}/a.txt/x.json", "x.py"], r"cannot write into '.*a\.txt': it is a file, name a folder"),
        (["-o", "/proc/nanhunt", "x.py"], r"cannot write into '/proc/nanhunt': No such file or directory"),
    ],
)
def test_what_cannot_be_run_is_refused_with_2(tmp_path: Path, args: list[str], message: str) -> None:
    (tmp_path / "a.txt").write_text("")
    if "/proc/nanhunt" in args and not os.path.isdir("/proc/1"):
        pytest.skip("no such folder here")
    ran = run(*[arg.replace("{folder}", str(tmp_path)) for arg in args])
    assert (ran.returncode, ran.stdout) == (2, "")
    assert re.fullmatch(f"nanhunt: error: {message}\n", ran.stderr)


@pytest.mark.parametrize("name", ["new", "new.d/", "old.d", "found.json"])
def test_where_a_report_goes(tmp_path: Path, name: str) -> None:
    """A folder without a suffix, with a separator, or one that is there; an old file stands until a run has ended."""
    (tmp_path / "old.d").mkdir()
    (tmp_path / "found.json").write_text("old")
    code = f"print(open({str(tmp_path / 'found.json')!r}).read()); import torch"
    ran = run("-q", "-o", f"{tmp_path}/{name}", "-c", code)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "old\n", "")
    file = tmp_path / name if name == "found.json" else tmp_path / name / "finding.json"
    assert json.loads(file.read_text()) == []


@pytest.mark.parametrize("kind", ["html", "json"])
def test_the_suffix_decides_what_the_demo_saves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from nanhunt import demo

    monkeypatch.delenv("NANHUNT", raising=False)
    monkeypatch.setattr(demo, "run", lambda **options: FAULT)
    path = tmp_path / f"d.{kind}"
    assert cli.main(["demo", "--save", str(path)]) == 0
    assert capsys.readouterr().out == f"saved in {path}\n"
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>") if kind == "html" else Finding.from_json(text) == FAULT


def test_a_word_of_ours_wins_over_a_script_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "show").write_text("print('a script')")
    monkeypatch.chdir(tmp_path)
    assert "required: FILE" in run("show").stderr
    assert run("./show").stdout == run("--", "show").stdout == "a script\n"


@pytest.mark.parametrize(
    ("given", "ours", "how", "what", "args"),
    [
        (["t.py", "-m", "x"], [], "script", "t.py", ("-m", "x")),
        (["-q", "--steps", "1:2", "-m", "x", "-q"], ["-q", "--steps=1:2"], "module", "x", ("-q",)),
        (["-mx.y", "a"], [], "module", "x.y", ("a",)),
        (["-o", "out", "-c", "pass"], ["-oout"], "code", "pass", ()),
        (["-qo", "out", "t.py"], ["-q", "-oout"], "script", "t.py", ()),
        (["-qoout", "t.py"], ["-qoout"], "script", "t.py", ()),
        (["-qq", "t.py"], ["-qq"], "script", "t.py", ()),
        (["--kinds", "-inf", "-", "-"], ["--kinds=-inf"], "script", "-", ("-",)),
        (["--detail=op", "--", "-odd.py", "--"], ["--detail=op"], "script", "-odd.py", ("--",)),
    ],
)
def test_what_stands_after_the_program_is_its_own(
    given: list[str], ours: list[str], how: str, what: str, args: tuple[str, ...]
) -> None:
    split, program = arguments.split(given, arguments.parser())
    assert program is not None
    assert (split, program.how, program.what, program.args) == (ours, how, what, args)


def test_options_of_the_launcher_are_those_of_watch_with_its_defaults() -> None:
    """A new option of `nanhunt.watch`, or a changed default, must not be forgotten here."""
    from nanhunt import roots

    seen: dict[str, object] = {}

    class Launch:
        def __init__(self, *, options: dict[str, object], report: str | None, quiet: bool) -> None:
            seen.update(options)

        def run(self, program: object) -> int:
            return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "Launch", Launch)
        assert cli.main(["x.py"]) == 0
        assert seen == roots._DEFAULTS
        cli.main(["--allow", "a.*", "--allow=b", "--steps", "3:", "--every=2", "--compiled", "eager", "x.py"])
    changed = {"allow": ("a.*", "b"), "steps": (3, sys.maxsize), "every": 2, "compiled": "eager"}
    assert seen == roots._DEFAULTS | changed
    roots.Roots(**seen)


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


@pytest.mark.parametrize(
    "args",
    [["--help"], ["--version"], ["show", "fault"], ["show", "--json", "fault"], ["show", "--html", "fault"], []],
)
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
