"""How nanhunt is used, and misused: options, steps, several watches, a program that dies, loss scaling."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

import nanhunt

# A watch that met an error of its own warns when it is removed: here that fails the test.
pytestmark = pytest.mark.filterwarnings("error::nanhunt.NonFiniteWarning")
ROOT = Path(nanhunt.__file__).parent.parent


@pytest.fixture(autouse=True)
def nothing_is_left_attached(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("NANHUNT", raising=False)
    torch.manual_seed(0)
    before = attached()
    yield
    assert attached() == before


def attached() -> tuple[Any, ...]:
    """What a watch hangs into torch, as far as it can be seen from outside."""
    scaler = vars(torch.amp.GradScaler)
    return (
        list(torch_module._global_forward_hooks),
        list(torch_module._global_forward_pre_hooks),
        list(torch_optimizer._global_optimizer_pre_hooks),
        list(torch_optimizer._global_optimizer_post_hooks),
        torch.autograd._engine_run_backward,
        [scaler[name] for name in ("scale", "step", "update")],
        sys.getrecursionlimit(),
    )


# --- small models that go wrong when they are told to -----------------------------------------------


class Maker(nn.Module):
    """Hands its input on, and makes one kind of bad value while `makes` is set."""

    def __init__(self, makes: str | None = None) -> None:
        super().__init__()
        self.makes = makes
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.makes == "nan":
            return (-x.abs() - 1).sqrt()
        if self.makes == "+inf":
            return (x.abs() + 1) * 1e38 * 1e38
        if self.makes == "-inf":
            return (x.abs() + 1) * 1e38 * -1e38
        return x * 1


def chain(**makers: str | None) -> nn.Sequential:
    """fc, then a maker for each name, then last."""
    model = nn.Sequential()
    model.add_module("fc", nn.Linear(4, 4))
    for name, makes in makers.items():
        model.add_module(name, Maker(makes))
    model.add_module("last", Maker())
    return model


def train(
    model: nn.Module,
    steps: int,
    *,
    before: Callable[[int], None] = lambda step: None,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Plain steps with an optimizer that the watch has to find; `before` is told each step's number."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(steps):
        before(step)
        optimizer.zero_grad()
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()


def bad_in(model: nn.Sequential, *steps: int, makes: str = "nan", name: str = "m") -> Callable[[int], None]:
    """The maker is switched on in these steps only."""

    def before(step: int) -> None:
        model.get_submodule(name).makes = makes if step in steps else None  # type: ignore[assignment]

    return before


# --- errors of use, word by word --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "got"),
    [
        (None, "NoneType"),
        ([nn.Linear(1, 1)], "list"),
        (nn.Linear, "type"),
        (torch.relu, "builtin_function_or_method"),
    ],
)
def test_what_is_no_module_is_refused(model: Any, got: str) -> None:
    with pytest.raises(nanhunt.UsageError) as error:
        nanhunt.watch(model)
    assert str(error.value) == f"nanhunt.watch needs a torch.nn.Module, got {got}: pass the model itself"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"on_hit": "print"},
            "on_hit='print' is not known: use one of 'raise', 'warn', 'record' or a callable that gets the Finding",
        ),
        (
            {"on_hit": None},
            "on_hit=None is not known: use one of 'raise', 'warn', 'record' or a callable that gets the Finding",
        ),
        ({"stop": "last"}, "stop='last' is not known: use one of 'confirmed', 'first'"),
        ({"detail": "ops"}, "detail='ops' is not known: use one of 'auto', 'module', 'op'"),
        ({"compiled": "yes"}, "compiled='yes' is not known: use one of 'error', 'eager', 'retrace'"),
        ({"kinds": "inf"}, "kinds='inf' is not known: use one of 'nan', '+inf', '-inf'"),
        ({"kinds": ["nan", "NaN"]}, "kinds='NaN' is not known: use one of 'nan', '+inf', '-inf'"),
        ({"kinds": ()}, "kinds is empty: name at least one of nan, +inf, -inf"),
        ({"steps": 5}, "steps=5: give a pair (first, end) with 0 <= first < end, such as steps=(100, 200)"),
        (
            {"steps": (3, 3)},
            "steps=(3, 3): give a pair (first, end) with 0 <= first < end, such as steps=(100, 200)",
        ),
        (
            {"steps": (-1, 3)},
            "steps=(-1, 3): give a pair (first, end) with 0 <= first < end, such as steps=(100, 200)",
        ),
        ({"every": 0}, "every=0: give a whole number of steps, 1 or more"),
        ({"every": 1.5}, "every=1.5: give a whole number of steps, 1 or more"),
        ({"every": True}, "every=True: give a whole number of steps, 1 or more"),
        ({"optimizer": "adam"}, "optimizer is a str: pass a torch.optim.Optimizer, or leave it out"),
        ({"scaler": 2.0}, "scaler is a float: pass a torch.amp.GradScaler, or leave it out"),
    ],
)
@pytest.mark.parametrize("switch", ["1", "0"])
def test_a_bad_option_is_refused_with_the_legal_ones(
    options: dict[str, Any], message: str, switch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Switched off as well: a program must not break when nanhunt is switched on again."""
    monkeypatch.setenv("NANHUNT", switch)
    with pytest.raises(nanhunt.UsageError) as error:
        nanhunt.watch(nn.Linear(1, 1), **options)
    assert str(error.value) == message


