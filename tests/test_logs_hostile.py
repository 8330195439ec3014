"""No file makes the reading of logs crash, hang or grow: any bytes, broken logs, endless lines."""

from __future__ import annotations

import gzip
import json
import math
import pathlib
import random
import subprocess
import sys
import tempfile
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanhunt.errors import UsageError
from nanhunt.logs.reader import Reader
from nanhunt.logs.reading import read_log, read_ranks
from nanhunt.logs.source import LONGEST
from nanhunt.symptoms.steps import Step

from .log_writer import FORMATS, example

RELAXED = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
WRITTEN = {name: form.write(example(12, bad=True)).encode() for name, form in FORMATS.items()}
WORDS = (
    "step loss nan inf grad_norm lr epoch val_loss loss_scale overflow Skipping reducing to iter iteration | : = , { } "
    "[ ] ( ) / % %| it/s tensor( ' \" 1 2.5 -3e-5 1,234.5 1e999 9999999999999999999999 0x1f -nan 1.#QNAN \r \b \t "
    "\x1b[31m \0 é 日 rank3 [rank1]: Epoch: [0][1/2] train valid None Infinity FloatingPointError hysteresis attempted"
).split(" ")


def steps_of(path: pathlib.Path) -> list[Step]:
    steps = list(Reader(str(path), [str(path)]).steps())
    for step in steps:
        assert step.step is None or isinstance(step.step, int)
        assert step.loss is None or isinstance(step.loss, float)
        assert all(isinstance(v, float) for v in (*step.lr, *step.losses.values(), *step.metrics.values()))
    return steps


def read_bytes(data: bytes, suffix: str = ".log") -> list[Step]:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / f"run{suffix}"
        path.write_bytes(data)
        try:
            return steps_of(path)
        except UsageError:
            return []  # a kind of file that is refused by its first bytes


@RELAXED
@given(st.binary(max_size=2000))
def test_any_bytes_are_read_without_a_crash(data: bytes) -> None:
    read_bytes(data)


@RELAXED
@given(st.text(max_size=1500))
def test_any_text_is_read_without_a_crash(text: str) -> None:
    read_bytes(text.encode("utf-8", "surrogatepass"))


@RELAXED
@given(st.lists(st.lists(st.sampled_from(WORDS), max_size=20), max_size=25), st.sampled_from([" ", "", ", ", "|"]))
def test_any_heap_of_telling_words_is_read_without_a_crash(lines: list[list[str]], join: str) -> None:
    read_bytes("\n".join(join.join(line) for line in lines).encode())


@RELAXED
@given(st.sampled_from(sorted(WRITTEN)), st.data())
def test_a_log_with_mutated_bytes_is_read_without_a_crash(name: str, data: st.DataObject) -> None:
    log = bytearray(WRITTEN[name])
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(log) - 1))
        what = data.draw(st.sampled_from(["set", "cut", "twice", "insert"]))
        if what == "set":
            log[at] = data.draw(st.integers(0, 255))
        elif what == "cut":
            del log[at : at + data.draw(st.integers(1, 200))]
        elif what == "twice":
            log[at:at] = log[at : at + data.draw(st.integers(1, 200))]
        else:
            log[at:at] = data.draw(st.sampled_from(WORDS)).encode()
        if not log:
            return
    read_bytes(bytes(log), FORMATS[name].suffix)


KEYS = st.sampled_from(["loss", "step", "a", "train", "log_history", "nanhunt_steps", "lr"])
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=30,
)


@RELAXED
@given(JSON, st.booleans())
def test_any_json_is_read_without_a_crash(value: object, indented: bool) -> None:
    read_bytes(json.dumps(value, indent=2 if indented else None).encode(), ".json")


@pytest.mark.parametrize("name", FORMATS)
def test_a_log_cut_anywhere_gives_the_records_before_the_cut(name: str) -> None:
    form = FORMATS[name]
    whole = read_bytes(WRITTEN[name], form.suffix)
    at = len(WRITTEN[name]) * 2 // 3
    cut = read_bytes(WRITTEN[name][:at], form.suffix)
    if form.suffix == ".json" and name == "history":
        assert len(cut) >= 5
    agree = [a.step == b.step and (a.loss == b.loss or a.loss != a.loss) for a, b in zip(whole, cut)]
    assert len(cut) >= len(whole) // 2 and all(agree[:-2])


# ---- files


def test_an_empty_file_says_so(tmp_path: pathlib.Path) -> None:
    (tmp_path / "run.log").write_bytes(b"")
    course = read_log(tmp_path / "run.log")
    assert (course.records, course.symptom) == (0, "none")
    assert "The file is empty." in course.remarks


def test_a_file_without_numbers_says_so(tmp_path: pathlib.Path) -> None:
    (tmp_path / "run.log").write_text("hello\nthis is prose about a loss\n")
    course = read_log(tmp_path / "run.log")
    assert course.records == 0 and any("there are no numbers in it" in remark for remark in course.remarks)


