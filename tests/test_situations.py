"""Watching changes nothing: each situation gives the same bits plain and watched, and nothing is left behind."""

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from .situations.eager import SITUATIONS
from .situations.harness import MODES, Spans, check, compare, perform, reference


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


@pytest.mark.parametrize("name", SITUATIONS)
def test_situation_is_reproducible(name: str) -> None:
    """Two plain runs of a situation are equal, so that a difference is the watch's doing."""
    situation = SITUATIONS[name]
    first = reference(situation)
    assert first.marks, "the situation opens no watch"
    assert not compare(situation, first, perform(situation, Spans()))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SITUATIONS)
def test_watching_changes_nothing(name: str, mode: str) -> None:
    """A watched run has the results of the plain one to the bit, and leaves no hook, attribute or patch."""
    situation = SITUATIONS[name]
    if mode in situation.skips:
        pytest.skip(situation.skips[mode])
    check(situation, _watch, **MODES[mode])


def test_there_are_many_situations() -> None:
    """The catalogue holds what was measured to break one hooking mechanism or another."""
    assert len(SITUATIONS) >= 200
    short = [situation.name for situation in SITUATIONS.values() if len(situation.text.split()) < 4]
    assert not short, f"these do not say what they are: {short}"


Fault = Callable[[nn.Module], Any]


def _hooked(hook: Callable[..., Any]) -> Fault:
    return lambda model: (
        model[0].register_forward_hook(hook)
        if isinstance(model, nn.Sequential)
        else model.stem.register_forward_hook(hook)
    )


def _scale_grad(module: nn.Module, args: Any, out: Tensor) -> None:
    out.register_hook(lambda g: g * (1 + 1e-6))


def _touch(module: nn.Module, args: Any, out: Tensor) -> None:
    out.data.add_(0)


def _bump(module: nn.Module, args: Any, out: Tensor) -> None:
    with torch.no_grad():
        out.add_(0)


class _Stays:
    """A handle whose removal does nothing."""

    def remove(self) -> None:
        pass


def _leaves(attach: Callable[[nn.Module], object]) -> Fault:
    def fault(model: nn.Module) -> _Stays:
        attach(model)
        return _Stays()

    return fault


def _patch(owner: Any, name: str) -> Fault:
    def fault(model: nn.Module) -> Any:
        old = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: old(*args, **kwargs))
        CLEANUP.append(lambda: setattr(owner, name, old))
        return _Stays()

    return fault


def _global_hook(model: nn.Module) -> _Stays:
    CLEANUP.append(register_module_forward_hook(lambda m, a, o: None).remove)
    return _Stays()


def _recursion(model: nn.Module) -> _Stays:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + 300)
    CLEANUP.append(lambda: sys.setrecursionlimit(limit))
    return _Stays()


CLEANUP: list[Callable[[], object]] = []
SABOTAGE: dict[str, tuple[Fault, str]] = {
    "an output is one ulp off": (_hooked(lambda m, a, o: o * (1 + 1e-6)), "bits"),
    "an output is a copy with other strides": (_hooked(lambda m, a, o: o.t().contiguous().t()), "result"),
    "a gradient is one ulp off": (_hooked(_scale_grad), "bits"),
    "a random number is drawn": (_hooked(lambda m, a, o: torch.rand(1) and None), "rng"),
    "numpy draws": (_hooked(lambda m, a, o: __import__("numpy").random.rand() and None), "rng"),
    "a parameter is written through .data": (_leaves(lambda m: next(m.parameters()).data.mul_(1.0001)), "bits"),
    "a version is bumped": (_leaves(lambda m: _bump(m, (), next(m.parameters()))), "result"),
    "a parameter no longer wants a gradient": (_leaves(lambda m: next(m.parameters()).requires_grad_(False)), "result"),
    "a global hook stays": (_global_hook, "world: changed: hooks _global_forward_hooks"),
    "a module hook stays": (_leaves(lambda m: m.stem.register_forward_hook(lambda m, a, o: None)), "left behind"),
    "a parameter hook stays": (
        _leaves(lambda m: m.stem.weight.register_post_accumulate_grad_hook(lambda p: None)),
        "left behind",
    ),
    "a tensor hook stays on a leaf": (_leaves(lambda m: m.stem.weight.register_hook(lambda g: None)), "left behind"),
    "an attribute stays on a module": (_leaves(lambda m: setattr(m.stem, "nanhunt", 1)), "left behind"),
    "an attribute stays on a parameter": (_leaves(lambda m: setattr(m.stem.weight, "nanhunt", 1)), "left behind"),
    "the engine stays patched": (
        _patch(torch.autograd, "_engine_run_backward"),
        "world: changed: function torch.autograd",
    ),
    "the scaler stays patched": (_patch(torch.amp.GradScaler, "step"), "GradScaler.step"),
    "Tensor stays patched": (_patch(Tensor, "backward"), "Tensor.backward"),
    "the recursion limit stays": (_recursion, "recursion limit"),
    "a warning is shown": (_leaves(lambda m: warnings.warn("hooked", stacklevel=1)), "new warning"),
    "a line is printed": (_leaves(lambda m: print("nanhunt: hello")), "printed"),
}


class _Fake:
    """A watch that does one thing wrong."""

    def __init__(self, fault: Fault | None = None, **facts: Any) -> None:
        self.fault = fault
        self.hunt = SimpleNamespace(**{"errors": [], "finding": None, "seen": 1, **facts})

    @contextlib.contextmanager
    def __call__(self, model: nn.Module, *args: Any, **kwargs: Any) -> Iterator[Any]:
        handle = self.fault(model) if self.fault else _Stays()
        yield self.hunt
        handle.remove()


@pytest.fixture
def cleanup() -> Iterator[None]:
    """Undo what a sabotage has done to torch itself."""
    yield
    while CLEANUP:
        CLEANUP.pop()()


@pytest.mark.usefixtures("cleanup")
@pytest.mark.parametrize("what", SABOTAGE)
def test_the_harness_catches(what: str) -> None:
    """A watch with one deliberate fault fails the comparison, in words that name the fault."""
    fault, words = SABOTAGE[what]
    with pytest.raises(AssertionError, match="baseline: ") as caught:
        check(SITUATIONS["baseline"], _Fake(fault))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"errors": [KeyError(3)]}, r"internal failure: KeyError\(3\)"),
        (
            {"finding": SimpleNamespace(title=lambda: "NaN born in stem")},
            "found in a healthy program: NaN born in stem",
        ),
        ({"seen": 0}, "blind"),
    ],
)
def test_the_harness_reads_the_hunt(facts: dict[str, Any], words: str) -> None:
    """Failures inside the watch, false findings and blindness fail a situation too."""
    with pytest.raises(AssertionError, match=words):
        check(SITUATIONS["baseline"], _Fake(**facts))


def test_the_harness_passes_a_harmless_watch() -> None:
    """A watch that does nothing wrong passes, so the controls above fail for their own reason."""
    check(SITUATIONS["baseline"], _Fake())


class _Handle:
    """The watch as a program keeps it that does not use `with`: it begins with the call and ends with remove()."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.hunt = _watch(*args, **kwargs)

    def __enter__(self) -> Any:
        return self.hunt

    def __exit__(self, *error: object) -> None:
        self.hunt.remove()


@pytest.mark.parametrize("name", ["baseline", "checkpoint_nonreentrant", "grad_scaler_found", "returns_own_parameter"])
def test_a_handle_without_with_changes_nothing(name: str) -> None:
    """remove() takes everything off that the call has put on."""
    check(SITUATIONS[name], _Handle)
