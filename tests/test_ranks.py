"""Ranks that train together: they stop together, agree on one verdict, and nobody waits for ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nanhunt import ranks

from .rankwise import GUILTY, ROOT, Ranks, needs_gloo
from .test_cases import CASES

PATIENT = 5.0  # seconds that a rank waits for the words of others; tidings.PATIENCE


@pytest.fixture(autouse=True)
def _gloo() -> None:
    needs_gloo()


def test_a_rank_that_stops_brings_the_others_down_with_the_same_verdict(tmp_path: Path) -> None:
    """Rank 0 is in the all-reduce of a step that rank 1 has left: it comes out within seconds, and says why."""
    job = Ranks(tmp_path, "stopping", 2, fault="forward")
    assert job.wait() == [1, 1], job.said()
    told = job.told()
    assert told[0]["verdict"] == told[1]["verdict"]
    assert (told[0]["verdict"]["rank"], told[0]["verdict"]["module"], told[0]["verdict"]["step"]) == (1, "parts.1", 2)
    assert told[0]["cause"] == "RuntimeError" and told[1]["cause"] is None
    assert max(one["seconds"] for one in told) < 2 * PATIENT


def test_a_rank_that_is_still_on_its_way_stops_before_the_collective(tmp_path: Path) -> None:
    """It has heard of it by then, and its next call of a module is where it stops: no collective has to fail."""
    job = Ranks(tmp_path, "stopping", 3, fault="backward", late=0)
    assert set(job.wait()) == {1}, job.said()
    told = job.told()
    assert told[0]["cause"] is None
    assert [one["verdict"]["rank"] for one in told] == [GUILTY] * 3
    assert {one["verdict"]["title"] for one in told} == {
        "parts.1 (Part) made the first nan, in backward, step 2, on rank 1"
    }


def test_a_rank_that_stops_and_stays_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    """Gloo lets go of nobody while the other process lives: then the process that waits ends, and says why."""
    job = Ranks(tmp_path, "stopping", 2, fault="forward", stays=1, grace=2.0)
    try:
        assert job.processes[0].wait(90) == 1
        assert job.processes[1].poll() is None, "it was still there, or nothing is shown"
    finally:
        for ran in job.processes:
            ran.kill()
            ran.wait()
    said = job.logs[0].read_text()
    assert "parts.1 (Part) made the first nan, in forward, step 2, on rank 1" in said
    assert "nanhunt [rank0]: this rank waited in a collective that the rank which has stopped will not join" in said


def _killed(folder: Path, **asked: Any) -> list[Any]:
    job = Ranks(folder, "killed", 3, **asked)
    codes = job.wait()
    assert [code for rank, code in enumerate(codes) if rank != asked["dies"]] == [0, 0], job.said()
    assert codes[asked["dies"]] == -9
    told = job.told()
    assert told[asked["dies"]] is None
    assert all(one["seconds"] < 2 * PATIENT for one in told if one is not None)
    return told


def test_a_rank_that_is_killed_when_it_hears_of_a_fault_is_not_waited_for_long(tmp_path: Path) -> None:
    told = _killed(tmp_path, guilty=[1], dies=2, when="here")
    assert told[0]["verdict"] == told[1]["verdict"]
    assert (told[0]["verdict"]["rank"], told[0]["verdict"]["unheard"]) == (1, "rank 2")
    assert "Nothing is known of rank 2." in told[0]["verdict"]["why"]


def test_the_fault_of_a_rank_that_is_killed_while_it_tells_it_is_told_all_the_same(tmp_path: Path) -> None:
    """It has written it down and has woken nobody: the next rank with a fault does, and finds both."""
    told = _killed(tmp_path, guilty=[1, 2], dies=1, when="wake")
    verdicts = [one["verdict"] for one in (told[0], told[2])]
    assert verdicts[0] == verdicts[1] and verdicts[0]["rank"] == 1


def test_without_the_store_each_rank_tells_what_it_has_seen_itself(tmp_path: Path) -> None:
    """Rank 0 keeps the store here, and takes it along when it is killed."""
    told = _killed(tmp_path, guilty=[1], dies=0, when="here")
    assert (told[1]["verdict"]["rank"], told[1]["verdict"]["first"]) == (1, None)


def test_a_rank_that_never_arrives_is_left_out_of_the_verdict(tmp_path: Path) -> None:
    job = Ranks(tmp_path, "absent", 2, absent=0)
    assert job.wait() == [0, 0], job.said()
    told = job.told()[1]
    assert (told["verdict"]["rank"], told["verdict"]["unheard"]) == (1, "rank 0")
    assert told["seconds"] < 2 * PATIENT


def test_fifty_healthy_steps_have_the_same_bits_and_not_one_more_collective(tmp_path: Path) -> None:
    """And nothing new stands in the store: ranks talk of faults alone."""
    job = Ranks(tmp_path, "healthy", 2, forms=["ddp", "fsdp2", "fsdp2 mixed, checkpointed"])
    assert job.wait() == [0, 0], job.said()
    for told in job.told():
        for form in ("ddp", "fsdp2", "fsdp2 mixed, checkpointed"):
            plain, watched = told[f"{form} False"], told[f"{form} True"]
            assert plain["collectives"] >= 50, "or they are not counted"
            assert watched == plain


def test_hunt_runs_the_step_again_on_all_ranks_or_on_none(tmp_path: Path) -> None:
    job = Ranks(tmp_path, "by_agreement", 2)
    assert job.wait() == [0, 0], job.said()
    for told in job.told():
        again, once = told["ddp"], told["fsdp2"]
        assert (again["verdict"]["rank"], again["verdict"]["module"]) == (1, "parts.1")
        assert again["op"] == "aten.log.default" and again["second"] is None
        assert (once["verdict"]["rank"], once["verdict"]["module"], once["op"]) == (1, "parts.1", None)
        assert "not run: " in once["second"] and "spreads its parameters over the ranks" in once["second"]


@pytest.mark.skipif(not CASES.exists(), reason="the graded cases (../shared/cases) are not beside this checkout")
@pytest.mark.parametrize("detail", ["auto", "op"])
def test_the_graded_case_of_two_replicas_as_two_processes(detail: str, tmp_path: Path) -> None:
    """A constant row on rank 1 ruins both replicas; the loss of rank 0 is finite in that step."""
    job = Ranks(tmp_path, "replicas", 2, cases=str(CASES), detail=detail)
    assert job.wait() == [0, 0], job.said()
    told = job.told()
    assert told[0] == told[1]
    verdict = told[0]["verdict"]
    assert (verdict["rank"], verdict["step"], verdict["phase"], verdict["module"]) == (1, 2, "forward", "norm")
    assert verdict["handed"] == "rank 0"
    if detail == "op":
        assert told[0]["op"] == "aten.div.Tensor" and "/ x.std(dim=1, keepdim=True)" in told[0]["source"]


# --- under a launcher -------------------------------------------------------------------------------

PROGRAM = """\
import sys, torch, torch.distributed as dist
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
    def forward(self, x, bad):
        y = self.first(x)
        return self.second(torch.log(-y.abs() - 1) if bad else y)

dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.randn(2, 4), "bad" in sys.argv and step == 2 and dist.get_rank() == 1).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def _torchrun(folder: Path, *given: str, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(PROGRAM)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "nanhunt"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **environment}
    return subprocess.run(
        [*run, "-o", "out", *given], cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False
    )


TITLE = "the model's own forward (Net) made the first nan, in forward, step 2, on rank 1"


def test_torchrun_gives_one_verdict_from_one_rank(tmp_path: Path) -> None:
    """The page is printed once, its lines are not mixed with those of others, and each rank has its report."""
    ran = _torchrun(tmp_path, "train.py", "bad")
    assert ran.returncode == 1
    assert ran.stderr.count(TITLE) == 1 and ran.stderr.count("What to do") == 1, ran.stderr
    page = ran.stderr[ran.stderr.index(TITLE) :].partition("nanhunt [")[0]
    assert "[rank0]" not in page
    assert "nanhunt [rank0]" not in ran.stderr and "nanhunt [rank1]: watched 1 model" in ran.stderr
    finding = json.loads((tmp_path / "out" / "finding.rank1.json").read_text())[0]
    place = {key: finding["context"][key] for key in ("world_size", "local_rank", "restart", "backend")}
    assert place == {"world_size": 2, "local_rank": 1, "restart": 0, "backend": "gloo"}
    assert finding["context"]["host"] and finding["rank"] == 1


def test_torchrun_in_health_gives_one_line_from_rank_0(tmp_path: Path) -> None:
    ran = _torchrun(tmp_path, "train.py")
    assert ran.returncode == 0, ran.stderr
    told = [line for line in ran.stderr.splitlines() if line.startswith("nanhunt")]
    assert told[0] == "nanhunt [rank0]: watched 1 model (DistributedDataParallel), 3 steps, nothing found"
    assert all(line.startswith("nanhunt [rank0]: ") for line in told)
    assert {path.name for path in (tmp_path / "out").glob("*.json")} == {"finding.rank0.json", "finding.rank1.json"}


def test_ranks_that_record_go_on_and_their_files_give_the_same_verdict(tmp_path: Path) -> None:
    ran = _torchrun(tmp_path, "--on-hit", "record", "train.py", "bad")
    assert ran.returncode == 1
    assert ran.stderr.count(TITLE) == 1, ran.stderr
    show = [sys.executable, "-m", "nanhunt", "show", "out"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    shown = subprocess.run(show, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert shown.returncode == 1
    assert shown.stdout.startswith(f"{TITLE}\n") and "handed it by the all-reduce of" in " ".join(shown.stdout.split())


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8"}, 3),
        ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "16"}, 5),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}, None),  # the batch script itself, outside of srun
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, 2),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
    ],
)
def test_what_launchers_say_of_ranks_is_understood(
    told: dict[str, str], expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nanhunt import launcher

    for names in launcher._TOLD:
        for name in names:
            monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert launcher._rank() == (expected, False)


def test_what_an_elastic_launcher_starts_anew_writes_its_own_files(monkeypatch: pytest.MonkeyPatch) -> None:
    from nanhunt import launcher

    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert launcher._tag(3) == "rank3"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert launcher._tag(3) == "rank3.restart2"


def test_a_process_that_trains_alone_has_nothing_to_do_with_ranks(tmp_path: Path) -> None:
    assert ranks.place() == {} and not ranks.together()
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert ranks.place() == {} and ranks.rank() == 0
    finally:
        torch.distributed.destroy_process_group()
