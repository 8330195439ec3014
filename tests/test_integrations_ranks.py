"""Two ranks that train together stop together, although only one of them has met the fault."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from .faulty import Fault

RANKS = 2


def _report(folder: str, name: str, rank: int, callback: Any, step: int, model: torch.nn.Module) -> None:
    finding = callback.finding
    found = (finding.step, finding.module, finding.rank) if finding is not None else None
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.save((found, step, flat), Path(folder) / f"{name}.{rank}")


def _transformers(rank: int, folder: str) -> None:
    from nanhunt.integrations.transformers import NanHuntCallback

    from .test_integrations import trainer

    callback, fault = NanHuntCallback(on_hit="stop"), Fault(2 if rank == 1 else None, "forward")
    watched = trainer(Path(folder) / "out", callback, fault=fault)
    watched.train()
    _report(folder, "transformers", rank, callback, watched.state.global_step, watched.model)


def _lightning(rank: int, folder: str) -> None:
    import lightning.pytorch as pl

    from nanhunt.integrations.lightning import NanHuntCallback

    from .test_integrations_lightning import fit

    callback, fault = NanHuntCallback(on_hit="stop"), Fault(2 if rank == 1 else None, "forward")
    made, model = fit(pl, Path(folder), callback, fault=fault, strategy="ddp", devices=RANKS)
    _report(folder, "lightning", rank, callback, made.global_step, model)


def _rank(rank: int, folder: str, port: int) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()})
    torch.set_num_threads(1)
    _transformers(rank, folder)
    _lightning(rank, folder)
    torch.distributed.destroy_process_group()


def test_all_ranks_stop_after_the_same_step_with_the_same_good_weights(tmp_path: Path) -> None:
    """Rank 1 finds it; rank 0, which would wait for ever otherwise, ends with it, and no gradient of it counts."""
    for library in ("transformers", "accelerate", "lightning"):
        pytest.importorskip(library)
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("gloo is not built in")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_rank, (str(tmp_path), port), nprocs=RANKS)
    for name, place in (("transformers", "transformer.h.0.mlp.act.1"), ("lightning", "encoder.1")):
        (found0, step0, flat0), (found1, step1, flat1) = (
            torch.load(tmp_path / f"{name}.{rank}", weights_only=False) for rank in range(RANKS)
        )
        assert found1 == (2, place, 1)
        assert found0 is None or found0[0] == 2
        assert step0 == step1 == 3
        assert flat0.isfinite().all() and torch.equal(flat0, flat1)
