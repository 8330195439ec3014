"""`nanhunt log`: exit codes, what it prints and writes, and the bar of a long reading."""

from __future__ import annotations

import io
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from nanhunt import cli
from nanhunt.logs import reading
from nanhunt.report import course_text
from nanhunt.report.progress import Bar
from nanhunt.symptoms.course import Course
from nanhunt.symptoms.steps import SYMPTOMS

from . import test_html
from .courses import method, sick
from .test_cli import CALIBRATION, ROOT, run

METHOD = """\
step 1200 | loss 2.31 | grad_norm 0.87 | loss_scale 65536.0
step 1201 | loss 3.02 | grad_norm 1.24 | loss_scale 65536.0
step 1202 | loss nan | grad_norm nan | loss_scale 32768.0
step 1203 | loss nan | grad_norm nan | loss_scale 16384.0
"""
HEALTHY = "".join(f"step {n} | loss {2 + 3 / (n + 1):.4f} | grad_norm {0.8 + n % 3 / 50:.3f}\n" for n in range(60))
NEEDED = {"first_bad_step", "symptom", "cause", "advice", "evidence", "format", "file"}


@pytest.fixture
def logs(tmp_path: pathlib.Path) -> dict[str, str]:
    """A log with a NaN, a healthy one, and files that are none."""
    texts = {
        "bad.log": METHOD.encode(),
        "fine.log": HEALTHY.encode(),
        "prose.txt": b"nothing here is a step of a run\n" * 3,
        "binary.bin": bytes(range(256)) * 40,
        "empty.log": b"",
    }
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    return {name.partition(".")[0]: str(tmp_path / name) for name in texts}


