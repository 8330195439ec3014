"""The launcher: a program under it sees what it sees under python, and what was found is told, whatever happens.

Each test of the first half runs the same program both ways and compares output, errors and exit code.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import nanhunt
from nanhunt import Finding

ROOT = Path(nanhunt.__file__).parent.parent
UNDER = [sys.executable, "-m", "nanhunt"]
# What python alone prints of its own of a module that dies: two frames of runpy.
RUNPY = re.compile(r'  File "<frozen runpy>", line \d+, in \w+\n')


def environment(**more: str) -> dict[str, str]:
    known = {k: v for k, v in os.environ.items() if k not in ("NANHUNT", "FORCE_COLOR", "RANK", "WORLD_SIZE")}
    path = os.pathsep.join(part for part in (str(ROOT), known.get("PYTHONPATH")) if part)
    return {**known, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "100", **more}


def run(
    command: list[str], folder: Path, *, given: str = "", python: list[str] | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*(python or UNDER), *command],
        cwd=folder,
        env=environment(**more),
        input=given,
        capture_output=True,
        text=True,
        timeout=120,
    )


def told(ran: subprocess.CompletedProcess[str]) -> list[str]:
    """What nanhunt itself has said."""
    return re.findall(r"^nanhunt(?: \[\w+\])?: (.*)$", ran.stderr, re.MULTILINE)


def both(command: list[str], folder: Path, *, given: str = "", flags: tuple[str, ...] = ()) -> tuple[str, str, int]:
    """Run a program both ways, hold it to be the same, and return what came of it."""
    seen = []
    for python in ([sys.executable, *flags], [sys.executable, *flags, "-m", "nanhunt"]):
        ran = run(command, folder, given=given, python=python)
        errors = re.sub(r"^nanhunt: .*\n", "", RUNPY.sub("", ran.stderr), flags=re.MULTILINE)
        seen.append((ran.stdout, errors, ran.returncode))
    assert seen[1] == seen[0]
    return seen[0]


# --- the same program, both ways --------------------------------------------------------------------

LOOK = """\
'''Says how the world looks from in here.'''
from __future__ import annotations
import os, sys
mine = {name: value for name, value in globals().items() if name not in ("annotations", "sys", "os")}
print(sorted(mine))
for name, value in sorted(mine.items()):
    print(name, getattr(value, "name", value) if name == "__spec__" else type(value) if name == "__loader__" else value)
print(getattr(__loader__, "name", None), getattr(__loader__, "path", None))
print(sys.argv, sys.path[:3], os.getcwd(), sys.flags, sys._xoptions, sys.warnoptions)
print(sys.modules["__main__"].__dict__ is globals(), sys.stdin.read(), __doc__)
try:
    from . import beside
    print(beside.__name__)
except ImportError as error:
    print(error)
import beside
print(beside.__name__, beside.__file__)
"""


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """One program as a script, a package, a folder, a zip file and a link; a module `beside` it everywhere."""
    package, folder = tmp_path / "pack" / "inner", tmp_path / "folder"
    package.mkdir(parents=True)
    folder.mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("print('imported', __name__)\n")
    for place in (tmp_path, tmp_path / "pack", package, folder):
        (place / "beside.py").write_text("")
    for place in (tmp_path / "look.py", package / "__main__.py", tmp_path / "pack" / "look.py", folder / "__main__.py"):
        place.write_text(LOOK)
    (package / "__init__.py").write_text("")
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as packed:
        packed.writestr("__main__.py", LOOK)
        packed.writestr("beside.py", "")
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "link.py").symlink_to(tmp_path / "look.py")
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        ["look.py", "--detail", "op", "-m", "--", "-x"],
        ["./folder/../look.py"],
        ["away/link.py", "a b"],
        ["-m", "look", "-o", "x"],
        ["-mpack.look"],
        ["-m", "pack.inner", "--help"],
        ["-c", LOOK, "-m", "x"],
        ["-", "a", "-c"],
        ["folder", "a"],
        ["./folder/"],
        ["packed.zip", "a"],
    ],
    ids=lambda command: " ".join(command).replace(LOOK, "CODE"),
)
def test_the_world_looks_the_same_from_inside(world: Path, command: list[str]) -> None:
    """Main module, arguments, paths, loader, relative imports and standard input."""
    out, _, code = both(command, world, given=LOOK if command[0] == "-" else "from outside")
    assert code == 0 and "Says how the world looks" in out
    assert ("from outside" in out) == (command[0] != "-")


def test_the_installed_command_runs_it_the_same(world: Path) -> None:
    """Its own folder stands where imports look first, until the program's takes the place."""
    (world / "bin").mkdir()
    (world / "bin" / "nanhunt").write_text("import sys\nfrom nanhunt.cli import main\nsys.exit(main())\n")
    ways = ([sys.executable], [sys.executable, "bin/nanhunt"])
    one, other = (run(["look.py", "-x"], world, python=python) for python in ways)
    assert (other.stdout, other.returncode) == (one.stdout, 0)
    assert told(other) == ["the program did not import torch, so there was nothing to watch"]