def test_numbers_that_are_no_log_say_so(tmp_path: pathlib.Path) -> None:
    (tmp_path / "run.log").write_text("1 2 3\n4 5 6\n")
    course = read_log(tmp_path / "run.log")
    assert course.records == 0 and any("No step was read" in remark for remark in course.remarks)


def test_a_missing_file_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match=r"run\.log: no such file"):
        read_log(tmp_path / "run.log")


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (b"PK\x03\x04rest", "a zip archive"),
        (b"\x28\xb5\x2f\xfdrest", "unpack it first"),
        (b"PAR1rest", "export it as CSV"),
    ],
)
def test_a_file_of_another_kind_is_refused_with_what_to_do(start: bytes, words: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "run.log").write_bytes(start)
    with pytest.raises(UsageError, match=words):
        read_log(tmp_path / "run.log")


def test_one_missing_file_of_several_ranks_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "rank0.log").write_text("step 1 loss 2.0\n")
    with pytest.raises(UsageError, match="no such file"):
        read_ranks([tmp_path / "rank0.log", tmp_path / "rank1.log"])


def test_a_packed_file_that_breaks_off_gives_what_it_has(tmp_path: pathlib.Path) -> None:
    lines = "".join(f"step {i} loss {random.Random(i).random():.17f}\n" for i in range(40000))
    packed = gzip.compress(lines.encode())
    path = tmp_path / "run.log.gz"
    path.write_bytes(packed[: len(packed) * 3 // 4])
    course = read_log(path)
    assert 10000 < course.records < 40000
    assert any("breaks off" in remark for remark in course.remarks)


def test_binary_lines_are_left_out_and_counted(tmp_path: pathlib.Path) -> None:
    noise = bytes(range(128, 256)).replace(b"\n", b"")
    (tmp_path / "run.log").write_bytes(
        b"step 1 loss 2.0\n" + noise + b"\nstep 2 lo\0ss 1.5\n" + noise + b"\nstep 3 loss 1.25\n"
    )
    course = read_log(tmp_path / "run.log")
    assert course.records == 3 and course.lines == 5
    assert "2 lines hold no text and were left out." in course.remarks


@pytest.mark.parametrize(
    "filling", ["x", "1 ", "loss=", "[", "(", "a b ", "9,", '{"', "\r", "|", "%|", " -", "e1.", "nan "]
)
def test_a_line_of_megabytes_is_cut_and_quick(filling: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run.log"
    endless = filling * (3 * LONGEST // len(filling))
    path.write_text(f"step 1 loss 2.0\nstep 2 loss 1.5 {endless}\nstep 3 loss 1.25\n", newline="")
    began = time.process_time()
    steps = steps_of(path)
    assert time.process_time() - began < 20
    assert [s.loss for s in steps if s.step == 1] == [2.0] and [s.loss for s in steps if s.step == 3] == [1.25]


def test_numbers_beyond_any_are_read_as_what_they_are(tmp_path: pathlib.Path) -> None:
    (tmp_path / "run.log").write_text(
        f"step 1 loss 1e999\nstep {'9' * 400} loss 2.0\nstep nan loss 1.0\nstep 1e300 loss 0.5\n"
    )
    steps = steps_of(tmp_path / "run.log")
    assert math.isinf(steps[0].loss or 0.0) and all(s.step is None or abs(s.step) < 2**53 for s in steps)


def test_a_deeply_nested_object_is_no_crash(tmp_path: pathlib.Path) -> None:
    (tmp_path / "run.jsonl").write_text('{"loss": 2.0}\n' + '{"a":' * 50000 + "1" + "}" * 50000 + '\n{"loss": 1.5}\n')
    assert [s.loss for s in steps_of(tmp_path / "run.jsonl")] == [2.0, 1.5]


@pytest.mark.parametrize("kind", ["lines", "document", "one line"])
def test_memory_does_not_grow_with_the_file(kind: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run.json"
    record = '{{"step": {}, "loss": 2.5, "grad_norm": 0.5, "words": "' + "x" * 400 + '"}}'
    join, head, tail = {
        "lines": ("\n", "", "\n"),
        "document": (",\n", '{"log_history": [\n', "]}"),
        "one line": (", ", '{"log_history": [', "]}"),
    }[kind]
    with path.open("w") as out:
        out.write(head)
        out.write(join.join(record.format(i) for i in range(60000)))  # 27 MB
        out.write(tail)
    program = (
        "import resource, sys\n"
        "from nanhunt.logs.reader import Reader\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "count = sum(1 for _ in Reader(sys.argv[1], [sys.argv[1]]).steps())\n"
        "print(count, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    count, grown = map(int, done.stdout.split())
    assert count == 60000 and grown < 20