def strict(text: str) -> list[dict[str, object]]:
    """JSON as the standard has it, which knows no NaN."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    read = json.loads(text, parse_constant=refuse)
    assert isinstance(read, list)
    return read


# --- what it says -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "code"),
    [
        (["fine"], 0),
        (["bad"], 1),
        (["fine", "fine"], 0),
        (["fine", "bad"], 1),
        (["prose"], 2),
        (["empty"], 2),
        (["binary"], 2),
        (["fine", "prose"], 2),
        (["bad", "prose"], 1),
    ],
)
def test_the_exit_code_says_whether_a_symptom_was_found(
    logs: dict[str, str], capsys: pytest.CaptureFixture[str], files: list[str], code: int
) -> None:
    paths = [logs[name] for name in files]
    assert cli.main(["log", *paths]) == code
    assert cli.main(["log", "--json", *paths]) == code
    said = capsys.readouterr()
    assert ("was understood as a step" in said.err) is (code == 2)


def test_it_prints_the_page_of_one_log(logs: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["log", logs["bad"]]) == 1
    printed = capsys.readouterr().out
    assert printed == f"{reading.read_log(logs['bad'])}\n"
    first = " ".join(printed.split("\n\n")[0].split())
    assert re.search(r"bad\.log ?: nan_inf from step 1202 on \(\w+\)", first)  # a long path is broken off


def test_it_prints_all_verdicts_and_then_the_pages_of_several(
    logs: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["log", logs["fine"], logs["bad"]])
    printed = capsys.readouterr().out
    assert printed.startswith("2 runs, 1 with a symptom\n")
    assert "\n1 of 2\n\n" in printed and "\n2 of 2\n\n" in printed


def test_json_is_one_strict_list_with_an_object_for_each_file(
    logs: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["log", "--json", logs["bad"], logs["fine"]])
    bad, fine = strict(capsys.readouterr().out)
    assert set(bad) >= NEEDED and set(fine) >= NEEDED
    assert (bad["file"], fine["file"]) == (logs["bad"], logs["fine"])
    assert (bad["symptom"], bad["first_bad_step"]) == ("nan_inf", 1202)
    assert (fine["symptom"], fine["first_bad_step"]) == ("none", None)
    assert Course.from_dict(bad).symptom == "nan_inf"


def test_files_that_are_ranks_make_one_run(
    tmp_path: pathlib.Path, logs: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for rank in range(3):
        files.append(str(tmp_path / f"rank{rank}.log"))
        pathlib.Path(files[-1]).write_text(METHOD)
    assert cli.main(["log", "--ranks", "--json", *files]) == 1
    (one,) = strict(capsys.readouterr().out)
    assert (one["ranks"], one["symptom"], one["first_bad_step"]) == (3, "nan_inf", 1202)
    assert one["file"] == ", ".join(files)


def test_html_is_written_beside_the_first_file(logs: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["log", "--html", logs["bad"], logs["fine"]]) == 1
    path = pathlib.Path(logs["bad"]).with_suffix(".html")
    assert capsys.readouterr().out == f"written to {path}\n"
    assert path.read_text(encoding="utf-8").count("<article") == 2


@pytest.mark.parametrize("form", [[], ["--json"], ["--html"]])
def test_it_writes_to_a_file_of_any_name(
    logs: dict[str, str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], form: list[str]
) -> None:
    out = tmp_path / "new" / "out"
    assert cli.main(["log", *form, "-o", str(out), logs["bad"]]) == 1
    assert capsys.readouterr().out == f"written to {out}\n"
    text = out.read_text(encoding="utf-8")
    assert "nan_inf" in text and "\x1b" not in text
    assert form or "\u2800" < max(text) < "\u2900", "a file has braille whatever the terminal can show"


def test_standard_input_is_read_as_a_log() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nanhunt", "log", "--json", "-"],
        input=METHOD,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    (one,) = strict(done.stdout)
    assert (one["file"], one["first_bad_step"]) == ("-", 1202)


def test_a_terminal_without_braille_gets_ascii(logs: dict[str, str]) -> None:
    shown = run("log", logs["bad"], env={"PYTHONIOENCODING": "ascii"})
    assert shown.returncode == 1 and shown.stdout.isascii()
    assert re.search(r"nan/inf \| +x+", shown.stdout) and "\\u" not in shown.stdout


def test_it_needs_no_torch(logs: dict[str, str]) -> None:
    for form in ([], ["--json"], ["--html"]):
        code = f"import sys; from nanhunt import cli; cli.main(['log', *{form!r}, {logs['bad']!r}]); "
        code += "sys.exit('torch' in sys.modules)"
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        assert subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=False).returncode == 0


# --- wrong usage --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "the following arguments are required: FILE"),
        (["--json", "--html", "x"], "argument --html: not allowed with argument --json"),
        (["--rank", "x"], "unrecognized arguments: --rank"),
    ],
)
def test_wrong_usage_is_told(capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["log", *args])
    assert ended.value.code == 2
    assert f"nanhunt log: error: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["{tmp}/nowhere.log"], "nowhere.log"),
        (["{bad}", "{tmp}/nowhere.log"], "nowhere.log"),
        (["{bad}", "-o", "{bad}"], "is read and would be written: name another file with -o"),
        (["{bad}", "-o", "{tmp}"], "it is a folder; name a file in it"),
        (["{bad}", "-o", "{bad}/x"], "cannot write"),
        (["--html", "-"], "a page of what is read from standard input needs a name: add -o OUT"),
        (["-", "-"], "standard input (-) can be read only once"),
    ],
)
def test_what_cannot_be_read_or_written_is_told_in_one_line(
    logs: dict[str, str],
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    message: str,
) -> None:
    assert cli.main(["log", *(arg.format(tmp=tmp_path, **logs) for arg in args)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("nanhunt: error: ") and said.err.count("\n") == 1
    assert message in said.err
    assert pathlib.Path(logs["bad"]).read_text() == METHOD


def test_a_closed_pipe_is_no_crash(logs: dict[str, str]) -> None:
    code = (
        "import subprocess, sys\n"
        f"log = subprocess.Popen([sys.executable, '-m', 'nanhunt', 'log', *[{logs['bad']!r}] * 60],"
        " stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)\n"
        "log.stdout.readline(); log.stdout.close(); print(repr(log.stderr.read()), log.wait())\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "'' 1\n", done.stderr


def test_the_help_says_what_is_read_and_what_the_exit_code_means() -> None:
    shown = run("log", "--help").stdout
    for word in (
        "--ranks",
        "--json",
        "--html",
        "TensorBoard",
        "DeepSpeed",
        "exit code: 0 when no file shows a symptom",
    ):
        assert word in shown
    assert max(map(len, shown.splitlines())) <= 110
    assert "nanhunt log [--json | --html]" in run("--help").stdout


# --- the bar ------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands until it is set."""
    now = [0.0]
    monkeypatch.setattr("nanhunt.report.progress.time.monotonic", lambda: now[0])
    monkeypatch.setenv("COLUMNS", "80")
    return now


