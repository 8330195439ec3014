"""One rank of a job: `python -m tests.ranked SCENE JSON`, started by `tests.rankwise.Ranks`."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import nanhunt

from .rankwise import FAULTS, GUILTY, Net, batch, brief, group, loss_of, tell

warnings.simplefilter("ignore", FutureWarning)


class Form:
    """A way to spread a model over ranks; `before`: it is watched before that; `parts` micro-batches make a step."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module], *, before: bool = False, parts: int = 1) -> None:
        self.wrap, self.before, self.parts = wrap, before, parts


def _ddp(**options: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda model: DistributedDataParallel(model, **options)


def _ddp_compressed(model: nn.Module) -> nn.Module:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped


def _fsdp2(*, mixed: bool = False, checkpoint: bool = False) -> Callable[[nn.Module], nn.Module]:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def wrap(model: Any) -> nn.Module:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options = {"mp_policy": policy} if mixed else {}
        for at, part in enumerate(model.parts):
            if checkpoint:
                part = model.parts[at] = checkpoint_wrapper(part)
            fully_shard(part, **options)
        fully_shard(model, **options)
        return model

    return wrap


def _fsdp1(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    from .rankwise import Part

    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Part}), device_id=torch.device("cpu"), use_orig_params=True
    )


def _accelerate(model: nn.Module) -> nn.Module:
    from accelerate import Accelerator

    prepared: nn.Module = Accelerator(cpu=True).prepare(model)
    return prepared


FORMS: dict[str, Callable[[], Form]] = {
    "ddp": lambda: Form(_ddp()),
    "ddp watched before": lambda: Form(_ddp(), before=True),
    "ddp find_unused_parameters": lambda: Form(_ddp(find_unused_parameters=True, gradient_as_bucket_view=True)),
    "ddp static_graph": lambda: Form(_ddp(static_graph=True)),
    "ddp comm hook": lambda: Form(_ddp_compressed),
    "ddp no_sync": lambda: Form(_ddp(), parts=2),
    "fsdp2": lambda: Form(_fsdp2()),
    "fsdp2 watched before": lambda: Form(_fsdp2(), before=True),
    "fsdp2 mixed, checkpointed": lambda: Form(_fsdp2(mixed=True, checkpoint=True)),
    "fsdp1": lambda: Form(_fsdp1),
    "accelerate": lambda: Form(_accelerate),
}


def train(model: nn.Module, net: Any, rank: int, steps: int, fault: str | None, parts: int = 1) -> list[Tensor]:
    """Some steps; in the second, in its first micro-batch, one rank has the fault."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    failing, losses = net.parts[1], []
    for step in range(steps):
        for part in range(parts):
            mine = fault if step == 1 and part == 0 and rank == GUILTY else None
            failing.fault = mine  # type: ignore[assignment]
            x = batch(step + part, rank)
            if mine == "input":
                x[1, 2] = float("nan")
            alone = model.no_sync() if part < parts - 1 else nullcontext()  # type: ignore[operator]
            with alone:
                loss = loss_of(model(x), mine)
                loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def forms(asked: dict[str, Any]) -> Any:
    """Each form with each fault on one rank, in the second step; every rank records, and nobody stops."""
    told: dict[str, Any] = {}
    for name in asked["forms"]:
        for fault in asked.get("faults", FAULTS):
            form, net = FORMS[name](), Net()
            failing = Net.parts_of(net)
            model = None if form.before else form.wrap(net)
            with nanhunt.watch(model if model is not None else net, on_hit="record") as hunt:
                train(model if model is not None else form.wrap(net), failing, asked["rank"], 3, fault, form.parts)
            told[f"{name}: {fault}"] = said(hunt)
    return told


def said(hunt: Any) -> dict[str, Any]:
    own = [brief(finding) for finding in hunt.findings[:2]]
    return {"verdict": brief(hunt.finding), "own": own, "errors": [repr(error) for error in hunt.errors]}


def healthy(asked: dict[str, Any]) -> Any:
    """Fifty steps, plain and watched: the bits of the weights and losses, the collectives, what stands in the store."""
    told: dict[str, Any] = {}
    group_ = dist.distributed_c10d._get_default_group()
    store = dist.distributed_c10d._get_default_store()

    def counted() -> tuple[int, int]:
        """Collectives of this rank, and keys in the store, while no rank goes on."""
        dist.barrier()
        now = group_._get_sequence_number_for_group(), store.num_keys()
        dist.barrier()
        return now

    for name in asked["forms"]:
        for watched in (False, True):
            form, net = FORMS[name](), Net()
            failing, model = Net.parts_of(net), form.wrap(net)
            before = counted()
            with nanhunt.watch(model) if watched else nullcontext():
                losses = train(model, failing, asked["rank"], 50, None)
                after = counted()
            state = {key: getattr(value, "_local_tensor", value) for key, value in model.state_dict().items()}
            bits = hashlib.sha256(
                b"".join(t.double().numpy().tobytes() for t in [*state.values(), *losses])
            ).hexdigest()
            made, keys = (now - then for now, then in zip(after, before))
            told[f"{name} {watched}"] = {"bits": bits, "collectives": made, "keys": keys}
    return told


def _tensor_parallel(model: Any, *, sequence: bool = False) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if sequence:
        plan: Any = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(),
        }
    else:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


class Wide(nn.Module):
    """Two layers that are split over the ranks, and an activation on the local half between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.norm, self.up, self.act, self.down = nn.LayerNorm(4), nn.Linear(4, 8), Act(), nn.Linear(8, 4)
        self.after = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.down(self.act(self.up(self.norm(x)))))


