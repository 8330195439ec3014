"""Roots: every model that is called from outside is watched from that call on, and nothing of it stays."""

from __future__ import annotations

import gc
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.utils.flop_counter import FlopCounterMode

import nanhunt
from nanhunt import NonFiniteError, UsageError, roots, watcher
from nanhunt.roots import LIMIT, Roots, Watched


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """No hook, no callback, no filter and no running watch is left by any test."""

    def hung_up() -> list[int]:
        return [
            len(nn_module._global_forward_pre_hooks),
            len(nn_module._global_forward_hooks),
            len(gc.callbacks),
            len(watcher._active),
            sys.getrecursionlimit(),
            torch.utils._python_dispatch._get_current_dispatch_mode_stack().__len__(),
        ]

    before = hung_up()
    yield
    if len(nn_module._global_forward_hooks) > before[1]:
        torch._dynamo.reset()  # compiled code keeps the hooks that were traced into it
        nn.Identity()(torch.ones(1))
    assert hung_up() == before


class Net(nn.Module):
    """Two linears; `scale` is a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        out = self.head(self.encoder(x))
        return out if scale is None else out * scale


def train(model: nn.Module, steps: int = 3, x: Tensor | None = None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(2, 4) if x is None else x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


BAD = torch.full((2, 4), float("nan"))


# --- what is watched --------------------------------------------------------------------------------


def test_a_model_is_watched_from_its_first_call_on() -> None:
    """That very call counts: its hooks are hung up while torch already walks over those of this call."""
    with Roots() as hunt, pytest.raises(NonFiniteError) as stop:
        Net()(BAD)
    assert (stop.value.finding.phase, stop.value.finding.tensor, stop.value.finding.step) == ("input", "x", 0)
    assert hunt.finding is stop.value.finding


@pytest.mark.parametrize("detail", ["module", "auto", "op"])
def test_keyword_arguments_of_the_first_call_are_seen(detail: str) -> None:
    with Roots(detail=detail, on_hit="record") as hunt:
        Net()(torch.randn(2, 4), scale=torch.tensor(float("nan")))
    assert hunt.finding is not None
    assert (hunt.finding.phase, hunt.finding.tensor) == ("input", "scale")


def test_two_models_have_their_own_steps_and_findings_stand_in_the_order_of_their_coming() -> None:
    first, second = Net(), nn.Linear(4, 2)
    with Roots(on_hit="record") as hunt:
        train(first)
        train(second, 2)
        second(BAD)
        first(BAD)
    assert hunt.watched == [Watched(model="Net", steps=3, calls=4), Watched(model="Linear", steps=2, calls=3)]
    assert [(f.tensor, f.step) for f in hunt.findings if f.phase == "input"] == [("input", 2), ("x", 3)]
    assert hunt.finding is hunt.findings[0]
    assert len(hunt.watches) == 2


def test_calls_of_parts_start_nothing_and_what_a_forward_makes_on_the_fly_is_no_root() -> None:
    class Maker(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.Softmax(-1)(x)

    model, maker = Net(), Maker()
    for steps in (None, (5, 6)):  # also while nothing is looked at yet
        with Roots(steps=steps) as hunt:
            train(model, 1)
            model.encoder(torch.randn(2, 4))
            maker(torch.randn(2, 4))
        assert [one.model for one in hunt.watched] == ["Net", "Maker"]


def test_a_larger_model_takes_the_place_of_its_part() -> None:
    """A warm-up call of the encoder, then the model; what the part has found stays."""
    model = Net()
    with Roots(on_hit="record") as hunt:
        model.encoder(BAD)
        train(model)
        assert len(hunt.watches) == 1
        assert hunt.watches[0].model is model
    assert [(one.model, one.steps) for one in hunt.watched] == [("Linear", 0), ("Net", 3)]
    assert hunt.findings[0].phase == "input"


def test_a_watch_of_the_programs_own_is_left_alone() -> None:
    model = Net()
    with Roots() as hunt:
        with nanhunt.watch(model, on_hit="record") as own:
            train(model, 1, BAD)
        assert own.finding is not None
        assert (hunt.watched, hunt.findings) == ([], [])
        train(Net(), 1)
    assert [one.model for one in hunt.watched] == ["Net"]


def test_threads_each_bring_their_models() -> None:
    models = [Net() for _ in range(4)]
    with Roots() as hunt:
        threads = [threading.Thread(target=train, args=(model,)) for model in models]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert len(hunt.watched) == 4


def test_modes_of_the_moment_do_not_matter() -> None:
    """Inference mode, a traced call, a ScriptModule, a lazy one, a vmap: the program runs as it would."""
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 2), nn.ReLU()))
    with Roots(on_hit="record") as hunt:
        with torch.inference_mode():
            Net()(BAD)
        with torch.no_grad():
            assert nn.LazyLinear(3)(torch.randn(2, 4)).shape == (2, 3)
        assert torch.isfinite(scripted(torch.randn(2, 4))).all()
        torch.jit.trace(nn.Tanh(), torch.randn(2, 4))
        assert torch.vmap(nn.Linear(4, 2))(torch.randn(5, 4)).shape == (5, 2)
    assert [f.phase for f in hunt.findings] == ["input"]
    assert "Net" in [one.model for one in hunt.watched]


def test_a_mode_of_the_programs_comes_off_as_it_went_on() -> None:
    """At op level our own mode would stand above it, and its end would take ours off in its place."""
    model, x = nn.Linear(4, 2), torch.randn(2, 4)
    with Roots(detail="op", on_hit="record") as hunt:
        with FlopCounterMode(display=False) as flops:
            model(x)
        assert flops.get_total_flops() == 2 * 2 * 4 * 2
        assert hunt.watched == []
        model(BAD)
    assert hunt.finding is not None and hunt.finding.op is None and hunt.finding.phase == "input"


# --- what is not watched ----------------------------------------------------------------------------


def test_a_compiled_model_is_watched_inside_its_graph() -> None:
    ignored = [one[0] for one in warnings.filters].count("ignore")
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # torch speaks of global hooks, which are not the program's
        with Roots(on_hit="record") as hunt:
            fast = torch.compile(Net(), backend="eager")
            fast(BAD)
            train(nn.Linear(4, 2), 1)
        fast(BAD)  # the hooks stay while code lives that they were traced into, and torch stays silent about them
        torch._dynamo.reset()
        nn.Identity()(BAD)
        assert [one[0] for one in warnings.filters].count("ignore") == ignored
    assert [one.model for one in hunt.watched] == ["Net", "Linear"]
    assert hunt.finding is not None and hunt.finding.phase == "input"
    assert hunt.unwatched == []


def test_a_model_that_was_compiled_and_run_before_is_told_and_runs() -> None:
    fast = torch.compile(Net(), backend="eager")
    fast(torch.randn(2, 4))
    with Roots() as hunt:
        fast(BAD)
    assert hunt.watched == [] and len(hunt.unwatched) == 1
    assert hunt.unwatched[0].startswith("Net: ") and "was compiled and run before" in hunt.unwatched[0]
    assert 'compiled="eager"' in hunt.unwatched[0]


def test_compiled_models_and_functions_run_eagerly_where_that_was_asked_for() -> None:
    model = Net()
    inplace = Net()
    inplace.compile(backend="eager")
    step = torch.compile(lambda x: model(x).sum(), backend="eager")
    with Roots(compiled="eager", on_hit="record") as hunt:
        inplace(BAD)
        step(BAD)
    assert [f.phase for f in hunt.findings if f.phase == "input"] == ["input"] * 2
    assert hunt.unwatched == []


def test_a_compiled_function_is_told_of() -> None:
    """It passes no hook: that it ran is all there is to say."""
    model = Net()
    step = torch.compile(lambda x: model(x).sum(), backend="eager")
    with Roots() as hunt:
        step(torch.randn(2, 4))
    assert hunt.watched == []
    assert hunt.unwatched[0].startswith("code under torch.compile: it calls models where no hook sees it")


def test_what_cannot_be_watched_is_told_once_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong while a watch begins, no hook of it stays and the program goes on."""
    monkeypatch.setattr(watcher.Watch, "_hook_parameters", lambda self: 1 / 0)
    model = Net()
    with Roots() as hunt:
        hooks = len(nn_module._global_forward_pre_hooks)
        train(model)
        assert len(nn_module._global_forward_pre_hooks) == hooks
    assert hunt.unwatched == ["Net: ZeroDivisionError: division by zero"]