def test_a_bar_shows_on_a_terminal_when_reading_takes_long(clock: list[float]) -> None:
    terminal = Terminal()
    with Bar("a\x1b.log", terminal) as bar:
        for done in range(5):
            bar(done, 4_000_000_000)
        assert terminal.getvalue() == "", "half a second has not gone by"
        clock[0] = 10.0
        bar(1_000_000_000, 4_000_000_000)
        bar(1_100_000_000, 4_000_000_000)
        shown = terminal.getvalue().split("\r")[1:]
        assert len(shown) == 1, "no faster than ten times a second"
        assert shown[0].startswith("a\\x1b.log [######  ") and len(shown[0]) == 79
        assert " 25%  1 000 MB of 4 000 MB, 30 s left" in shown[0]
        clock[0] = 11.0
        bar(5_000_000, None)
        assert terminal.getvalue().split("\r")[2].strip() == "a\\x1b.log 5 MB"
    assert terminal.getvalue().endswith("\r" + " " * 79 + "\r"), "the line is left empty"


def test_a_bar_is_silent_where_nobody_looks(clock: list[float]) -> None:
    stream = io.StringIO()
    with Bar("train.log", stream) as bar:
        clock[0] = 10.0
        bar(1, 2)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("done", "total"), [(0, 0), (9, 3), (0, 5), (-1, 5), (10**15, 10**15)])
def test_odd_numbers_of_bytes_are_no_trouble(clock: list[float], done: int, total: int) -> None:
    terminal = Terminal()
    with Bar("宽" * 200, terminal) as bar:
        clock[0] = 10.0
        bar(done, total)
    assert terminal.getvalue().count("\r") == 3


def test_a_terminal_that_goes_away_ends_the_bar_and_not_the_reading(clock: list[float]) -> None:
    terminal = Terminal()
    bar = Bar("a", terminal)
    terminal.close()
    clock[0] = 10.0
    bar(1, 2)


# --- show ---------------------------------------------------------------------------------------------------


def test_show_prints_a_saved_course_again(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "one.json"
    file.write_text(method().to_json())
    assert cli.main(["show", str(file)]) == 1
    assert capsys.readouterr().out == f"{method()}\n"
    assert cli.main(["show", "--html", str(file)]) == 1
    assert "nan_inf from step 1202 on" in (tmp_path / "one.html").read_text(encoding="utf-8")


def test_show_reads_what_log_has_written(
    logs: dict[str, str], tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = str(tmp_path / "saved.json")
    cli.main(["log", "--json", "-o", saved, logs["bad"], logs["fine"]])
    capsys.readouterr()
    assert cli.main(["show", "--json", saved]) == 1
    assert [one["symptom"] for one in strict(capsys.readouterr().out)] == ["nan_inf", "none"]


def test_show_takes_findings_and_courses_together_but_on_one_page(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "both.json"
    file.write_text(json.dumps([CALIBRATION.to_dict(), *(sick(name).to_dict() for name in SYMPTOMS)]))
    assert cli.main(["show", str(file)]) == 1
    assert "6 of 6: " in capsys.readouterr().out
    assert cli.main(["show", "--html", str(file)]) == 2
    assert "are pages of two kinds: show them one after another" in capsys.readouterr().err


def test_show_sends_the_record_of_a_run_to_log(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a run.jsonl"
    file.write_text('{"nanhunt_steps": 1}\n{"step": 0, "loss": 2.5}\n')
    assert cli.main(["show", str(file)]) == 2
    assert f"is the record of a run, not a finding: nanhunt log '{file}'" in capsys.readouterr().err
    broken = tmp_path / "broken.json"
    broken.write_text('{"nanhunt_course": 1, "symptoms": 3}')
    assert cli.main(["show", str(broken)]) == 2
    assert "not a course that this version of nanhunt wrote" in capsys.readouterr().err


# --- real logs ----------------------------------------------------------------------------------------------

REAL = sorted((ROOT.parent / "shared" / "cases" / "logs").glob("*.log"))


@pytest.mark.skipif(not REAL, reason="the graded logs (../shared/cases) are not beside this checkout")
@pytest.mark.parametrize("log", REAL, ids=lambda log: log.stem)
def test_a_real_log_has_its_pages(log: pathlib.Path, tmp_path: pathlib.Path) -> None:
    out = tmp_path / "page.html"
    assert cli.main(["log", "--html", "-o", str(out), str(log)]) == 1
    test_html.read(out.read_text(encoding="utf-8"))
    read = Course.from_dict(json.loads(reading.read_log(log).to_json()))
    said = course_text.page(read, color=False, width=80, braille=True)
    assert "Curves" in said and max(map(len, said.split("\n"))) <= 80