class Act(nn.Module):
    """An activation that can fail in its forward or in its derivative."""

    fault: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "forward":
            return torch.log(-x.abs() - 1)
        return x + (x - x).abs().sqrt() if self.fault == "backward" else torch.tanh(x)


def tensor_parallel(asked: dict[str, Any]) -> Any:
    """A fault in the local half of one rank: the sum over the ranks hands it to the other."""
    told: dict[str, Any] = {}
    for sequence in (False, True):
        for fault in ("forward", "backward", None):
            model: Any = Wide()
            if sequence:
                model.norm.register_forward_pre_hook(lambda module, args: (_sharded_sequence(args[0]),))
            _tensor_parallel(model, sequence=sequence)
            with nanhunt.watch(model, on_hit="record") as hunt:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
                for step in range(3):
                    model.act.fault = fault if step == 1 and asked["rank"] == GUILTY else None
                    model(
                        torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(step))
                    ).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            told[f"{'sequence' if sequence else 'tensor'}: {fault}"] = said(hunt)
    return told


def _sharded_sequence(x: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(x, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(1)])


def by_agreement(asked: dict[str, Any]) -> Any:
    """`hunt` on all ranks: its second run, at op level, on all of them or on none."""
    told: dict[str, Any] = {}
    for name in ("ddp", "fsdp2"):
        form, net = FORMS[name](), Net()
        failing, model = net.parts[1], form.wrap(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(x: Tensor, model: nn.Module = model, optimizer: Any = optimizer) -> None:
            model(x).square().mean().backward()
            optimizer.step()

        failing.fault = "forward" if asked["rank"] == GUILTY else None  # type: ignore[assignment]
        found = nanhunt.hunt(step, batch(0, asked["rank"]), model=model, optimizer=optimizer)
        context = found.context if found is not None else {}
        told[name] = {"verdict": brief(found), "op": found and found.op, "second": context.get("second_run")}
    return told


def replicas(asked: dict[str, Any]) -> Any:
    """The graded case of two replicas in one process, as two processes: one row of one rank's batch is constant."""
    sys.path.insert(0, asked["cases"])
    case = importlib.import_module("training.41_ddp_one_rank")
    both, _, batches = case.build()
    rank = asked["rank"]
    model = DistributedDataParallel(both[f"rank{rank}"])
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with nanhunt.watch(model, on_hit="record", detail=asked["detail"]) as hunt:
        for pair in batches:
            x, y = pair[rank]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    found = hunt.finding
    return {"verdict": brief(found), "op": found and found.op, "source": found and found.source}


def pipeline(asked: dict[str, Any]) -> Any:
    """Two stages with micro-batches: a fault in the first reaches the second as its input, and back as a gradient.

    To learn the shapes, torch first runs the stages on memory that nobody has written: here it is full of NaN.
    """
    torch.use_deterministic_algorithms(True)
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    told: dict[str, Any] = {}
    rank, world = asked["rank"], asked["world"]
    for schedule in (ScheduleGPipe, Schedule1F1B):
        for guilty, fault in ((0, "forward"), (1, "backward"), (0, "backward"), (1, "forward")):
            torch.manual_seed(7)
            from .rankwise import Part

            model = nn.Sequential(Part(), nn.Linear(4, 4))
            stage = PipelineStage(model, rank, world, torch.device("cpu"))
            runs = schedule(stage, 2, loss_fn=lambda out, y: (out - y).square().mean())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            with nanhunt.watch(model, optimizer, on_hit="record") as hunt:
                for step in range(2):
                    model[0].fault = fault if step == 1 and rank == guilty else None  # type: ignore[assignment]
                    if rank == 0:
                        runs.step(torch.randn(4, 4))
                    else:
                        runs.step(target=torch.randn(4, 4), losses=[])
                    optimizer.step()
                    optimizer.zero_grad()
            told[f"{schedule.__name__} {guilty} {fault}"] = said(hunt)
    return told


def communication(asked: dict[str, Any]) -> Any:
    """Finite before a collective and bad after it: sums that pass the end of float16, buffers nobody fills."""
    told: dict[str, Any] = {}
    rank = asked["rank"]

    def one(name: str, run: Callable[[nn.Module, Any], None], model: nn.Module | None = None) -> None:
        model = model or nn.Linear(4, 2).half()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        with nanhunt.watch(model, on_hit="record") as hunt:
            run(model, optimizer)
        told[name] = said(hunt)

    def by_hand(model: nn.Module, optimizer: Any) -> None:
        model(torch.full((1, 4), 40000.0, dtype=torch.float16) * (1 - 0.25 * rank)).sum().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()

    def gathered(model: nn.Module, optimizer: Any) -> None:
        """As contrastive losses do: what one rank has made is part of the loss of all."""
        x = torch.ones(1, 4, dtype=torch.float16)
        if rank == GUILTY:
            x[0, 1] = float("nan")
        ours = model.first(x)
        both = [torch.empty_like(ours) for _ in range(2)]
        dist.all_gather(both, ours.detach())
        both[rank] = ours
        model.second(torch.cat(both)).sum().backward()

    def unwritten(model: nn.Module, optimizer: Any) -> None:
        """A rank that is not in the group gets nothing: its buffer stays as it was."""
        others, buffer = dist.new_group([1]), torch.full((1, 4), float("nan"))
        dist.all_gather_into_tensor(buffer if rank == 0 else torch.empty(1, 4), torch.ones(1, 4), group=others)
        model(buffer if rank == 0 else torch.ones(1, 4)).sum().backward()

    def sharded(model: nn.Module, optimizer: Any) -> None:
        (model(torch.full((1, 4), 6e4 * (1 - 0.25 * rank))).sum() * 1.0).backward()
        optimizer.step()

    one("by hand", by_hand)
    one("gathered", gathered, Pair())
    one("sharded", sharded, _summed_in_half(nn.Linear(4, 2)))
    one("unwritten", unwritten, nn.Linear(4, 2))
    return told


class Pair(nn.Module):
    """An encoder, and a head for what all ranks have encoded; each is called on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4).half(), nn.Linear(4, 2).half()


def _summed_in_half(model: Any) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    model.set_gradient_divide_factor(1.0)
    return model


def stopping(asked: dict[str, Any]) -> Any:
    """One rank raises; the others are on their way into an all-reduce that it will not join."""
    from nanhunt import tidings

    tidings.GRACE = asked.get("grace", tidings.GRACE)
    rank, net = asked["rank"], Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    began = time.monotonic()
    try:
        with nanhunt.watch(model):
            for step in range(4):
                net.parts[1].fault = asked["fault"] if step == 2 and rank == GUILTY else None  # type: ignore[assignment]
                if step == 2:
                    began = time.monotonic()
                if asked.get("late") == rank and step == 2:
                    time.sleep(3.0)
                loss_of(model(batch(step, rank)), None).backward()
                optimizer.step()
                optimizer.zero_grad()
    except nanhunt.NonFiniteError as stop:
        cause = type(stop.__cause__).__name__ if stop.__cause__ is not None else None
        seconds = time.monotonic() - began
        tell(asked["folder"], rank, {"verdict": brief(stop.finding), "seconds": seconds, "cause": cause})
        if asked.get("stays") == rank:
            time.sleep(60.0)
        raise
    return None


def killed(asked: dict[str, Any]) -> Any:
    """A rank is killed as soon as another has a finding; it says nothing any more."""
    rank, model = asked["rank"], Net()
    began = 0.0
    with nanhunt.watch(model, on_hit="record") as hunt:
        dist.barrier()
        if rank == asked["dies"]:
            from nanhunt import tidings

            key = tidings.Tidings._key

            def dies(self: Any, what: str, of: int) -> str:
                if what == asked["when"]:
                    os.kill(os.getpid(), signal.SIGKILL)
                return key(self, what, of)

            tidings.Tidings._key = dies  # type: ignore[method-assign]
        model.parts[1].fault = "forward" if rank in asked["guilty"] else None  # type: ignore[assignment]
        model(batch(0, rank))
        time.sleep(2.0)
        began = time.monotonic()
    return {"verdict": brief(hunt.finding), "seconds": time.monotonic() - began}


def absent(asked: dict[str, Any]) -> Any:
    """A rank that opens no watch, and is busy elsewhere for longer than anybody waits."""
    rank, model = asked["rank"], Net()
    if rank == asked["absent"]:
        time.sleep(12.0)
        return {"verdict": None, "seconds": 0.0}
    with nanhunt.watch(model, on_hit="record") as hunt:
        model.parts[1].fault = "forward" if rank == GUILTY else None  # type: ignore[assignment]
        loss_of(model(batch(0, rank)), None).backward()
        began = time.monotonic()
    return {"verdict": brief(hunt.finding), "seconds": time.monotonic() - began}


SCENES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "stopping": stopping,
    "killed": killed,
    "absent": absent,
    "by_agreement": by_agreement,
    "replicas": replicas,
    "forms": forms,
    "healthy": healthy,
    "tensor_parallel": tensor_parallel,
    "pipeline": pipeline,
    "communication": communication,
}


def main() -> None:
    scene, asked = sys.argv[1], json.loads(sys.argv[2])
    with group(asked["rank"], asked["world"], asked["port"]):
        said = SCENES[scene](asked)
        if said is not None:
            tell(asked["folder"], asked["rank"], said)


if __name__ == "__main__":
    main()
