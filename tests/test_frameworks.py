"""Transformers, Lightning, Accelerate, DDP and FSDP2 train the same, watched or not."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from .situations.frameworks import FRAMEWORKS
from .situations.harness import Spans, check, compare, perform, reference

MODES: dict[str, dict[str, object]] = {"auto": {"detail": "auto"}, "deferred": {"detail": "auto", "_defer": True}}


def _watch(*args: Any, **kwargs: Any) -> Any:
    import nanhunt

    return nanhunt.watch(*args, **kwargs)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums have one order only when one thread takes them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_framework_is_reproducible(name: str) -> None:
    """Two plain runs of a framework are equal, so that a difference is the watch's doing."""
    situation = FRAMEWORKS[name]
    assert not compare(situation, reference(situation), perform(situation, Spans()))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_framework_is_unchanged(name: str, mode: str) -> None:
    """A framework's run has the same bits watched as plain, and nothing is left behind."""
    check(FRAMEWORKS[name], _watch, **MODES[mode])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder into which two processes have written the faults of each distributed situation."""
    distributed = pytest.importorskip("tests.situations.distributed", reason="torch.distributed is not built in")
    if not torch.distributed.is_gloo_available():
        pytest.skip("gloo is not built in")
    folder = tmp_path_factory.mktemp("ranks")
    arguments = (str(folder), list(distributed.parallel), MODES, _watch)
    torch.multiprocessing.spawn(distributed.rank_main, arguments, nprocs=distributed.RANKS)
    return folder


PARALLEL = (
    "ddp ddp_inner ddp_wrapped_under_watch ddp_no_sync ddp_unused_parameters ddp_static_graph_checkpoint "
    "ddp_compressed fsdp2 fsdp2_bf16 fsdp2_checkpoint tensor_parallel"
).split()


@pytest.mark.parametrize("name", PARALLEL)
def test_distributed_training_is_unchanged(name: str, ranks: Any) -> None:
    """On both ranks a distributed step has the same bits watched as plain."""
    faults = [f"rank {rank}: {(ranks / f'{name}.{rank}').read_text()}" for rank in range(2)]
    assert faults == ["rank 0: ", "rank 1: "], "\n".join(faults)


def test_every_distributed_situation_is_listed() -> None:
    """The list of names here, which needs no torch.distributed, is the catalogue's."""
    distributed = pytest.importorskip("tests.situations.distributed", reason="torch.distributed is not built in")
    assert list(distributed.parallel) == PARALLEL
