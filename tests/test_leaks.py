"""A watch that runs for ever holds nothing: no tensors, no hooks, no objects of its own, no higher peak."""

import gc
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.modules.module as nn_module
import torch.optim.optimizer as optim_module
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

MODES: dict[str, dict[str, object]] = {
    "module": {"detail": "module"},
    "auto": {"detail": "auto"},
    "deferred": {"detail": "auto", "_defer": True},
}
each_mode = pytest.mark.parametrize("mode", MODES)
reads_proc = pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads the resident size from /proc")


def _watch(model: nn.Module, **options: Any) -> Any:
    import nanhunt

    return nanhunt.watch(model, on_hit="record", **options)


class _Model(nn.Sequential):
    """Linear layers of one width with GELU, each pair in a module of its own."""

    def __init__(self, depth: int = 20, width: int = 128) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)))
        self.width = width

    def batch(self, more: int = 0) -> Tensor:
        return torch.randn(self.width, self.width + more)


def _train(model: _Model) -> None:
    model(model.batch()).pow(2).mean().backward()
    model.zero_grad()


def _forward_only(model: _Model) -> None:
    model(model.batch())


def _evaluate(model: _Model) -> None:
    with torch.no_grad():
        model(model.batch())


def _caught(model: _Model) -> None:
    try:
        model(model.batch(more=1))
    except RuntimeError:
        _train(model)


STEPS: dict[str, Callable[[_Model], None]] = {
    "training": _train,
    "graphs dropped without a backward": _forward_only,
    "evaluation": _evaluate,
    "a forward that raises": _caught,
}