# --- models that come and go ------------------------------------------------------------------------


def test_a_model_that_dies_is_let_go_with_its_memory() -> None:
    """Nobody but its watch keeps it: it goes when the next one comes."""
    with Roots() as hunt:
        model = Net()
        train(model)
        gone, weight = weakref.ref(model), weakref.ref(model.head.weight)
        del model
        train(nn.Linear(4, 2))
        assert gone() is None and weight() is None
        assert len(hunt.watches) == 1
    assert [one.model for one in hunt.watched] == ["Net", "Linear"]


def test_a_model_in_a_cycle_dies_in_the_next_full_collection() -> None:
    with Roots(on_hit="record") as hunt:
        model: Any = Net()
        model.itself = [model]
        model(BAD)
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None
        train(nn.Linear(4, 2))
        assert len(hunt.watches) == 1
    assert hunt.finding is not None


def test_a_model_that_lives_is_watched_on_after_any_number_of_searches() -> None:
    """Its names are as they were, a part that was put in later among them."""
    with Roots(on_hit="record") as hunt:
        model = Net()
        train(model)
        gc.collect()
        nn.Tanh()(torch.randn(2))
        model.head = nn.Linear(4, 2)
        gc.collect()
        train(model)
        with torch.no_grad():
            model.head.weight.fill_(float("nan"))
        train(model, 1)
    assert hunt.finding is not None
    assert hunt.finding.tensor == "head.weight"


