"""A monitor changes nothing: every situation gives the same bits with it, and nothing is left, held or raised."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import sys
import warnings
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanhunt
from nanhunt import Monitor

from .situations.eager import SITUATIONS
from .situations.harness import Spans, compare, perform, reference
from .situations.world import changes, world

MODES: dict[str, dict[str, Any]] = {"at once": {}, "as on a device": {"_defer": True}}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums have one order only when one thread takes them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class _Monitored:
    """A monitor in the place of a situation's watch: every step is sampled, and what watches alone take is dropped."""

    def __init__(self, model: nn.Module, optimizer: Any = None, scaler: Any = None, **options: Any) -> None:
        mine = {name: value for name, value in options.items() if name in ("_defer", "hold")}
        self.monitor = Monitor(model, None, None, sample=1, on_symptom="record", **mine)

    def __enter__(self) -> Monitor:
        return self.monitor.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.monitor.__exit__(kind, error, trace)
        self.monitor.remove()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SITUATIONS)
def test_monitoring_changes_nothing(name: str, mode: str) -> None:
    """A monitored run has the results of the plain one to the bit, and leaves no hook, attribute or patch."""
    situation = SITUATIONS[name]
    expected = reference(situation)
    actual = perform(situation, Spans(_Monitored, **MODES[mode]))
    faults = compare(situation, expected, actual)
    for monitor in actual.hunts:
        faults += [f"internal failure: {error!r:.300}" for error in monitor.errors]
    assert actual.hunts and not faults, f"{name}: {situation.text}\n  " + "\n  ".join(faults[:25])


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    optimizer.zero_grad()
    loss = model(torch.randn(8, 6)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_training_is_the_same_to_the_bit(mode: str, hold: bool, scaled: bool) -> None:
    """Weights, moments, gradients and random numbers after 60 steps with dropout, clipping and a loss scale."""

    def train(monitored: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 600), nn.ReLU(), nn.Dropout(0.3), nn.Linear(600, 3))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60, growth_interval=5, enabled=scaled)
        monitor = Monitor(model, hold=hold, on_symptom="record", sample=7, **MODES[mode]) if monitored else None
        for i in range(60):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 6)).square().mean()
            scaler.scale(loss * 1e30 if scaled and i % 11 == 5 else loss).backward()
            if i % 3:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        if monitor is not None:
            monitor.remove()
            assert len(monitor.steps) == 60 and not monitor.errors
            assert [step.step for step in monitor.steps if step.skipped] == [5, 16, 27, 38, 49] * scaled
            assert all(math.isfinite(step.grad_norm or 0.0) for step in monitor.steps if not step.skipped)
        state = [t for per in optimizer.state.values() for t in per.values()]
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        return [*model.state_dict().values(), *state, *grads, torch.get_rng_state(), torch.rand(3)]

    for plain, monitored in zip(train(False), train(True), strict=True):
        assert torch.equal(plain, monitored)


# --- what is left behind -----------------------------------------------------------------------------------


def test_nothing_is_left_in_torch() -> None:
    """Hooks, wrapped functions, the recursion limit: all as before, also after two that overlapped and an error."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    _step(model, optimizer)
    before = world()
    first, second = Monitor(model, optimizer, sample=1), Monitor(model)
    with pytest.raises(KeyError), first:
        _step(model, optimizer)
        raise KeyError
    _step(model, optimizer)
    second.remove()
    second.remove()
    assert not list(changes(before, world()))
    assert len(first.steps) == 1 and len(second.steps) == 2


def test_a_watch_may_come_and_go_inside_an_optimizers_hook() -> None:
    """One pair of optimizer hooks serves all: torch walks a table that does not change under it."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    opened: list[Any] = []

    def other(*args: Any) -> None:
        if opened:
            opened.pop().remove()
        else:
            opened.append(nanhunt.watch(model, optimizer, on_hit="record"))

    handle = optimizer.register_step_post_hook(other)
    with Monitor(model, optimizer) as monitor:
        for _ in range(4):
            _step(model, optimizer)
    handle.remove()
    assert not monitor.errors and len(monitor.steps) == 4 and not opened