@pytest.fixture(autouse=True)
def fresh_census() -> Iterator[None]:
    """Count only what is made from here on, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


def _census(model: nn.Module) -> Counter[str]:
    """What must not grow: objects, tensors, hooks."""
    gc.collect()
    counts: Counter[str] = Counter()
    storages: dict[int, int] = {}
    everything = gc.get_objects()
    for thing in everything:
        kind = type(thing)
        if kind.__module__ == "nanhunt" or kind.__module__.startswith("nanhunt."):
            counts["objects of nanhunt"] += 1
        if issubclass(kind, Tensor):
            counts["tensors"] += 1
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    hooks = [getattr(nn_module, name) for name in vars(nn_module) if name.startswith("_global_") and "hooks" in name]
    hooks += [getattr(optim_module, name) for name in vars(optim_module) if name.startswith("_global_optimizer")]
    for p in model.parameters():
        hooks += [p._backward_hooks or (), getattr(p, "_post_accumulate_grad_hooks", None) or ()]
    for module in model.modules():
        hooks += [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks]
    counts["all objects"] = len(everything)
    counts["tensor bytes"] = sum(storages.values())
    counts["hooks"] = sum(map(len, hooks))
    counts["recursion limit"] = sys.getrecursionlimit()
    return counts


def _growth(run: Callable[[], None], model: _Model, steps: int) -> list[str]:
    """What was higher in the last third of the steps than ever in the second, beyond the slack."""
    thirds: tuple[list[Counter[str]], ...] = ([], [], [])
    for i in range(steps):
        run()
        if i % (steps // 30) == 0:
            _train(model)
            _train(model)  # a step of the watch is over when the next one begins
            thirds[i * 3 // steps].append(_census(model))
    grown = []
    for key in sorted(thirds[1][0]):
        early, late = (max(one[key] for one in third) for third in thirds[1:])
        slack = steps // 4 if "objects" in key else 0
        if late > early + slack:
            grown.append(f"{key}: {early:,} -> {late:,} in {steps // 3} steps")
    return grown


def _resident(run: Callable[[], None], steps: int) -> float:
    """Megabytes by which the process grew in the last two thirds of the steps: it sees what only C++ holds."""
    sizes = []
    for i in range(steps):
        run()
        if i in (steps // 3, steps - 1):
            with open("/proc/self/statm") as file:
                sizes.append(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20)
    return sizes[1] - sizes[0]


@each_mode
@pytest.mark.parametrize("kind", STEPS)
def test_one_watch_for_many_steps(kind: str, mode: str) -> None:
    """Under one watch that runs on, objects, tensors and hooks reach a level and stay there."""
    model = _Model(2, width=4)
    with _watch(model, **MODES[mode]) as hunt:
        assert not _growth(lambda: STEPS[kind](model), model, steps=600)
    assert not hunt.errors


@each_mode
def test_serving_without_end_is_bounded(mode: str) -> None:
    """A model that only ever serves ends no step; what the watch remembers has a limit all the same."""
    model = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    with _watch(model, **MODES[mode]), torch.no_grad():
        for _ in range(40_000):
            model(x)
        assert _census(model)["objects of nanhunt"] < 30_000


@reads_proc
@each_mode
@pytest.mark.parametrize("kind", STEPS)
def test_resident_memory_stays(kind: str, mode: str) -> None:
    """60 steps with 2.5 MB of activations each leave the process as large as 20."""
    model = _Model()
    with _watch(model, **MODES[mode]):
        assert _resident(lambda: STEPS[kind](model), steps=60) < 25


@reads_proc
@each_mode
def test_many_watches(mode: str) -> None:
    """A watch around each of many steps leaves nothing behind."""
    model, large = _Model(2, width=4), _Model()

    def run(model: _Model) -> None:
        with _watch(model, **MODES[mode]):
            _train(model)

    assert not _growth(lambda: run(model), model, steps=300)
    assert _resident(lambda: run(large), steps=60) < 25


@reads_proc
def test_the_census_catches_a_leak() -> None:
    """A hook that holds outputs fails the same measurements."""
    model, large, kept = _Model(2, width=4), _Model(), []
    handle = nn_module.register_module_forward_hook(lambda m, a, o: kept.append(o))
    try:
        grown = _growth(lambda: _forward_only(model), model, steps=300)
        assert {line.split(":")[0] for line in grown} >= {"tensors", "tensor bytes", "all objects"}
        assert _resident(lambda: _forward_only(large), steps=60) > 50
    finally:
        handle.remove()


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Model(4) for _ in range(12))

    def batch(self) -> Tensor:
        return self.blocks[0].batch()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def _peak(run: Callable[[], object]) -> int:
    """Highest number of bytes that torch had allocated at once, over what it had when the run began."""
    run()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        run()
    events = sorted((e.start_ns(), e.nbytes()) for e in prof.profiler.kineto_results.events() if e.name() == "[memory]")
    live = peak = 0
    for _, change in events:
        live += change
        peak = max(peak, live)
    assert peak > 0
    return peak


PEAKS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], None]]] = {
    "a checkpointed step": (_Checkpointed, _train),
    "an evaluation of 80 modules": (lambda: _Model(40), _evaluate),
    "a training step": (_Model, _train),
}


@each_mode
@pytest.mark.parametrize("kind", PEAKS)
def test_peak_memory_is_unchanged(kind: str, mode: str) -> None:
    """The highest number of live bytes of a step is at most two in a hundred more when watched."""
    make, step = PEAKS[kind]
    model = make()
    plain = _peak(lambda: step(model))
    with _watch(model, **MODES[mode]):
        watched = _peak(lambda: step(model))
    assert watched <= plain * 1.02 + 16_384, f"{plain:,} -> {watched:,} bytes"


def test_the_peak_catches_a_holder() -> None:
    """Keeping the outputs of a checkpointed step until its end shows in the same measurement."""
    model, kept = _Checkpointed(), []
    plain = _peak(lambda: _train(model))
    handle = nn_module.register_module_forward_hook(lambda m, a, o: kept.append(o.detach()))
    try:
        assert _peak(lambda: _train(model)) > plain * 1.2
    finally:
        handle.remove()


@each_mode
def test_what_the_program_drops_is_freed(mode: str) -> None:
    """Outputs, their storages and gradients die at the moment the program lets go of them, inside the watch."""
    model = _Model(3)
    with _watch(model, **MODES[mode]):
        x = model.batch().requires_grad_()
        out = model(x)
        refs = [weakref.ref(out), weakref.ref(out.untyped_storage()), weakref.ref(x)]
        del out
        assert refs[0]() is None and refs[1]() is None, "an output is held"
        out = model(x)
        out.sum().backward()
        del x, out
        assert refs[2]() is None, "an input is held"


@each_mode
def test_a_closed_watch_holds_no_model(mode: str) -> None:
    """Once it is over, the handle keeps its findings and lets the model go."""
    model = _Model(3)
    with _watch(model, **MODES[mode]) as hunt:
        _train(model)
    refs = [weakref.ref(model), weakref.ref(model[0][0]), weakref.ref(model[0][0].weight)]
    del model
    gc.collect()
    assert [ref() for ref in refs] == [None, None, None]
    assert hunt.findings == []