def test_modules_made_by_the_thousand_cost_a_bounded_number_of_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(roots, "watch", lambda *a, **k: made.append(1) or nanhunt.watch(*a, **k))
    with Roots() as hunt:
        for _ in range(1000):
            nn.Softmax(-1)(torch.randn(2, 2))
        kept = [nn.Linear(4, 2) for _ in range(1000)]
        for one in kept:
            one(torch.randn(2, 4))
    assert len(made) == 16 + LIMIT
    assert len(hunt.watches) == LIMIT
    assert [text.split(":")[0] for text in hunt.unwatched] == ["Softmax", "Linear"]
    assert "made anew again and again" in hunt.unwatched[0]
    assert f"{LIMIT} models are watched at a time" in hunt.unwatched[1]


@pytest.mark.parametrize("calls", [2, 3, 8])
def test_a_tired_class_is_watched_again_from_the_third_call_of_an_instance_on(calls: int) -> None:
    """Sixteen heads that live for one call must not hide the model that is trained after them."""
    with Roots(on_hit="record") as hunt:
        for _ in range(roots._TIRED):
            nn.Sequential(nn.Linear(4, 2))(torch.randn(2, 4))
        model = nn.Sequential(nn.Linear(4, 2))
        train(model, calls - 1)
        train(model, 1, BAD)
    assert (hunt.finding is not None) == (calls > 2)
    assert len(hunt.watched) == roots._TIRED + (calls > 2)
    assert [text.split(":")[0] for text in hunt.unwatched] == ["Sequential"]
    assert "16 were watched, later ones only once they had been called a few times" in hunt.unwatched[0]


def test_instances_that_are_called_a_few_times_each_cost_a_watch_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []
    monkeypatch.setattr(roots, "watch", lambda *a, **k: made.append(1) or nanhunt.watch(*a, **k))
    with Roots() as hunt:
        for _ in range(300):
            one = nn.Softmax(-1)
            for _ in range(5):
                one(torch.randn(2, 2))
        # The first that proved itself was short-lived, too, which is noticed with the second: then more is asked for.
        assert len(made) == roots._TIRED + 2
        for _ in range(60):
            one(torch.randn(2, 2))
        assert hunt.watched[-1].calls == 60
        del one
        nn.Linear(2, 2)(torch.randn(2, 2))  # the search for the dead comes with the next newcomer
        again = nn.Softmax(-1)
        again(torch.randn(2, 2))  # one that has lived long makes the class a trusted one
    assert [told.calls for told in hunt.watched[-2:]] == [1, 1] and hunt.watches[-1].model is again