def test_the_model_can_be_copied_pickled_and_saved_while_it_is_monitored() -> None:
    """The copy has no trace of the monitor, and its own training is not recorded."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer, sample=1) as monitor:
        _step(model, optimizer)
        twin = copy.deepcopy(model)
        again = pickle.loads(pickle.dumps(model))
        torch.save(model, io.BytesIO())
        torch.jit.script(model)
        for other in (twin, again):
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in other.modules())
            _step(other, torch.optim.SGD(other.parameters(), 0.1))
    assert len(monitor.steps) == 1


def test_a_failure_of_ours_is_counted_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on, and the end says so once."""
    from nanhunt.monitor import draft

    def broken(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("ours")

    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monkeypatch.setattr(draft, "norms", broken)
    monitor = Monitor(model, optimizer)
    losses = [_step(model, optimizer) for _ in range(3)]
    with pytest.warns(nanhunt.NonFiniteWarning, match=r"internal error.*ZeroDivisionError: ours") as said:
        monitor.remove()
    assert len(said) == 1 and len(monitor.errors) >= 3 and all(map(torch.isfinite, losses))


def test_a_file_that_can_no_longer_be_written_is_told_at_the_end(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk ends the file, not the training, and the monitor says so when it is removed."""
    from nanhunt.monitor import journal

    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = Monitor(model, optimizer, log=tmp_path / "run.jsonl")
    _step(model, optimizer)

    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal.os, "write", full)
    for _ in range(3):
        _step(model, optimizer)
    with pytest.warns(nanhunt.NonFiniteWarning, match=r"could not go on writing .*No space left"):
        monitor.remove()
    assert len(monitor.steps) == 4


# --- what is held ------------------------------------------------------------------------------------------


def _objects() -> int:
    gc.collect()
    return sum(isinstance(thing, Tensor) for thing in gc.get_objects())


@pytest.mark.parametrize("mode", MODES)
def test_tensors_do_not_pile_up(mode: str) -> None:
    """After many steps, sampled ones too, as few tensors live as after a few."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with Monitor(model, optimizer, sample=3, ring=10, **MODES[mode]):
        counts = []
        for _ in range(5):
            for _ in range(30):
                _step(model, optimizer)
            counts.append(_objects())
    assert max(counts[2:]) <= counts[1] + 1, counts


@pytest.mark.parametrize("mode", MODES)
def test_what_the_program_drops_is_freed(mode: str) -> None:
    """Outputs, inputs, graphs and gradients die at once, in sampled steps too."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer, sample=1, **MODES[mode]):
        for _ in range(2):
            x = torch.randn(8, 6)
            out = model(x)
            loss = out.square().mean()
            refs = [weakref.ref(x), weakref.ref(out), weakref.ref(out.untyped_storage()), weakref.ref(loss)]
            loss.backward()
            optimizer.step()
            grad = model[0].weight.grad
            assert grad is not None
            refs += [weakref.ref(grad), weakref.ref(grad.untyped_storage())]
            del x, out, loss, grad
            optimizer.zero_grad()
            assert [ref() is None for ref in refs] == [True] * len(refs)


def test_a_removed_monitor_lets_the_model_go() -> None:
    """The handle keeps its records, and nothing of the model or its optimizer."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer, sample=1, hunt=True, hold=True) as monitor:
        _step(model, optimizer)
    refs = [weakref.ref(model), weakref.ref(model[0].weight), weakref.ref(optimizer)]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in refs] == [None, None, None]
    assert len(monitor.steps) == 1


def test_the_programs_own_modes_see_nothing() -> None:
    """A dispatch mode around the step meets the same ops with and without a monitor."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(op))
            return op(*args, **(kwargs or {}))

    def run(monitored: bool) -> list[str]:
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        monitor = Monitor(model, optimizer, sample=1) if monitored else None
        with Counting() as mode:
            for _ in range(2):
                _step(model, optimizer)
        if monitor is not None:
            monitor.remove()
            assert len(monitor.steps) == 2 and monitor.steps[1].grad_norm is not None
        return mode.seen

    assert run(False) == run(True)


def test_deterministic_algorithms_are_enough() -> None:
    """No op of ours is one that torch refuses then."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    torch.use_deterministic_algorithms(True)
    try:
        with Monitor(model, optimizer, sample=1) as monitor:
            _step(model, optimizer)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not monitor.errors and monitor.steps[0].update_ratio is not None


def test_importing_nanhunt_loads_no_monitor() -> None:
    """`import nanhunt` stays as light as it was."""
    import subprocess

    code = "import sys, nanhunt; sys.exit(any(n in sys.modules for n in ('torch', 'nanhunt.monitor.front')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_reading_in_the_middle_of_a_step_leaves_the_step_whole() -> None:
    """`steps` and `symptoms` between backward and step show what is over, and the step goes on as one record."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Monitor(model, optimizer) as monitor, warnings.catch_warnings():
        warnings.simplefilter("error")
        _step(model, optimizer)
        optimizer.zero_grad()
        model(torch.randn(8, 6)).square().mean().backward()
        assert len(monitor.steps) == 1 and monitor.symptoms == ()
        optimizer.step()
        assert len(monitor.steps) == 2
    assert monitor.steps[1].grad_norm is not None and monitor.steps[1].lr == (0.1,)
