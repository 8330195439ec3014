"""Programs that several ranks run together, one of them with a fault; what each rank then says goes to a file."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

GUILTY = 1
FAULTS = ("forward", "backward", "loss", "input")
ROOT = Path(__file__).parent.parent


class Part(nn.Module):
    """A layer that can make a NaN in its forward, or, by a square root at zero, only in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.fault: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        if self.fault == "forward":
            return y * torch.log(-y.detach().abs() - 1)
        if self.fault == "backward":
            return y + (y - y).abs().sqrt()  # the derivative is 0 * inf
        return y


class Net(nn.Module):
    """Three parts; the second is the one that fails."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.parts = nn.ModuleList([Part() for _ in range(3)])
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return self.head(x)

    @staticmethod
    def parts_of(net: Net) -> Any:
        """Its parts, as they are before anything is wrapped around them."""
        return SimpleNamespace(parts=list(net.parts))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(out: Tensor, fault: str | None) -> Tensor:
    loss = out.square().mean()
    return loss * torch.log(-loss.detach() - 1) if fault == "loss" else loss


@contextmanager
def group(rank: int, world: int, port: int, seconds: float = 120.0) -> Iterator[None]:
    """The process group, and what a launcher leaves in the environment."""
    torch.set_num_threads(1)
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in told.items()})
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    try:
        yield
    finally:
        dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def needs_gloo() -> None:
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("gloo is not built in")


class Ranks:
    """Processes of one job that were started by `start`, and are waited for by `wait`."""

    def __init__(self, folder: Path, scene: str, world: int, **given: Any) -> None:
        self.folder, self.world = folder, world
        port = free_port()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        self.logs = [folder / f"log.{rank}" for rank in range(world)]
        self.processes = []
        for rank in range(world):
            asked = {"rank": rank, "world": world, "port": port, "folder": str(folder), **given}
            command = [sys.executable, "-m", "tests.ranked", scene, json.dumps(asked)]
            with self.logs[rank].open("w") as log:
                ran = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
            self.processes.append(ran)

    def wait(self, seconds: float = 240.0) -> list[int]:
        """The exit codes; a rank that has not ended by then is killed, and the test fails."""
        deadline = time.monotonic() + seconds
        try:
            for ran in self.processes:
                ran.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pytest.fail(f"a rank hangs:\n{self.said()}")
        finally:
            for ran in self.processes:
                ran.kill()
        return [ran.returncode for ran in self.processes]

    def said(self) -> str:
        return "\n".join(f"--- rank {rank}\n{log.read_text()[-3000:]}" for rank, log in enumerate(self.logs))

    def told(self) -> list[Any]:
        """What each rank has written with `tell`; None for one that has not come so far."""
        files = [self.folder / f"told.{rank}.json" for rank in range(self.world)]
        return [json.loads(file.read_text()) if file.exists() else None for file in files]


def tell(folder: str, rank: int, what: Any) -> None:
    draft = Path(folder) / f".told.{rank}"
    draft.write_text(json.dumps(what))
    draft.rename(Path(folder) / f"told.{rank}.json")


def brief(finding: Any) -> Any:
    """What a test asks of a finding."""
    if finding is None:
        return None
    about = finding.context.get("ranks", {})
    return {
        "rank": finding.rank, "step": finding.step, "phase": finding.phase, "module": finding.module,
        "kind": finding.kind, "cause": finding.cause, "why": finding.why, "tensor": finding.tensor,
        "first": about.get("first"), "handed": about.get("handed"), "unheard": about.get("unheard"),
        "hash": finding.context.get("batch_hash"), "title": finding.title(),
        "sent": {row.name: row.absmax for row in finding.tensors if row.role == "sent"},
    }  # fmt: skip