def test_an_option_that_does_not_exist_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'onhit'"):
        nanhunt.watch(nn.Linear(1, 1), onhit="warn")  # type: ignore[call-arg]


def test_misuse_can_be_caught_as_a_value_error_or_by_its_own_name() -> None:
    assert issubclass(nanhunt.UsageError, (nanhunt.NanhuntError, ValueError))
    assert issubclass(nanhunt.UsageError, nanhunt.NanhuntError) and issubclass(nanhunt.UsageError, ValueError)
    assert issubclass(nanhunt.NonFiniteError, FloatingPointError)
    assert not issubclass(nanhunt.NonFiniteError, nanhunt.NanhuntError), "a fault of the training, not of use"


def test_a_removed_watch_can_not_be_entered_again() -> None:
    hunt = nanhunt.watch(chain())
    with hunt:
        pass
    with pytest.raises(nanhunt.UsageError) as error, hunt:
        pass
    assert str(error.value) == "this watch was removed: make a new one with nanhunt.watch(model)"


def test_a_model_that_was_compiled_and_run_before_is_refused_because_nothing_can_be_added_to_its_graph() -> None:
    torch._dynamo.reset()
    model: Any = torch.compile(chain(), backend="eager")
    with nanhunt.watch(model):
        pass
    model(torch.ones(2, 4))
    with pytest.raises(nanhunt.UsageError) as error:
        nanhunt.watch(model)
    assert str(error.value) == (
        "the model (OptimizedModule) was compiled and run before it was watched, and no check can be added to a "
        "compiled graph: open the watch before the first compiled call, or use "
        'nanhunt.watch(model, compiled="retrace") to have it compiled once more with the checks, or '
        'nanhunt.watch(model, compiled="eager") to run it eagerly while it is watched'
    )
    torch._dynamo.reset()


def test_a_compiled_model_can_be_watched_eagerly_under_the_names_of_the_user() -> None:
    model: Any = torch.compile(chain(m="nan"), backend="eager")
    with pytest.raises(nanhunt.NonFiniteError) as stop, nanhunt.watch(model, compiled="eager"):
        model(torch.ones(2, 4))
    assert stop.value.finding.module == "m"