def test_flags_of_the_interpreter_are_kept(world: Path) -> None:
    out, _, _ = both(["look.py"], world, flags=("-X", "nanhunt_test=1", "-W", "error::FutureWarning", "-O"))
    assert "nanhunt_test" in out and "error::FutureWarning" in out
    if sys.version_info >= (3, 11):  # imports look nowhere that was not installed
        for python in ([], ["-m", "nanhunt"]):
            ran = run(["look.py"], world, python=[sys.executable, "-P", *python])
            assert "No module named 'beside'" in ran.stderr


ENDS = {
    "well": ("print('x')", 0),
    "exit none": ("raise SystemExit", 0),
    "exit number": ("import sys; sys.exit(3)", 3),
    "exit true": ("import sys; sys.exit(True)", 1),
    "exit text": ("import sys; sys.exit('no more')", 1),
    "exit in thread": ("import threading, sys; threading.Thread(target=sys.exit, args=(4,)).start()", 0),
    "exit at once": ("import os; os._exit(9)", 9),
    "error": ("def f():\n    return {}['x']\n\nf()", 1),
    "chained": (
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    try:\n        [][1]\n    except IndexError as e:\n"
        "        raise ValueError('x') from e",
        1,
    ),
    "group": ("raise BaseExceptionGroup('many', [ValueError(1), KeyError(2)])", 1),
    "syntax": ("x = 1\nif x\n    pass", 1),
    "encoding": ("# coding: latin-1\nprint('\\xe4')\nraise ValueError('\\xe4')", 1),
    "interrupt": ("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time; time.sleep(5)", -2),
    "terminated": ("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nimport time; time.sleep(5)", -15),
    "hook": ("import sys\nsys.excepthook = lambda *error: print('mine', error[:2], error[2].tb_lineno)\n1 / 0", 1),
    "last": ("import atexit, sys\natexit.register(lambda: print(sys.last_value, sys.excepthook is hook))\n"
             "hook = sys.excepthook\n1 / 0", 1),
    "order": (
        "import atexit, threading, time\natexit.register(print, 'second', flush=True)\n"
        "atexit.register(print, 'first', flush=True)\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread', flush=True))).start()\n"
        "class Last:\n    def __del__(self): print('last')\nlast = Last()\nprint('end', flush=True)",
        0,
    ),
    "pool": ("from concurrent.futures import ThreadPoolExecutor as P\nprint(P(2).submit(int, 3).result())", 0),
    "warning": ("import warnings\nwarnings.warn('w')\nwarnings.warn('d', DeprecationWarning)\n"
                "def f(): warnings.warn('inner', stacklevel=2)\nf()", 0),
    "encodings": ("import sys\nprint(sys.stdout.encoding, sys.stdout.errors, sys.stderr.errors, sys.stdin.errors)", 0),
}  # fmt: skip


@pytest.mark.parametrize("how", ENDS)
def test_a_program_ends_as_it_would(how: str, tmp_path: Path) -> None:
    """Exit code, traceback without a frame of ours, hooks, order of the last things."""
    program, code = ENDS[how]
    if how == "group" and sys.version_info < (3, 11):
        pytest.skip("no exception groups")
    (tmp_path / "end.py").write_bytes(program.encode("latin-1" if how == "encoding" else "utf-8"))
    out, errors, ended = both(["end.py"], tmp_path)
    assert ended == code, errors
    assert "launcher" not in errors and "program.py" not in errors
    if how in ("error", "interrupt"):
        assert both(["-m", "end"], tmp_path)[2] == code
    if how == "pool":
        assert out == "3\n"


