"""DDP, FSDP2 and tensor parallelism in two processes over gloo."""

import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from .checkpointing import Checkpointed
from .harness import Catalogue, Spans, check, compare, perform, reference
from .models import Block, Net, batch, squared

parallel = Catalogue()
RANKS = 2


def _loop(watch: Spans, model: nn.Module, watched: nn.Module | None = None, steps: int = 2) -> object:
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    torch.manual_seed(dist.get_rank())
    losses = []
    with watch(watched or model):
        for _ in range(steps):
            loss = squared(model(batch()))
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses += [loss, norm]
    return [losses, dict(model.state_dict())]


@parallel()
def ddp(watch: Spans) -> object:
    """The wrapper is watched."""
    return _loop(watch, DistributedDataParallel(Net()))


@parallel()
def ddp_inner(watch: Spans) -> object:
    """The module inside the wrapper is watched."""
    model = Net()
    return _loop(watch, DistributedDataParallel(model), model)


@parallel()
def ddp_wrapped_under_watch(watch: Spans) -> object:
    """DDP is put around a module that is watched already."""
    model = Net()
    with watch(model):
        wrapped = DistributedDataParallel(model)
        squared(wrapped(batch())).backward()
    return [dict(model.state_dict()), [p.grad for p in model.parameters()]]


@parallel()
def ddp_no_sync(watch: Spans) -> object:
    """Accumulation without synchronisation, then with."""
    model = DistributedDataParallel(Net())
    torch.manual_seed(dist.get_rank())
    with watch(model):
        with model.no_sync():
            squared(model(batch())).backward()
        squared(model(batch())).backward()
    return [p.grad for p in model.parameters()]


@parallel()
def ddp_unused_parameters(watch: Spans) -> object:
    """A layer that takes no part in this step, buckets as views of the gradients."""
    net = nn.ModuleDict({"used": Net(), "spare": Block()})

    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Any) -> Any:
            return self.net["used"](x)

    return _loop(watch, DistributedDataParallel(Picks(), find_unused_parameters=True, gradient_as_bucket_view=True))


@parallel()
def ddp_static_graph_checkpoint(watch: Spans) -> object:
    """A static graph with checkpointed blocks."""
    return _loop(watch, DistributedDataParallel(Checkpointed(use_reentrant=False), static_graph=True), steps=3)


@parallel()
def ddp_compressed(watch: Spans) -> object:
    """A communication hook that sends float16."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = DistributedDataParallel(Net())
    model.register_comm_hook(None, fp16_compress_hook)
    return _loop(watch, model)


def _sharded(model: nn.Module, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


@parallel()
def fsdp2(watch: Spans) -> object:
    """Parameters sharded block by block: DTensors that are gathered for each forward."""
    return _loop(watch, _sharded(Net()))


@parallel()
def fsdp2_bf16(watch: Spans) -> object:
    """Sharded, with computation in bfloat16 and reduction in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return _loop(watch, _sharded(Net(), mp_policy=policy))


@parallel()
def fsdp2_checkpoint(watch: Spans) -> object:
    """Sharded blocks that are recomputed in the backward."""
    return _loop(watch, _sharded(Checkpointed(use_reentrant=False)))


@parallel()
def tensor_parallel(watch: Spans) -> object:
    """Linear layers split by columns and rows over the ranks."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (RANKS,)), plan)
    with watch(model):
        loss = squared(model(batch()))
        loss.backward()
    return [loss, dict(model.state_dict()), [p.grad for p in model.parameters()]]


def rank_main(rank: int, folder: str, names: list[str], modes: dict[str, dict[str, object]], opener: Any) -> None:
    """One process: every situation plain and in each mode; the faults go to a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    for name in names:
        situation, text = parallel[name], ""
        for mode, options in {"plain": None, **modes}.items():
            try:
                if options is None:
                    again = compare(situation, reference(situation), perform(situation, Spans()))
                    assert not again, f"not reproducible: {again}"
                else:
                    check(situation, opener, **options)
            except AssertionError as error:
                text += f"{mode}: {error}\n"
            except Exception:
                text += f"{mode}: {traceback.format_exc()}\n"
        with open(f"{folder}/{name}.{rank}", "w") as file:
            file.write(text)
        dist.barrier()
    dist.destroy_process_group()