def test_models_of_one_class_that_are_trained_one_after_the_other_are_all_watched() -> None:
    """A search over hyperparameters is no churn."""
    with Roots() as hunt:
        for _ in range(20):
            train(Net(), 10)
    assert [one.steps for one in hunt.watched] == [10] * 20
    assert hunt.unwatched == []


def test_a_new_module_at_an_old_address_is_not_taken_for_the_old_one() -> None:
    with Roots() as hunt:
        old, new = nn.Linear(4, 2), Net()
        hunt._known[id(new)] = weakref.ref(old), ()  # as if `old` had died and `new` been made in its memory
        del old
        train(new)
    assert [one.model for one in hunt.watched] == ["Net"]


# --- the end ----------------------------------------------------------------------------------------


def test_what_the_program_dies_of_bears_the_finding_once() -> None:
    model, loss = Net(), nn.Softmax(-1)
    with pytest.raises(RuntimeError) as died, Roots(on_hit="record") as hunt:
        torch.multinomial(loss(model(BAD)), 1)
    assert died.value.nanhunt_finding is hunt.finding  # type: ignore[attr-defined]
    if sys.version_info >= (3, 11):
        assert len(died.value.__notes__) == 1


def test_the_step_that_was_not_finished_is_looked_at() -> None:
    """As when a `with nanhunt.watch` ends: a weight that was spoilt after the last call."""
    model = Net()
    with pytest.raises(NonFiniteError), Roots() as hunt:
        train(model, 1)
        model(torch.randn(2, 4)).sum().backward()
        with torch.no_grad():
            model.head.weight.fill_(float("nan"))
    assert hunt.finding is not None


def test_each_finding_is_passed_on_before_it_is_raised() -> None:
    told: list[nanhunt.Finding] = []
    hunt = Roots()
    hunt.noted = told.append
    with hunt, pytest.raises(NonFiniteError) as stop:
        Net()(BAD)
    assert told == [stop.value.finding]


def test_a_warning_that_the_programs_filters_turn_into_an_error_is_its_own_wish() -> None:
    """It leaves the step as an exception, and is not taken for a failure of the watch; also from the last look."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for opened in (Roots(on_hit="warn"), nanhunt.watch(model := Net(), on_hit="warn")):
            with pytest.raises(nanhunt.NonFiniteWarning, match="already held a nan"), opened as hunt:
                (Net() if isinstance(opened, Roots) else model)(BAD)
                raise AssertionError("the step went on")
            assert hunt.finding is not None
            assert list(getattr(hunt, "errors", [])) == []
        with pytest.raises(nanhunt.NonFiniteWarning), nanhunt.watch(model, on_hit="warn"):
            model(torch.randn(2, 4)).sum().backward()
            with torch.no_grad():
                model.head.weight.fill_(float("nan"))


# --- options ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"detail": "deep"}, "detail='deep' is not known: use one of 'auto', 'module', 'op'"),
        ({"every": 0}, "every=0: give a whole number of steps, 1 or more"),
        ({"optimizer": None}, "'optimizer' is no option here: use on_hit, stop, detail, kinds, allow, steps, every"),
        ({"colour": 1}, "'colour' is no option here"),
    ],
)
def test_options_are_checked_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        Roots(**options)
    assert message in str(refused.value)


def test_options_reach_the_watches() -> None:
    with Roots(steps=(1, 2), kinds=("nan",), on_hit="record") as hunt:
        model = Net()
        model(torch.full((2, 4), float("inf")))
        train(model, 1)
        train(model, 1, BAD)
    assert [f.step for f in hunt.findings if f.phase == "input"] == [1]


def test_stopped_roots_do_not_start_again_and_can_be_stopped_twice() -> None:
    hunt = Roots()
    with hunt:
        pass
    hunt.stop()
    with pytest.raises(UsageError, match="were stopped: make new ones"):
        hunt.start()


def test_the_switch_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANHUNT", "0")
    with Roots() as hunt:
        assert len(nn_module._global_forward_pre_hooks) == 0
        Net()(BAD)
    assert (hunt.watched, hunt.findings, hunt.unwatched) == ([], [], [])