# --- the switch -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["maybe", "", "true", "2", " 1"])
def test_a_bad_value_of_the_switch_names_the_legal_ones(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANHUNT", value)
    with pytest.raises(nanhunt.UsageError) as error:
        nanhunt.watch(chain())
    assert str(error.value) == (
        f"NANHUNT={value!r} is not a legal value: use NANHUNT=1 (on, the default) or NANHUNT=0 (off)"
    )


def test_switched_off_it_looks_at_nothing_and_offers_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANHUNT", "0")
    before = attached()
    model = chain(m="nan")
    with nanhunt.watch(model, on_hit="raise", stop="first") as hunt:
        assert attached() == before
        train(model, 2)
    assert isinstance(hunt, nanhunt.Watch)
    assert (hunt.finding, hunt.findings, hunt.errors, hunt.step, hunt.seen) == (None, [], [], 0, 0)
    assert hunt.model is model
    hunt.remove()
    hunt.remove()


def test_switched_off_it_offers_every_public_name_of_a_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    on = nanhunt.watch(chain())
    on.remove()
    monkeypatch.setenv("NANHUNT", "0")
    off = nanhunt.watch(chain())
    for name in {*vars(on), *dir(type(on))}:
        if not name.startswith("_") and not name.startswith("on_"):
            getattr(off, name)


def test_switched_off_a_compiled_model_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANHUNT", "0")
    model: Any = torch.compile(chain(), backend="eager")
    with nanhunt.watch(model):
        pass


def test_switched_on_by_name_it_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANHUNT", "1")
    with pytest.raises(nanhunt.NonFiniteError), nanhunt.watch(model := chain(m="nan")):
        train(model, 1)


# --- importing --------------------------------------------------------------------------------------


def in_a_new_python(code: str) -> str:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


_HEAVY = "print(sorted({'torch', 'numpy'} & set(sys.modules)))"


def test_importing_nanhunt_does_not_import_torch() -> None:
    torch_free = "nanhunt.Finding, nanhunt.TensorStats, nanhunt.NonFiniteError, nanhunt.UsageError, dir(nanhunt)"
    assert in_a_new_python(f"import sys, nanhunt; {torch_free}; {_HEAVY}") == "[]"


def test_the_check_above_can_fail() -> None:
    assert in_a_new_python(f"import sys, nanhunt; nanhunt.watch; {_HEAVY}") == "['numpy', 'torch']"


def test_the_public_names_are_there_and_keep_working_after_first_use() -> None:
    for _ in range(2):
        for name in nanhunt.__all__:
            assert getattr(nanhunt, name).__module__.startswith("nanhunt.")
    assert set(nanhunt.__all__) <= set(dir(nanhunt))
    with pytest.raises(AttributeError) as error:
        nanhunt.wacth  # type: ignore[attr-defined]  # noqa: B018
    assert str(error.value) == f"module 'nanhunt' has no attribute 'wacth': it offers {', '.join(nanhunt.__all__)}"


def test_a_type_checker_sees_the_public_names(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy reads the types")
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = true\n[mypy-torch.*]\nfollow_imports = skip\n")
    (tmp_path / "used.py").write_text(
        "import nanhunt\n"
        "def use(model: object) -> None:\n"
        "    with nanhunt.watch(model, on_hit=print) as hunt:  # type: ignore[arg-type, unused-ignore]\n"
        "        reveal_type(hunt)\n"
        "    reveal_type(hunt.finding)\n"
        "    try:\n"
        "        pass\n"
        "    except nanhunt.NonFiniteError as stop:\n"
        "        reveal_type(stop.finding.module)\n"
        "    nanhunt.watch(model, onhit='warn')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "used.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    told = [line.partition(": ")[2] for line in ended.stdout.splitlines() if line.startswith("used.py")]
    assert told[0] == 'note: Revealed type is "nanhunt.watcher.Watch"'
    assert "Finding | None" in told[1]
    assert told[2] == 'note: Revealed type is "str | None"'
    assert told[3].startswith('error: Unexpected keyword argument "onhit" for "watch"')


# --- on_hit -----------------------------------------------------------------------------------------


def test_raise_is_the_default_and_the_error_is_the_page() -> None:
    model = chain(m="nan")
    with pytest.raises(nanhunt.NonFiniteError) as stop, nanhunt.watch(model) as hunt:
        train(model, 1)
    assert stop.value.finding is hunt.finding
    assert hunt.findings == [hunt.finding]
    assert str(stop.value) == str(hunt.finding)
    assert str(stop.value).startswith("m (Maker) made the first nan, in forward, step 0\n")


def test_warn_says_the_page_and_goes_on() -> None:
    model = chain(m=None)
    with pytest.warns(nanhunt.NonFiniteWarning) as told, nanhunt.watch(model, on_hit="warn") as hunt:
        for step in range(3):
            bad_in(model, 1)(step)
            model(torch.ones(2, 4))
    assert [str(one.message) for one in told] == [str(hunt.finding)]
    assert issubclass(nanhunt.NonFiniteWarning, RuntimeWarning)


def test_record_says_nothing_and_goes_on() -> None:
    model = chain(m=None)
    with nanhunt.watch(model, on_hit="record") as hunt, torch.no_grad():
        for step in range(4):
            bad_in(model, 1, 3)(step)
            model(torch.ones(2, 4))
    assert hunt.finding is hunt.findings[0]
    assert [one.module for one in hunt.findings] == ["m", "m"]


def test_a_callable_gets_the_finding_while_the_step_still_runs() -> None:
    model = chain(m="nan")
    got: list[tuple[nanhunt.Finding, int]] = []

    def look(finding: nanhunt.Finding) -> None:
        got.append((finding, model.last.calls))  # type: ignore[union-attr, arg-type]

    with nanhunt.watch(model, on_hit=look) as hunt:
        model(torch.ones(2, 4))
        assert got == [(hunt.finding, 1)]


def test_what_follows_from_a_reported_fault_is_no_second_hit() -> None:
    model = chain(m="nan")
    hits: list[nanhunt.Finding] = []
    with nanhunt.watch(model, on_hit=hits.append) as hunt:
        train(model, 1)
    assert [(one.module, one.phase) for one in hits] == [("m", "forward")]
    assert hunt.findings == hits


def test_what_is_no_fault_is_no_hit() -> None:
    """`handled` findings are recorded, and no callable hears of them."""
    model = nn.Sequential(nn.Linear(4, 4), Maker("+inf"), nn.Tanh())
    hits: list[nanhunt.Finding] = []
    with nanhunt.watch(model, on_hit=hits.append) as hunt, torch.no_grad():
        model(torch.ones(2, 4))
    assert (hits, hunt.finding) == ([], None)
    assert [(one.module, one.kind, one.handled) for one in hunt.findings] == [("1", "+inf", "absorbed")]


def test_the_record_is_bounded() -> None:
    model = chain(m="nan")
    with nanhunt.watch(model, on_hit="record") as hunt, torch.no_grad():
        for _ in range(150):
            model(torch.ones(2, 4))
            hunt._turn()
    assert len(hunt.findings) == 100


# --- stop -------------------------------------------------------------------------------------------


def test_confirmed_stops_when_the_value_has_left_the_model_and_first_at_the_birth() -> None:
    for stop, later in (("confirmed", 1), ("first", 0)):
        model = chain(m="nan")
        with pytest.raises(nanhunt.NonFiniteError) as error, nanhunt.watch(model, stop=stop):
            model(torch.ones(2, 4))
        assert error.value.finding.module == "m"
        assert model.last.calls == later  # type: ignore[union-attr]


def test_confirmed_lets_an_absorbed_value_pass_and_first_does_not() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Maker("+inf"), nn.Tanh())
    with nanhunt.watch(model, stop="confirmed"), torch.no_grad():
        model(torch.ones(2, 4))
    with pytest.raises(nanhunt.NonFiniteError) as error, nanhunt.watch(model, stop="first"), torch.no_grad():
        model(torch.ones(2, 4))
    assert (error.value.finding.module, error.value.finding.handled) == ("1", None)


def test_first_lets_an_infinity_pass_that_was_meant() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.masked_fill(torch.eye(4, dtype=torch.bool), float("-inf"))

    model = nn.Sequential(nn.Linear(4, 4), Masked(), nn.Softmax(-1))
    with nanhunt.watch(model, stop="first") as hunt:
        model(torch.ones(4, 4)).mean().backward()
    assert hunt.finding is None


# --- kinds, allow, steps, every ---------------------------------------------------------------------


@pytest.mark.parametrize("made", ["nan", "+inf", "-inf"])
@pytest.mark.parametrize("wanted", ["nan", "+inf", "-inf"])
def test_kinds_picks_what_counts(made: str, wanted: str) -> None:
    model = chain(m=made)
    with torch.no_grad(), nanhunt.watch(model, kinds=[wanted], on_hit="record") as hunt:
        model(torch.ones(2, 4))
    assert [one.kind for one in hunt.findings] == ([made] if made == wanted else [])


def test_an_infinity_that_turns_into_nan_counts_as_nan_too() -> None:
    class MinusItself(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x

    model = nn.Sequential(nn.Linear(4, 4), Maker("+inf"), MinusItself())
    with torch.no_grad(), nanhunt.watch(model, kinds="nan", on_hit="record") as hunt:
        model(torch.ones(2, 4))
    assert [(one.module, one.kind) for one in hunt.findings] == [("1", "+inf")]


@pytest.mark.parametrize(
    ("allow", "found"), [("m", None), (["x", "m*"], None), ("*", None), ("x", "m"), ((), "m"), ("", "m")]
)
def test_allow_names_modules_whose_values_are_no_fault(allow: Any, found: str | None) -> None:
    model = chain(m="nan")
    with nanhunt.watch(model, on_hit="record", allow=allow) as hunt:
        train(model, 1)
    assert (hunt.finding and hunt.finding.module) == found


def test_steps_are_a_half_open_range() -> None:
    for bad, found in ((0, None), (1, 1), (2, 2), (3, None)):
        model = chain(m=None)
        with nanhunt.watch(model, steps=(1, 3), on_hit="record") as hunt, torch.no_grad():
            for step in range(5):
                bad_in(model, bad)(step)
                model(torch.ones(2, 4))
                hunt._turn()
        assert (hunt.finding and hunt.finding.step) == found
        assert hunt.step == 5


def test_outside_of_steps_nothing_is_looked_at() -> None:
    model = chain()
    with nanhunt.watch(model, steps=(2, 3)) as hunt:
        train(model, 2)
        assert hunt.seen == 0
        train(model, 1)
        seen = hunt.seen
        assert seen > 0
        train(model, 3)
        assert hunt.seen == seen
    assert hunt.step == 6


def test_an_optimizer_that_calls_the_step_of_its_parent_ends_one_step() -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    model = nn.Linear(2, 2)
    optimizer = Own(model.parameters(), lr=0.1)
    torch.optim.SGD(model.parameters(), lr=0.1)  # from here on torch runs the hooks of both
    with nanhunt.watch(model, optimizer) as hunt:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert hunt.step == 3


def test_every_looks_at_each_nth_step() -> None:
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    looked = []
    with nanhunt.watch(model, every=3) as hunt:
        for _ in range(7):
            seen = hunt.seen
            train(model, 1, optimizer=optimizer)
            looked.append(hunt.seen > seen)
    assert looked == [True, False, False, True, False, False, True]


def test_every_finds_the_state_that_a_skipped_step_has_left() -> None:
    model = chain(m=None)
    with pytest.raises(nanhunt.NonFiniteError) as stop, nanhunt.watch(model, every=2):
        train(model, 3, before=bad_in(model, 1))
    found = stop.value.finding
    assert (found.step, found.phase, found.kind) == (2, "state", "nan")


# --- the life of a watch ----------------------------------------------------------------------------


def test_a_handle_watches_from_the_call_until_it_is_removed() -> None:
    model = chain(m=None)
    hunt = nanhunt.watch(model)
    try:
        train(model, 2)
        assert hunt.step == 2 and hunt.seen > 0
        model.m.makes = "nan"  # type: ignore[union-attr, assignment]
        with pytest.raises(nanhunt.NonFiniteError):
            train(model, 1)
        assert hunt.finding is not None
    finally:
        hunt.remove()
    hunt.remove()
    seen = hunt.seen
    train(model, 1)
    assert hunt.seen == seen
    assert hunt.finding is hunt.findings[0]


def test_after_a_stop_the_same_handle_goes_on() -> None:
    model = chain(m="nan")
    hunt = nanhunt.watch(model)
    try:
        for _ in range(2):
            with pytest.raises(nanhunt.NonFiniteError) as stop:
                model(torch.ones(2, 4))
            assert stop.value.finding.module == "m"
            hunt._turn()
    finally:
        hunt.remove()
    assert len(hunt.findings) == 2


def test_a_recursion_limit_that_the_program_sets_meanwhile_stays() -> None:
    before = sys.getrecursionlimit()
    try:
        with nanhunt.watch(nn.Linear(2, 2)):
            assert sys.getrecursionlimit() > before
        assert sys.getrecursionlimit() == before
        with nanhunt.watch(nn.Linear(2, 2)):
            sys.setrecursionlimit(before + 2000)  # as Inductor does
        assert sys.getrecursionlimit() == before + 2000
    finally:
        sys.setrecursionlimit(before)


def test_a_second_watch_on_the_same_model_starts_anew() -> None:
    model = chain(m=None)
    with nanhunt.watch(model) as first:
        train(model, 3)
    model.m.makes = "nan"  # type: ignore[union-attr, assignment]
    with pytest.raises(nanhunt.NonFiniteError) as stop, nanhunt.watch(model) as second:
        train(model, 1)
    assert (first.finding, first.step) == (None, 3)
    assert stop.value.finding is second.finding
    assert stop.value.finding.step == 0


def test_backward_after_the_block_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x = torch.zeros(2, 4, requires_grad=True)
    with nanhunt.watch(model) as hunt:
        loss = (model(x) * 0).sqrt().sum()
    seen = hunt.seen
    loss.backward()
    assert model[0].weight.grad.isnan().any()
    assert (hunt.finding, hunt.seen) == (None, seen)
    assert not x._backward_hooks


def test_a_watch_does_not_keep_the_model_alive() -> None:
    import weakref

    model = chain()
    with nanhunt.watch(model) as hunt:
        train(model, 1)
    gone = weakref.ref(model)
    del model, hunt
    gc.collect()
    assert gone() is None


def test_nothing_changes_for_the_training() -> None:
    results = []
    for watched in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        hunt = nanhunt.watch(model, optimizer) if watched else None
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(6, 4)).square().mean().backward()
            optimizer.step()
        if hunt is not None:
            hunt.remove()
        results.append([*model.state_dict().values(), torch.rand(1)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# --- several watches and models ---------------------------------------------------------------------


def test_of_nested_watches_the_inner_raises_and_the_outer_records() -> None:
    model = chain(m="nan")
    with nanhunt.watch(model) as outer:
        with pytest.raises(nanhunt.NonFiniteError) as stop, nanhunt.watch(model) as inner:
            train(model, 1)
        assert stop.value.finding is inner.finding
        assert outer.finding is not None and outer.finding.module == "m"
    assert len(outer.findings) == 1


def test_when_the_inner_watch_has_gone_the_outer_raises_again() -> None:
    model = chain(m=None)
    with pytest.raises(nanhunt.NonFiniteError) as stop, nanhunt.watch(model) as outer:
        with nanhunt.watch(model):
            train(model, 1)
        model.m.makes = "nan"  # type: ignore[union-attr, assignment]
        train(model, 1)
    assert stop.value.finding is outer.finding
    assert stop.value.finding.step == 1


def test_an_inner_watch_that_only_records_leaves_raising_to_the_outer() -> None:
    model = chain(m="nan")
    with pytest.raises(nanhunt.NonFiniteError) as stop, nanhunt.watch(model) as outer:  # noqa: SIM117
        with nanhunt.watch(model, on_hit="record"):
            train(model, 1)
    assert stop.value.finding is outer.finding


def test_two_models_are_told_apart_in_forward() -> None:
    well, sick = chain(m=None), chain(m="nan")
    with nanhunt.watch(well, on_hit="record") as one, nanhunt.watch(sick, on_hit="record") as other:
        train(well, 2)
        sick(torch.ones(2, 4))
    assert (one.finding, one.findings) == (None, [])
    assert other.finding is not None and other.finding.module == "m"
    assert one.step == 2


def test_two_models_are_told_apart_in_backward() -> None:
    well, sick = chain(m=None), chain(m="nan")
    with nanhunt.watch(well, on_hit="record") as one, nanhunt.watch(sick, on_hit="record") as other:
        train(well, 2)
        train(sick, 1)
    assert (one.finding, one.findings) == (None, [])
    assert (one.step, other.step) == (2, 1)


def test_a_model_fed_by_another_is_handed_the_bad_value() -> None:
    sick, well = chain(m="nan"), chain(m=None)
    with nanhunt.watch(sick, on_hit="record") as maker, nanhunt.watch(well, on_hit="record") as taker:
        well(sick(torch.ones(2, 4)))
    assert maker.finding is not None and maker.finding.module == "m"
    assert taker.finding is not None and taker.finding.module is None
    assert len(maker.findings) == len(taker.findings) == 1


def test_a_model_that_is_not_watched_is_not_looked_at() -> None:
    with nanhunt.watch(chain()) as hunt, torch.no_grad():
        chain(m="nan")(torch.ones(2, 4))
    assert (hunt.finding, hunt.seen, hunt.step) == (None, 0, 0)


def test_threads_do_not_mix_up_their_calls() -> None:
    model = chain(a=None, b=None)
    sick = {"a": torch.full((2, 4), 2.0), "b": torch.full((2, 4), 3.0)}
    barrier = threading.Barrier(3)

    class Waiting(nn.Module):
        """Makes a NaN for the one batch that is meant for it, while the other threads are inside as well."""

        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, x: Tensor) -> Tensor:
            barrier.wait(timeout=30)
            return (x - x - 1).sqrt() if torch.equal(x, sick[self.name]) else x * 1

    model = nn.Sequential()
    for name in sick:
        model.add_module(name, Waiting(name))
    outputs: dict[str, Tensor] = {}
    with torch.no_grad(), nanhunt.watch(model, on_hit="record") as hunt:
        batches = {**sick, "well": torch.ones(2, 4)}
        threads = [
            threading.Thread(target=lambda n=name, x=x: outputs.update({n: model(x)})) for name, x in batches.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    assert sorted(outputs) == ["a", "b", "well"]
    assert outputs["well"].isfinite().all()
    assert sorted(str(one.module) for one in hunt.findings) == ["a", "b"]
    assert hunt.errors == []


# --- which step, which call, which name -------------------------------------------------------------


def test_a_step_ends_with_the_optimizer_whether_handed_over_or_not() -> None:
    for handed in (True, False):
        model = chain(m=None)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        given = optimizer if handed else None
        with pytest.raises(nanhunt.NonFiniteError) as stop, nanhunt.watch(model, given) as hunt:
            train(model, 5, before=bad_in(model, 3), optimizer=optimizer)
        assert stop.value.finding.step == hunt.step == 3


def test_without_an_optimizer_a_step_ends_at_the_next_forward_after_a_backward() -> None:
    model = chain(m=None)
    with pytest.raises(nanhunt.NonFiniteError) as stop, nanhunt.watch(model) as hunt:
        for step in range(5):
            bad_in(model, 3)(step)
            assert hunt.step == max(0, step - 1)
            model(torch.ones(2, 4)).mean().backward()
            assert hunt.step == step
            with torch.no_grad():
                for p in model.parameters():
                    p -= 1e-3 * p.grad
                    p.grad = None
    assert stop.value.finding.step == 3


def test_forwards_alone_make_no_step() -> None:
    model = chain()
    with nanhunt.watch(model) as hunt, torch.no_grad():
        for _ in range(3):
            model(torch.ones(2, 4))
    assert hunt.step == 0


def test_an_evaluation_between_two_steps_is_no_step_of_its_own() -> None:
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with nanhunt.watch(model) as hunt:
        for _ in range(3):
            train(model, 1, optimizer=optimizer)
            with torch.no_grad():
                model(torch.ones(2, 4))
    assert hunt.step == 3


def test_accumulated_micro_batches_are_one_step() -> None:
    model = chain(m=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with pytest.raises(nanhunt.NonFiniteError) as stop, nanhunt.watch(model, optimizer) as hunt:
        for step in range(3):
            optimizer.zero_grad()
            for micro in range(4):
                model.m.makes = "nan" if (step, micro) == (1, 2) else None  # type: ignore[union-attr, assignment]
                model(torch.ones(2, 4)).mean().backward()
                assert hunt.step == step
            optimizer.step()
    assert (stop.value.finding.step, stop.value.finding.call) == (1, 3)


def test_the_two_players_of_a_gan_are_counted_apart() -> None:
    generator, critic = chain(), chain()
    of_generator = torch.optim.SGD(generator.parameters(), lr=1e-3)
    of_critic = torch.optim.SGD(critic.parameters(), lr=1e-3)
    with nanhunt.watch(generator, of_generator) as one, nanhunt.watch(critic, of_critic) as other:
        for _ in range(3):
            of_critic.zero_grad()
            critic(generator(torch.randn(2, 4)).detach()).mean().backward()
            of_critic.step()
            of_generator.zero_grad()
            (-critic(generator(torch.randn(2, 4))).mean()).backward()
            of_generator.step()
    assert (one.step, other.step) == (3, 3)
    assert one.findings == other.findings == []


def test_under_one_watch_each_update_of_a_gan_is_a_step() -> None:
    gan = nn.ModuleDict({"g": chain(), "d": chain(m=None)})
    of_g = torch.optim.SGD(gan["g"].parameters(), lr=1e-3)
    of_d = torch.optim.SGD(gan["d"].parameters(), lr=1e-3)
    with pytest.raises(nanhunt.NonFiniteError) as stop, nanhunt.watch(gan) as hunt:
        for round_ in range(3):
            assert hunt.step == 2 * round_
            of_d.zero_grad()
            gan["d"](gan["g"](torch.randn(2, 4)).detach()).mean().backward()
            of_d.step()
            assert hunt.step == 2 * round_ + 1
            gan["d"].m.makes = "nan" if round_ == 2 else None
            of_g.zero_grad()
            gan["d"](gan["g"](torch.randn(2, 4))).mean().backward()
            of_g.step()
    assert (stop.value.finding.step, stop.value.finding.module) == (5, "d.m")


def test_the_call_that_went_wrong_is_counted() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.square = Square()

        def forward(self, x: Tensor) -> Tensor:
            return self.square(self.square(x))

    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x

    model = Twice()
    for value, call in ((1e30, 1), (1e15, 2)):
        with pytest.raises(nanhunt.NonFiniteError) as stop, nanhunt.watch(model):
            model(torch.full((2,), value))
        found = stop.value.finding
        assert (found.module, found.module_type, found.call, found.kind) == ("square", "Square", call, "+inf")


def test_a_shared_module_bears_the_name_of_the_place_it_is_called_from() -> None:
    class Half(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    shared = Maker()
    model = nn.Sequential()
    model.add_module("encoder", Half(shared))
    model.add_module("decoder", Half(shared))
    for place in ("encoder", "decoder"):
        shared.calls = 0
        shared.register_forward_pre_hook(
            lambda m, args, place=place: setattr(m, "makes", "nan" if (m.calls == 1) == (place == "decoder") else None)
        )
        with pytest.raises(nanhunt.NonFiniteError) as stop, nanhunt.watch(model):
            model(torch.ones(2, 4))
        assert stop.value.finding.module == f"{place}.inner"


def test_the_code_of_a_container_is_the_containers() -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.two((-self.one(x).abs() - 1).log())

    for model, name in ((Between(), ""), (nn.Sequential(Between()), "0")):
        with pytest.raises(nanhunt.NonFiniteError) as stop, nanhunt.watch(model):
            model(torch.ones(2, 4))
        assert (stop.value.finding.module, stop.value.finding.module_type) == (name, "Between")


def test_a_wrapper_leaves_no_trace_in_the_name(tmp_path: Path) -> None:
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(chain(m="nan"))
        with pytest.raises(nanhunt.NonFiniteError) as stop, nanhunt.watch(model):
            model(torch.ones(2, 4))
        assert (stop.value.finding.module, stop.value.finding.rank) == ("m", 0)
        model.module.m.makes = None  # type: ignore[union-attr, assignment]
        with nanhunt.watch(model) as hunt:
            train(model, 2)
        assert (hunt.findings, hunt.step) == ([], 2)
    finally:
        dist.destroy_process_group()
    model = nn.Sequential()
    model.add_module("module", chain(m="nan"))
    with pytest.raises(nanhunt.NonFiniteError) as stop, nanhunt.watch(model):
        model(torch.ones(2, 4))
    assert stop.value.finding.module == "module.m", "a child that is only called so is the user's"


# --- a program that dies ----------------------------------------------------------------------------


class Sampler(nn.Module):
    """Draws from its own probabilities: torch stops the program when they are NaN."""

    def __init__(self, makes: str | None) -> None:
        super().__init__()
        self.logits = chain(m=makes)

    def forward(self, x: Tensor) -> Tensor:
        return torch.multinomial(self.logits(x).softmax(-1), 1)


def notes(error: BaseException) -> list[str]:
    return list(getattr(error, "__notes__", []))


def test_an_exception_caused_by_a_nan_carries_the_finding() -> None:
    model = Sampler("nan")
    with (
        pytest.raises(RuntimeError, match="probability tensor contains") as death,
        nanhunt.watch(model) as hunt,
    ):
        model(torch.ones(2, 4))
    assert not isinstance(death.value, nanhunt.NonFiniteError)
    assert hunt.finding is not None and hunt.finding.module == "logits.m"
    assert hunt.finding.handled is None and hunt.findings == [hunt.finding]
    assert death.value.nanhunt_finding is hunt.finding  # type: ignore[attr-defined]
    if sys.version_info >= (3, 11):
        assert notes(death.value) == [f"nanhunt: {hunt.finding}"]


def test_an_exception_after_a_recorded_fault_carries_it_too() -> None:
    model = chain(m="nan")
    with pytest.raises(RuntimeError) as death, nanhunt.watch(model, on_hit="record") as hunt:
        torch.multinomial(model(torch.ones(2, 4)).softmax(-1), 1)
    assert death.value.nanhunt_finding is hunt.finding  # type: ignore[attr-defined]
    assert hunt.finding is not None and hunt.finding.module == "m"


def absorbing() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), Maker("+inf"), nn.Tanh())


@pytest.mark.parametrize(
    "build",
    [
        chain,
        absorbing,
    ],
)
def test_an_exception_of_another_kind_is_left_as_it_is(build: Callable[[], nn.Module]) -> None:
    model = build()
    with pytest.raises(KeyError) as death, nanhunt.watch(model) as hunt:
        assert model(torch.ones(2, 4)).isfinite().all()
        raise KeyError("batch")
    assert hunt.finding is None
    assert notes(death.value) == [] and not hasattr(death.value, "nanhunt_finding")


def test_an_exception_inside_the_model_leaves_no_call_open() -> None:
    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.m = Maker(), Maker()
            self.breaks = True

        def forward(self, x: Tensor) -> Tensor:
            if self.breaks:
                raise KeyError("once")
            return self.m(self.inner(x))

    model = Fragile()
    hunt = nanhunt.watch(model, on_hit="record")
    try:
        with pytest.raises(KeyError):
            model(torch.ones(2, 4))
        model.breaks, model.m.makes = False, "nan"
        model(torch.ones(2, 4))
    finally:
        hunt.remove()
    assert hunt.finding is not None and hunt.finding.module == "m"


def test_an_interrupt_is_left_as_it_is() -> None:
    model = Sampler("nan")
    model.logits.add_module("stop", Interrupting())
    with pytest.raises(KeyboardInterrupt) as end, nanhunt.watch(model):
        model(torch.ones(2, 4))
    assert notes(end.value) == []


class Interrupting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyboardInterrupt


def test_the_deliberate_stop_is_not_annotated_by_the_watches_it_passes() -> None:
    model = chain(m="nan")
    with pytest.raises(nanhunt.NonFiniteError) as stop, nanhunt.watch(model), nanhunt.watch(model):
        model(torch.ones(2, 4))
    assert notes(stop.value) == []


# --- loss scaling -----------------------------------------------------------------------------------


class Loud(nn.Module):
    """Its gradient is `gain` times what comes back: in float16 that overflows when the scale adds to it."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        return x.float() * self.gain


def scaled_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, x: Tensor | None = None
) -> None:
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.ones(1, 4) if x is None else x).float().sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def scaled(gain: float, scale: float, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
    model = nn.Sequential()
    model.add_module("fc", nn.Linear(4, 4))
    model.add_module("loud", Loud(gain))
    return (
        model,
        torch.optim.SGD(model.parameters(), lr=1e-9),
        torch.amp.GradScaler("cpu", init_scale=scale, **options),
    )


@pytest.mark.parametrize("handed", [True, False])
def test_a_scaler_that_finds_its_scale_is_no_fault(handed: bool) -> None:
    model, optimizer, scaler = scaled(1.0, 2.0**20)
    with nanhunt.watch(model, *((optimizer, scaler) if handed else ())) as hunt:
        for _ in range(8):
            scaled_step(model, optimizer, scaler)
    skipped = 20 - int(torch.tensor(scaler.get_scale()).log2())
    assert skipped == 5
    assert hunt.finding is None
    assert hunt.findings and all(one.handled == "loss_scale" for one in hunt.findings)
    assert {one.phase for one in hunt.findings} == {"backward"}
    assert hunt.findings[0].context["loss_scale"] == 2.0**20
    assert hunt.step == 8, "a skipped step is a step"


def test_a_scaler_that_never_recovers_is_a_fault_once_the_scale_is_1() -> None:
    """The gradient of the weight sums more than float16 holds over the batch, whatever the scale."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    nn.init.constant_(model[0].weight, 1e-3)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-9), torch.amp.GradScaler("cpu", init_scale=4.0)
    with pytest.raises(nanhunt.NonFiniteError) as stop, nanhunt.watch(model, optimizer, scaler) as hunt:
        for _ in range(6):
            scaled_step(model, optimizer, scaler, torch.full((4, 1), 3e4))
    found = stop.value.finding
    assert (found.step, found.phase, found.module, found.tensor) == (2, "backward", "0", "grad of 0.weight")
    assert found.context["loss_scale"] == 1.0
    assert found.kind == "+inf"
    assert [(one.step, one.handled) for one in hunt.findings[:-1]] == [(0, "loss_scale")]
    assert found is hunt.findings[-1] and found.handled is None


def test_a_gain_that_no_scale_cures_is_a_fault_by_then_at_the_latest() -> None:
    model, optimizer, scaler = scaled(1e6, 4.0)
    with pytest.raises(nanhunt.NonFiniteError) as stop, nanhunt.watch(model, optimizer, scaler):
        for _ in range(3):
            scaled_step(model, optimizer, scaler)
    assert (stop.value.finding.phase, stop.value.finding.module) == ("backward", "loud")


class Conditioned(nn.Module):
    """One learned vector for all positions: its gradient sums over them."""

    def __init__(self) -> None:
        super().__init__()
        self.condition, self.body = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.condition(x[:1])


def test_a_sum_over_many_positions_waits_for_the_scaler() -> None:
    model = Conditioned()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-9), torch.amp.GradScaler("cpu")
    with nanhunt.watch(model, optimizer, scaler, on_hit="record") as hunt:
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(torch.ones(8192, 4)).float().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 2.0**15, "one step is skipped, then training goes on"
    assert [one.handled for one in hunt.findings] == ["loss_scale"]


def test_a_forward_overflow_is_a_fault_at_any_scale() -> None:
    model, optimizer, scaler = scaled(1.0, 2.0**16)
    model.add_module("m", Maker("+inf"))
    with pytest.raises(nanhunt.NonFiniteError) as stop, nanhunt.watch(model, optimizer, scaler):
        scaled_step(model, optimizer, scaler)
    assert (stop.value.finding.step, stop.value.finding.phase, stop.value.finding.module) == (
        0,
        "forward",
        "m",
    )


@pytest.mark.parametrize(
    ("scale", "detail"),
    [
        (4.0, "module"),
        (65536.0, "op"),  # the op level sees the derivative itself: no need to wait for a smaller scale
    ],
)
def test_a_derivative_that_no_scale_cures_is_a_fault_at_once(scale: float, detail: str) -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.float() * 0).sqrt()

    model = nn.Sequential(nn.Linear(4, 4), Root())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with pytest.raises(nanhunt.NonFiniteError) as stop, nanhunt.watch(model, detail=detail):
        scaled_step(model, optimizer, torch.amp.GradScaler("cpu", init_scale=scale))
    found = stop.value.finding
    assert (found.step, found.phase, found.module) == (0, "backward", "1")
    assert found.kind == ("nan" if detail == "module" else "+inf"), "0 * inf only at the module's boundary"


def test_a_disabled_scaler_excuses_nothing_and_the_optimizer_ends_the_step() -> None:
    model, optimizer, scaler = scaled(1e6, 4.0, enabled=False)
    with pytest.raises(nanhunt.NonFiniteError) as stop, nanhunt.watch(model, optimizer, scaler):
        scaled_step(model, optimizer, scaler)
    assert (stop.value.finding.step, stop.value.finding.phase, stop.value.finding.handled) == (
        0,
        "backward",
        None,
    )
    model, optimizer, scaler = scaled(1.0, 4.0, enabled=False)
    with nanhunt.watch(model, optimizer, scaler) as hunt:
        for _ in range(3):
            scaled_step(model, optimizer, scaler)
    assert (hunt.findings, hunt.step) == ([], 3)