MANY = """\
import inspect, multiprocessing, os, pickle, sys

class Kept:
    def __init__(self, n):
        self.n = n

def square(kept):
    name = multiprocessing.current_process().name.split("-")[0]
    return kept.n ** 2, __name__, name, sys.argv, type(kept).__module__, os.getpid() == boss

boss = 0
if __name__ == "__main__":
    boss = os.getpid()
    print(pickle.loads(pickle.dumps(Kept(3))).n, inspect.getsource(Kept.__init__))
    for how in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(how).Pool(1) as pool:
            print(how, pool.map(square, [Kept(2), Kept(5)]))
else:
    print("imported as", __name__, [name for name in sys.modules if name == "torch"], flush=True)
"""


def test_children_import_the_program_and_not_the_launcher(tmp_path: Path) -> None:
    """Spawned and forked ones: `__mp_main__`, arguments, classes of the program that are pickled."""
    (tmp_path / "many.py").write_text(MANY)
    for command in (["many.py", "-x"], ["-m", "many"]):
        out, errors, code = both(command, tmp_path)
        assert (code, errors) == (0, "")
        assert out.count("imported as __mp_main__ []") == 2


HEAVY = """\
import inspect, os, pickle, sys
assert "torch" not in sys.modules
os.environ["OMP_NUM_THREADS"] = "1"
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, n):
        return torch.full((3,), float(n))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)
    def forward(self, x):
        return self.fc(x)

if __name__ == "__main__":
    torch.manual_seed(0)
    print(torch.get_num_threads(), torch.__spec__.loader.__class__, torch.__loader__ is torch.__spec__.loader)
    print(vars(torch.__loader__).keys(), inspect.getsource(Net), len(inspect.getsource(torch)) > 1000)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for how in (None, "spawn"):
        for x in DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context=how):
            loss = model(x).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(loss.item().hex())
    torch.save(model, "model.pt")
    print(pickle.loads(pickle.dumps(model)).fc.weight.tolist(), torch.load("model.pt", weights_only=False))
"""


def test_a_training_is_the_same_bit_for_bit_with_workers_and_what_is_set_before_torch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HEAVY)
    out, errors, code = both(["train.py"], tmp_path)
    assert (code, errors) == (0, "")
    assert out.startswith("1 <class") and "dict_keys(['name', 'path'])" in out


# --- what is found ----------------------------------------------------------------------------------

TRAIN = """\
import os, sys
how = sys.argv[1]
import torch
from torch import nn

class Exp(nn.Module):
    def forward(self, x):
        return x.exp()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), Exp(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
try:
    for step in range(5):
        x = torch.randn(4, 8) * (1e5 if step == 3 and how != "healthy" else 1)
        loss = nn.functional.cross_entropy(model(x), torch.zeros(4, dtype=torch.long))
        if step == 3 and how == "killed":
            os.kill(os.getpid(), 9)
        if step == 3 and how == "dies":
            torch.multinomial(model(x).softmax(-1), 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
except FloatingPointError:
    if how != "swallow":
        raise
if how == "exit":
    sys.exit(5)
os.chdir("/")
print("end")
"""
VERDICT = "1 (Exp) made the first +inf, in forward, step 3"


@pytest.fixture
def train(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def found(path: Path) -> list[Finding]:
    return [Finding.from_dict(one) for one in json.loads(path.read_text())]


def test_a_fault_stops_the_program_with_its_page_once_and_is_written_down(train: Path) -> None:
    ran = run(["-o", "report", "train.py", "fault"], train)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "launcher.py" not in ran.stderr and "runpy" not in ran.stderr
    assert ran.stderr.startswith('Traceback (most recent call last):\n  File "' + str(train / "train.py"))
    assert ran.stderr.count(VERDICT) == 1
    assert told(ran) == [
        "watched 1 model (Sequential), 3 steps",
        f"report: {train / 'report' / 'finding.json'}",
        f"report: {train / 'report' / 'finding.html'}",
    ]
    assert [f.title() for f in found(train / "report" / "finding.json")] == [VERDICT]
    assert "<html" in (train / "report" / "finding.html").read_text()


@pytest.mark.parametrize(
    ("how", "options", "code", "out", "last"),
    [
        ("healthy", [], 0, "end\n", ["watched 1 model (Sequential), 5 steps, nothing found"]),
        ("swallow", [], 1, "end\n", ["watched 1 model (Sequential), 3 steps", VERDICT]),
        ("exit", ["--on-hit", "record"], 5, "", ["watched 1 model (Sequential), 5 steps", VERDICT]),
        ("record", ["--on-hit=record", "-q"], 1, "end\n", []),
        ("killed", ["--on-hit", "record"], -9, "", []),
    ],
)
def test_what_is_told_and_how_the_program_ends(
    train: Path, how: str, options: list[str], code: int, out: str, last: list[str]
) -> None:
    """The exit code is the program's own, and 1 where it would have been 0; the report is there however it ends."""
    ran = run([*options, "-o", "found.json", "train.py", how], train)
    assert (ran.returncode, ran.stdout) == (code, out), ran.stderr
    said = [line for line in told(ran) if "faults were recorded" not in line and "report: " not in line]
    assert said == last
    titles = [f.title() for f in found(train / "found.json")]
    assert titles[:1] == ([VERDICT] if how in ("swallow", "exit", "record", "killed") else [])
    assert not [path.name for path in train.iterdir() if path.name.endswith(".tmp")]


def test_a_program_that_dies_of_the_value_bears_the_page(train: Path) -> None:
    ran = run(["--on-hit", "record", "-o", "found.html", "train.py", "dies"], train)
    assert ran.returncode == 1
    assert "RuntimeError: probability tensor contains" in ran.stderr
    assert ran.stderr.count(VERDICT) == 1
    assert "Exp" in (train / "found.html").read_text()
    assert not (train / "found.json").exists()


def test_switched_off_it_runs_the_program_alone(train: Path) -> None:
    ran = run(["-o", "report", "train.py", "fault"], train, NANHUNT="0")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "end\n", "")
    assert not (train / "report").exists()


def test_a_report_that_cannot_be_written_changes_nothing_but_is_told(train: Path) -> None:
    (train / "report").mkdir()
    (train / "report" / "finding.json").mkdir()
    ran = run(["-o", "report", "--steps", ":3", "train.py", "later"], train)  # the fault comes in step 3
    assert (ran.returncode, ran.stdout) == (0, "end\n")
    assert "nanhunt: error: cannot write the report" in ran.stderr
    assert "watched 1 model (Sequential), 5 steps, nothing found" in told(ran)


def test_a_program_without_torch_is_left_in_peace(tmp_path: Path) -> None:
    ran = run(
        ["-c", "import sys; print(sorted(m for m in sys.modules if m in ('torch', 'numpy', 'tabulate')))"], tmp_path
    )
    assert (ran.returncode, ran.stdout) == (0, "[]\n")
    assert told(ran) == ["the program did not import torch, so there was nothing to watch"]


CHILDREN = """\
import sys
import torch, torch.multiprocessing as mp
from torch import nn

def work(n):
    nn.Linear(4, 2)(torch.full((2, 4), float("nan")))
    print("child", __name__, sys.argv, flush=True)

if __name__ == "__main__":
    model = nn.Linear(4, 2)
    step = torch.compile(lambda x: model(x), backend="eager")
    step(torch.full((2, 4), float("nan")))
    print("parent", flush=True)
    mp.spawn(work, nprocs=1)
"""


def test_children_that_call_models_are_watched_and_what_is_not_watched_is_told(tmp_path: Path) -> None:
    """A spawned child watches its own, and does not run the launcher again; a compiled function runs unwatched."""
    (tmp_path / "many.py").write_text(CHILDREN)
    ran = run(["--on-hit", "record", "-o", "report", "many.py", "a"], tmp_path)
    assert ran.returncode == 1, ran.stderr
    assert ran.stdout == "parent\nchild __mp_main__ ['many.py', 'a']\n"
    names = [path.name for path in (tmp_path / "report").glob("*.json") if ".pid" in path.name]
    assert len(names) == 1
    first = found(tmp_path / "report" / names[0])[0]
    assert (first.phase, first.context["model"]) == ("input", "Linear")
    pid = names[0].removeprefix("finding.pid").removesuffix(".json")
    assert f"nanhunt [pid{pid}]: input already held a nan" in ran.stderr
    assert "not watched: code under torch.compile" in ran.stderr and "ask for --compiled eager to have" in ran.stderr
    path = tmp_path / "report" / names[0]
    assert told(ran)[1:3] == [
        "nothing was watched",
        f"a child process (pid{pid}) found: input already held a nan when the model was called, step 0: {path}",
    ]


OFFSPRING = """\
import multiprocessing, sys, tempfile, os, time

def work(bad):
    import torch
    from torch import nn
    try:
        nn.Linear(4, 2)(torch.full((2, 4), float("nan" if bad else "1")))
    except FloatingPointError:
        if sys.argv[3] == "swallow":
            return
        raise

if __name__ == "__main__":
    os.environ["TMPDIR"] = os.getcwd()
    assert tempfile.gettempdir() == os.getcwd()
    if sys.argv[2] == "torch":
        import torch
    context = multiprocessing.get_context(sys.argv[1])
    children = [context.Process(target=work, args=(bad,)) for bad in (sys.argv[3] != "well", False)]
    for one in children:
        one.start()
    for one in children:
        one.join()
"""


@pytest.mark.parametrize("how", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize(("torch", "end"), [("torch", "raise"), ("none", "swallow"), ("torch", "well")])
def test_a_fault_of_a_child_is_told_by_its_parent_and_decides_the_exit_code(
    tmp_path: Path, how: str, torch: str, end: str
) -> None:
    """Whether the child died of it or went on; the parent itself need not have imported torch."""
    (tmp_path / "many.py").write_text(OFFSPRING)
    (tmp_path / "tmp").mkdir()
    ran = run(["many.py", how, torch, end], tmp_path, TMPDIR=str(tmp_path / "tmp"))
    assert ran.returncode == (0 if end == "well" else 1), ran.stderr
    summary = " ".join(told(ran))
    found = re.findall(r"a child process \(pid\d+\) found: input already held a nan", summary)
    assert len(found) == (end != "well")
    assert "no module was called, so nothing was watched" not in summary
    if torch == "torch":
        assert "no module was called in this process, so nothing was watched" in summary
    assert ("did not import torch" in summary) is False
    assert list((tmp_path / "tmp").glob("nanhunt-*")) == []


BRIEF = """\
import torch
from torch import nn
for _ in range(40):
    nn.Softmax(-1)(torch.ones(2))
nn.Linear(2, 2)(torch.ones(2))
"""


def test_nothing_found_is_said_of_what_was_watched_alone(tmp_path: Path) -> None:
    ran = run(["-o", "page.html", "-c", BRIEF], tmp_path)
    assert told(ran)[0] == "watched 17 models (Softmax, Linear), 17 calls, nothing found in what was watched"
    assert told(ran)[1].startswith("not watched: Softmax: made anew again and again: 16 were watched")
    page = (tmp_path / "page.html").read_text()
    assert "No finding" in page and "nothing found in what was watched" in page and "not watched: Softmax" in page


def test_the_page_of_a_healthy_run_says_what_was_run_and_watched(train: Path) -> None:
    run(["-o", "page.html", "train.py", "healthy"], train)
    page = (train / "page.html").read_text()
    for said in ("python -m nanhunt train.py healthy", "watched 1 model (Sequential), 5 steps, nothing found"):
        assert said in page


RANKS = """\
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    x = torch.randn(2, 4)
    if step == 2 and dist.get_rank() == 1:
        x[0, 0] = float("nan")
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def test_each_rank_of_torchrun_writes_its_own_report(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "nanhunt"]
    ran = run(["--on-hit", "record", "-o", "out", "ranks.py"], tmp_path, python=torchrun)
    assert ran.returncode == 1
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [f"finding.rank{rank}.{kind}" for rank in (0, 1) for kind in ("html", "json")]
    first = found(tmp_path / "out" / "finding.rank1.json")[0]
    assert (first.phase, first.step, first.rank) == ("input", 2, 1)
    assert "nanhunt [rank1]: watched 1 model (DistributedDataParallel), 3 steps" in ran.stderr


def test_accelerate_launches_it_as_a_module(train: Path) -> None:
    pytest.importorskip("accelerate")
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "-m", "nanhunt"]
    ran = run(["train.py", "healthy"], train, python=accelerate)
    assert (ran.returncode, ran.stdout) == (0, "end\n"), ran.stderr
    assert "watched 1 model (Sequential), 5 steps, nothing found" in told(ran)
