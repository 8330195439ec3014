"""The range profile: what it counts, that it changes nothing, and that it names what will overflow before it does."""

from __future__ import annotations

import copy
import gc
import json
import math
import pathlib
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.utils.checkpoint import checkpoint

import nanhunt
from nanhunt import cli
from nanhunt.errors import UsageError
from nanhunt.precision import exponents, ledger
from nanhunt.precision.narrowing import best_scale
from nanhunt.precision.profiles import ROLES, ModuleProfile, Numbers, Profile
from nanhunt.precision.spectra import CLASSES, Histogram
from nanhunt.report import heatmap, spectrum

from .test_spectra import cast, counted

CASES = pathlib.Path(__file__).resolve().parents[2] / "shared" / "cases"


class Exp(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp()


def small(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(5, 8, generator=made), torch.randint(3, (5,), generator=made)


def trained(model: nn.Module, lr: float = 0.1) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    x, y = batch()

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def role(profile: Profile, module: str, name: str) -> Numbers:
    numbers: Numbers | None = getattr(profile.modules[module], name)
    assert numbers is not None
    return numbers


# --- what is counted --------------------------------------------------------------------------------------------


def test_every_role_of_every_module_is_counted_as_casting_each_of_its_numbers_would() -> None:
    model, (x, y) = small(), batch()
    taken: dict[tuple[str, str], list[torch.Tensor]] = {}

    def keep(module: str, name: str, t: torch.Tensor) -> None:
        taken.setdefault((module, name), []).append(t.detach().clone().reshape(-1))

    def step() -> None:
        model.zero_grad()
        h = x
        for at, layer in enumerate(model):
            keep(str(at), "inputs", h)
            h = layer(h)
            h.register_hook(lambda grad, at=at: keep(str(at), "output_gradients", grad))
            keep(str(at), "outputs", h)
        nn.functional.cross_entropy(h, y).backward()
        for name, p in model.named_parameters():
            keep(name.partition(".")[0], "weights", p)
            keep(name.partition(".")[0], "weight_gradients", p.grad)

    profile = nanhunt.profile(model, step, steps=3)
    for (module, name), tensors in taken.items():
        numbers, all_of_it = role(profile, module, name), torch.cat(tensors)
        assert numbers.histogram == counted(all_of_it), (module, name)
        assert numbers.absmax == float(all_of_it.abs().max())
        for dtype in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
            share = numbers.share(dtype, 2.0**-12)
            assert (share.over, share.tiny, share.lost, share.finite) == cast(all_of_it, dtype, 2.0**-12)
    assert len(taken) == 13 and list(profile.steps) == [0, 1, 2]
    assert role(profile, "2", "outputs").trend[0] == float(taken["2", "outputs"][0].abs().max())


def test_shares_of_a_profile_scale_gradients_alone() -> None:
    model = small()
    profile = nanhunt.profile(model, trained(model), steps=2)
    plain, scaled = profile.share("float8_e4m3fn"), profile.share(torch.float8_e4m3fn, 1024.0)
    assert scaled["0"]["outputs"] == plain["0"]["outputs"] and scaled["0"]["weights"] == plain["0"]["weights"]
    assert scaled["0"]["weight_gradients"] == role(profile, "0", "weight_gradients").share("float8_e4m3fn", 1024.0)
    assert (
        scaled.vanish < plain.vanish and plain.total("weights").finite == sum(p.numel() for p in model.parameters()) * 2
    )


def test_modules_stand_in_the_order_of_their_first_calls() -> None:
    model = small()
    assert list(nanhunt.profile(model, trained(model)).modules) == ["", "0", "1", "2"]


def test_a_module_that_hands_on_what_another_made_is_not_its_maker() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 4), nn.Dropout(0.0)), nn.Linear(4, 3)).eval()
    profile = nanhunt.profile(model, trained(model))
    own = {name: one.own for name, one in profile.modules.items()}
    assert own == {"": False, "0": False, "0.0": True, "0.1": False, "1": True}
    assert role(profile, "0", "outputs").histogram == role(profile, "0.0", "outputs").histogram
    assert role(profile, "0", "output_gradients").histogram == role(profile, "0.0", "output_gradients").histogram


def test_a_shared_module_and_one_called_several_times_count_all_calls_under_the_first_name() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(8, 8)
            self.other = self.one

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.other(self.one(x)).tanh()

    model = Twice()
    profile = nanhunt.profile(model, trained(model))
    one = profile.modules["one"]
    assert set(profile.modules) == {"", "one"} and one.calls == 2
    assert role(profile, "one", "outputs").tensors == role(profile, "one", "output_gradients").tensors == 2
    assert role(profile, "one", "weights").tensors == role(profile, "one", "weight_gradients").tensors == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_module_is_counted_once_and_its_gradients_too(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
            self.head = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_() if reentrant else x
            return self.head(checkpoint(self.inner, x, use_reentrant=reentrant))

    torch.manual_seed(1)
    model = Checkpointed()
    plain = copy.deepcopy(model)
    plain.forward = lambda x: plain.head(plain.inner(x))  # type: ignore[method-assign]
    one, other = nanhunt.profile(model, trained(model)), nanhunt.profile(plain, trained(plain))
    for name in ("inner.0", "inner.1", "inner.2", "head"):
        for what in ("outputs", "output_gradients", "weight_gradients"):
            mine, theirs = getattr(one.modules[name], what), getattr(other.modules[name], what)
            assert (mine and mine.histogram) == (theirs and theirs.histogram), (name, what)
        assert one.modules[name].calls == 1 and one.modules[name].output_gradients is not None


def test_keyword_arguments_and_structures_of_tensors_are_inputs_and_outputs() -> None:
    class Keyed(nn.Module):
        def forward(self, *, batch: dict[str, torch.Tensor]) -> dict[str, list[torch.Tensor]]:
            return {"all": [batch["a"] * 2, batch["b"] * 4]}

    model = Keyed()
    given = {"a": torch.ones(3), "b": torch.ones(5), "ids": torch.arange(4)}
    profile = nanhunt.profile(model, lambda: model(batch=given))
    assert role(profile, "", "inputs").histogram.exponents() == {0: 8}
    assert role(profile, "", "outputs").histogram.exponents() == {1: 3, 2: 5}


class Odd(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(x)


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation.*")
@pytest.mark.parametrize(
    ("make", "numel", "skipped"),
    [
        (lambda x: torch.complex(x, x), 80, 0),
        (lambda x: x.to_sparse(), 40, 0),
        (lambda x: x.to(torch.float8_e5m2), 40, 0),
        (lambda x: x.double().t(), 40, 0),
        (lambda x: x.bfloat16()[:, ::3], 15, 0),
        (lambda x: x[:0], 0, 0),
        (lambda x: x.long(), 0, 0),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8), 0, 1),
        (lambda x: torch.empty(3, device="meta"), 0, 1),
    ],
)
def test_odd_tensors_are_counted_or_counted_as_skipped(make: Any, numel: int, skipped: int) -> None:
    model = Odd(make)
    profile = nanhunt.profile(model, lambda: model(batch()[0]))
    outputs = profile.modules[""].outputs
    assert (outputs.histogram.numel if outputs is not None else 0) == numel
    assert profile.skipped == skipped and profile.notes == ()


def test_a_lazy_parameter_is_counted_from_when_it_is_there() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    profile = nanhunt.profile(model, lambda: model(batch()[0]).sum().backward(), steps=3)
    assert role(profile, "0", "weight_gradients").tensors == 4 and profile.notes == ()


def test_a_sparse_gradient_is_counted_by_its_values() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True))
    profile = nanhunt.profile(model, lambda: model(torch.tensor([1, 1, 3])).sum().backward())
    assert role(profile, "0", "weight_gradients").histogram.exponents() == {0: 12}


def test_nan_and_infinities_are_counted_apart_and_are_no_largest_number() -> None:
    model = Odd(lambda x: torch.tensor([math.nan, math.inf, -math.inf, -math.inf, 0.0, -2.0]))
    found = role(nanhunt.profile(model, lambda: model(batch()[0])), "", "outputs")
    held = found.histogram
    assert (held.nan, held.pos_inf, held.neg_inf, held.zero, found.absmax) == (1, 1, 2, 1, 2.0)


def test_inference_mode_is_profiled_too() -> None:
    model = small()
    x = batch()[0]

    def step() -> None:
        with torch.inference_mode():
            model(x)

    profile = nanhunt.profile(model, step, steps=2)
    assert role(profile, "2", "outputs").tensors == 2 and profile.notes == ()
    assert profile.modules["2"].output_gradients is None


# --- the loss scale -------------------------------------------------------------------------------------------


def scaled_run(scale: float | None) -> Profile:
    model, (x, y) = small(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None, growth_interval=2)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()

    return nanhunt.profile(model, step, steps=4)


def test_gradients_under_a_grad_scaler_are_told_without_its_scale() -> None:
    plain, scaled = scaled_run(None), scaled_run(2.0**16)
    assert plain.loss_scales == (None,) * 4 and scaled.loss_scales == (2.0**16, 2.0**16, 2.0**17, 2.0**17)
    for name, one in plain.modules.items():
        for what, numbers in one.roles():
            assert role(scaled, name, what) == numbers, (name, what)


def test_what_has_overflowed_at_the_scale_is_counted_as_such() -> None:
    model = nn.Linear(8, 3).half()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    x = torch.ones(4, 8, dtype=torch.float16)
    profile = nanhunt.profile(model, lambda: scaler.scale(model(x).float().sum()).backward())
    assert role(profile, "", "weight_gradients").histogram.pos_inf == 27


# --- it changes nothing -----------------------------------------------------------------------------------------


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in [*model.state_dict().items()]}


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.act(self.norm(self.embed(x)))))


@pytest.mark.parametrize("how", ["profile", "sampled", "watch"])
def test_training_under_a_profile_is_the_same_bit_for_bit(how: str) -> None:
    ends = []
    for profiled in (False, True):
        torch.manual_seed(0)
        model = Noisy()
        step = trained(model)
        torch.manual_seed(1)
        if not profiled:
            for _ in range(5):
                step()
        elif how == "watch":
            with nanhunt.watch(model, profile=True):
                for _ in range(5):
                    step()
        else:
            nanhunt.profile(model, step, steps=5, sample=7 if how == "sampled" else None)
        ends.append((state(model), torch.get_rng_state()))
    (plain, random), (seen, random_after) = ends
    assert all(torch.equal(plain[name], seen[name]) for name in plain) and torch.equal(random, random_after)


def test_all_hooks_come_off_and_nothing_of_the_model_is_held() -> None:
    model = small()
    step = trained(model)
    profile = nanhunt.profile(model, step, steps=2)
    assert not nn_module._global_forward_hooks and not nn_module._global_forward_pre_hooks
    assert all(not getattr(p, "_post_accumulate_grad_hooks", None) for p in model.parameters())
    gone = weakref.ref(model)
    del model, step
    gc.collect()
    assert gone() is None and profile.modules["2"].outputs is not None


def test_hooks_come_off_also_when_the_step_raises() -> None:
    model = small()

    def step() -> None:
        model(batch()[0])
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        nanhunt.profile(model, step)
    assert not nn_module._global_forward_hooks


def test_no_tensor_is_kept_alive_within_a_step_or_after_it() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    class Keeps(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            held.append(weakref.ref(y))
            return y

    model = nn.Sequential(*[Keeps() for _ in range(4)])

    def step() -> None:
        with torch.no_grad():
            out = model(batch()[0])
        assert [ref() is not None for ref in held[-4:]] == [False, False, False, True]
        del out

    gc.disable()
    try:
        nanhunt.profile(model, step, steps=2)
    finally:
        gc.enable()


def test_a_failure_of_the_profile_is_noted_and_ends_nobodys_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("a device of its own")

    monkeypatch.setattr("nanhunt.precision.profiler.count", fails)
    model, plain = small(), small()
    profile = nanhunt.profile(model, trained(model), steps=2)
    other = trained(plain)
    other(), other()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters()))
    assert "RuntimeError: a device of its own" in profile.notes[0]


# --- where it is counted ----------------------------------------------------------------------------------------


def test_what_runs_on_an_accelerator_counts_the_same_as_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    t = torch.cat([torch.randn(1000) * 1e-38, torch.zeros(5), torch.tensor([math.inf, -math.inf, math.nan, 1e-45])])
    keys: list[torch.Tensor] = []
    monkeypatch.setattr(exponents, "_counted", lambda k: keys.append(k) or torch.bincount(k, minlength=exponents.SIZE))
    for numbers in (t, t.double(), t.half(), t.bfloat16()):
        host, device = exponents._piece(numbers, True), exponents._piece(numbers, False)
        assert torch.equal(host[0], device[0]) and float(host[1]) == float(device[1])
        by_index = torch.zeros(exponents.SIZE, dtype=torch.int64)
        by_index.index_add_(0, keys[-1], torch.ones(1, dtype=torch.int64).expand(keys[-1].numel()))
        assert torch.equal(by_index, torch.bincount(keys[-1], minlength=exponents.SIZE))


def test_nothing_is_read_back_before_the_record_is_made() -> None:
    """A tensor on `meta` has no numbers: whatever asks for one fails."""
    book, rows = ledger.Ledger(), [ledger.Row(), ledger.Row()]
    for step in range(3):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            numbers = torch.empty(40, 30, dtype=dtype, device="meta").t()
            for row in rows:
                book.add(row, *exponents.count(numbers), "float32")
                book.add(row, *exponents.count(numbers, sample=50), "float32")
        book.end_step(step, None)
    assert book.reads == 0 and book.steps == [0, 1, 2]
    with pytest.raises((RuntimeError, NotImplementedError)):
        book.read(rows)


def test_the_whole_run_is_read_with_two_copies_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    books = []
    record = ledger.Ledger.__init__
    monkeypatch.setattr(ledger.Ledger, "__init__", lambda self: (record(self), books.append(self))[0])
    model = small()
    nanhunt.profile(model, trained(model), steps=6)
    assert books[0].reads == 2


def test_a_long_run_keeps_a_bounded_course_of_which_no_peak_is_lost() -> None:
    book, row, late = ledger.Ledger(), ledger.Row(), ledger.Row()
    sizes = torch.rand(1100, generator=torch.Generator().manual_seed(0)).tolist()
    for step, size in enumerate(sizes):
        book.add(row, *exponents.count(torch.tensor([size])), "float32")
        if step >= 600:
            book.add(late, *exponents.count(torch.tensor([2 * size])), "float32")
        book.end_step(step, torch.tensor(2.0 ** (step // 600)))
    one, two = book.read([row, late])
    assert len(one.trend) == len(book.steps) == len(book.scales) <= 256
    span = book.steps[1] - book.steps[0]
    wanted = [max(sizes[at : at + span]) for at in range(0, len(sizes), span)]
    assert one.trend == pytest.approx(wanted) and two.trend[0] is None
    assert two.trend[-1] == pytest.approx(2 * max(sizes[book.steps[-1] :]))
    assert book.loss_scales()[0] == 1.0 and book.loss_scales()[-1] == 2.0


# --- options ----------------------------------------------------------------------------------------------------


def test_steps_that_are_left_out_run_and_are_not_counted() -> None:
    model = small()
    calls = []
    step = trained(model)
    profile = nanhunt.profile(model, lambda: (step(), calls.append(1)), steps=7, every=3)
    assert len(calls) == 7 and profile.steps == (0, 3, 6) and role(profile, "0", "outputs").tensors == 3
    assert role(profile, "0", "output_gradients").tensors == 3 and role(profile, "0", "weights").tensors == 6


def test_a_sample_counts_so_many_numbers_of_each_tensor_and_the_largest_of_all() -> None:
    model = small()
    whole = nanhunt.profile(model, trained(model, lr=0.0))
    sampled = nanhunt.profile(model, trained(model, lr=0.0), sample=10)
    assert role(sampled, "0", "outputs").histogram.numel <= 10 < role(whole, "0", "outputs").histogram.numel
    assert role(sampled, "0", "outputs").absmax == role(whole, "0", "outputs").absmax
    assert sampled.sample == 10


def test_an_overflow_that_a_sample_has_missed_is_told_by_the_largest_number() -> None:
    model = Odd(lambda x: torch.cat([torch.ones(5000), torch.tensor([7e4])]))
    profile = nanhunt.profile(model, lambda: model(batch()[0]), sample=10)
    assert role(profile, "", "outputs").share("float16").over == 0
    assert not profile.verdict().fits


def test_only_and_skip_say_which_modules() -> None:
    model = small()
    assert set(nanhunt.profile(model, trained(model), only=("2",)).modules) == {"2"}
    assert "2" not in nanhunt.profile(model, trained(model), skip=("2",)).modules


def test_batches_are_given_to_the_step_in_turn() -> None:
    model = small()
    given: list[int] = []
    nanhunt.profile(model, lambda one: (given.append(one), model(batch()[0])), steps=5, batches=[10, 20])
    assert given == [10, 20, 10, 20, 10]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": 3}, "needs a torch.nn.Module"),
        ({"step": 3}, "needs a function that runs one step"),
        ({"steps": 0}, "steps=0"),
        ({"every": 0}, "every=0"),
        ({"sample": 0}, "sample=0"),
        ({"batches": iter([1])}, "give a list of batches"),
        ({"batches": []}, "give a list of batches"),
        ({"batches": torch.ones(2, 8)}, "give a list of batches"),
        ({"batches": {"x": 1}}, "give a list of batches"),
        ({}, "the step has not called the model"),
        ({"only": ("nothing",)}, "no module fits"),
    ],
)
def test_bad_arguments_are_refused_with_what_to_do(given: dict[str, Any], said: str) -> None:
    asked: dict[str, Any] = {"model": small(), "step": lambda: None} | given
    with pytest.raises(UsageError, match=said):
        nanhunt.profile(asked.pop("model"), asked.pop("step"), **asked)


def test_a_model_without_numbers_is_refused_and_not_told_to_fit() -> None:
    with torch.device("meta"):
        model = small()
    with pytest.raises(UsageError, match="meta device"):
        nanhunt.profile(model, lambda: model(torch.empty(2, 8, device="meta")))


def test_where_nothing_was_counted_nothing_fits() -> None:
    model = small()
    with nanhunt.watch(model, profile=True) as watch:
        pass
    assert watch.profile is not None
    verdict = watch.profile.verdict()
    assert not verdict.fits and not verdict and "is not known" in str(watch.profile)


def test_switched_off_the_steps_run_and_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANHUNT", "0")
    calls = []
    profile = nanhunt.profile(small(), lambda: calls.append(1), steps=3)
    assert len(calls) == 3 and not profile.modules and str(profile)
    with nanhunt.watch(small(), profile=True) as watch:
        assert watch.profile is None


# --- under a watch ------------------------------------------------------------------------------------------------


def test_a_watch_has_the_same_profile_and_none_unless_asked() -> None:
    model = small()
    wanted = nanhunt.profile(model, trained(model), steps=3)
    model = small()
    with nanhunt.watch(model, profile=True) as watch:
        step = trained(model)
        step()
        assert watch.profile is not None and watch.profile.steps == (0,)
        step(), step()
    assert watch.profile == wanted
    with nanhunt.watch(model) as plain:
        step()
    assert plain.profile is None


@pytest.mark.parametrize("options", [{"every": 2}, {"steps": (1, 3)}, {"backward": False}, {"detail": "op"}])
def test_a_watch_profiles_the_steps_and_the_directions_that_it_looks_at(options: dict[str, Any]) -> None:
    model = small()
    with nanhunt.watch(model, profile=True, **options) as watch:
        step = trained(model)
        for _ in range(4):
            step()
    profile = watch.profile
    assert profile is not None and not watch.errors
    steps = {"every": (0, 2), "steps": (1, 2), "backward": (0, 1, 2, 3), "detail": (0, 1, 2, 3)}
    assert profile.steps == steps[next(iter(options))]
    assert (profile.modules["0"].output_gradients is None) == ("backward" in options)
    assert not nn_module._global_forward_hooks


def test_a_profile_asked_for_within_a_step_does_not_split_its_entry() -> None:
    model = small()
    x, y = batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanhunt.watch(model, profile=True) as watch:
        for _ in range(2):
            loss = nn.functional.cross_entropy(model(x), y)
            assert watch.profile is not None
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert watch.profile is not None and watch.profile.steps == (0, 1)
    gradients = role(watch.profile, "2", "output_gradients")
    assert all(size is not None for size in gradients.trend)


def test_profile_takes_true_or_false() -> None:
    with pytest.raises(UsageError, match="profile=3"):
        nanhunt.watch(small(), profile=3)  # type: ignore[arg-type]


def test_a_fault_that_stops_the_program_leaves_its_profile() -> None:
    model = nn.Sequential(nn.Linear(8, 4), Exp(), nn.Linear(4, 3))
    with pytest.raises(nanhunt.NonFiniteError), nanhunt.watch(model, profile=True) as watch:
        nn.functional.cross_entropy(model(batch()[0] * 1e4), batch()[1]).backward()
    assert watch.profile is not None
    assert role(watch.profile, "1", "outputs").histogram.pos_inf > 0


@pytest.mark.filterwarnings("ignore:.*when there are global hooks on modules.*")
def test_a_compiled_model_is_profiled_eagerly_and_the_record_says_so() -> None:
    model = small()
    compiled = torch.compile(model, backend="eager")
    plain = small()
    wanted = nanhunt.profile(plain, trained(plain))
    try:
        profile = nanhunt.profile(compiled, trained(compiled))
    finally:
        torch._dynamo.reset()
    assert profile.notes == ("the model is compiled; it was run eagerly",)
    assert profile.modules == wanted.modules


def test_a_watch_of_a_compiled_model_profiles_weights_and_their_gradients_and_says_so() -> None:
    model = torch.compile(small(), backend="eager")
    try:
        with nanhunt.watch(model, profile=True) as watch:
            step = trained(model)
            step(), step()
    finally:
        torch._dynamo.reset()
    profile = watch.profile
    assert profile is not None and "only weights and their gradients are seen" in profile.notes[0]
    assert role(profile, "0", "weights").absmax and role(profile, "2", "weight_gradients").absmax


# --- the answer ---------------------------------------------------------------------------------------------------


class Grows(nn.Module):
    """Three layers, the second of which multiplies; the third gets what is too large already."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), Odd(lambda x: x * factor), Odd(lambda x: x + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x))) / 1e9


def test_the_module_that_makes_an_overflow_is_named_before_those_that_are_handed_it() -> None:
    torch.manual_seed(0)
    model = Grows(1e6)
    verdict = nanhunt.profile(model, lambda: model(batch()[0])).verdict("float16")
    assert not verdict.fits and not verdict and verdict.keep == ("second",)
    assert [one.module for one in verdict.reasons] == ["second", "third"]
    assert verdict.title().startswith("this run can move to float16: no, because second (Odd): its outputs reach ")
    assert "float16 ends at 65 504" in str(verdict) and "handed" in verdict.reasons[1].text
    assert nanhunt.profile(model, lambda: model(batch()[0])).verdict("bfloat16").fits


def test_a_run_that_fits_says_what_comes_closest() -> None:
    model = small()
    verdict = nanhunt.profile(model, trained(model), steps=2).verdict()
    assert verdict and verdict.title().startswith("this run can move to float16 with a loss scale of ")
    assert "closest to the limit are the" in verdict.title() and verdict.keep == ()


def test_the_best_loss_scale_leaves_two_bits_to_the_largest_gradient() -> None:
    model = small()
    profile = nanhunt.profile(model, trained(model), steps=2)
    scale = best_scale(profile, "float16")
    rooms = [
        one.headroom("float16", scale)
        for module in profile.modules.values()
        for name, one in module.roles()
        if "gradients" in name
    ]
    assert 2 <= min(room for room in rooms if room is not None) < 3
    assert best_scale(profile, "bfloat16") == 1.0


def test_gradients_that_vanish_without_a_scale_are_a_reason_and_with_one_are_none() -> None:
    model = small()
    x, y = batch()
    profile = nanhunt.profile(model, lambda: (nn.functional.cross_entropy(model(x), y) * 1e-7).backward())
    alone = profile.verdict("float16", loss_scale=1)
    assert not alone.fits and {one.kind for one in alone.reasons} == {"vanish"}
    assert "vanish in float16" in alone.title() and profile.verdict("float16").fits


def test_a_run_that_is_not_finite_already_does_not_fit_anywhere_and_a_mask_is_no_reason() -> None:
    first = torch.tensor([True, False, False, False])
    masked = nn.Sequential(nn.Linear(8, 4), Odd(lambda x: x.masked_fill(first, -math.inf)), nn.Softmax(-1))
    assert nanhunt.profile(masked, lambda: masked(batch()[0])).verdict().fits
    model = nn.Sequential(nn.Linear(8, 4), Odd(lambda x: x * 1e30 * 1e30), nn.Sigmoid())
    verdict = nanhunt.profile(model, lambda: model(batch()[0])).verdict("bfloat16")
    assert verdict.reasons[0].module == "1" and verdict.reasons[0].kind == "not finite"
    assert "NaN or Inf already, in float32" in verdict.title() and verdict.keep == ("1",)


def test_gradients_that_a_grad_scaler_skips_are_no_reason_once_it_has_found_its_scale() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)).half()
    x = torch.ones(4, 8, dtype=torch.float16)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**23)

    def step() -> None:
        model.zero_grad()
        scaler.scale(model(x).float().sum()).backward()
        scaler.update(scaler.get_scale() / 16)

    unknown = nanhunt.profile(model, step, steps=2).verdict()
    assert not unknown.fits and len(unknown.reasons) == 1 and not unknown.keep
    assert "at the loss scale of these steps, 8 388 608 to 524 288" in unknown.title()
    assert "run more steps" in unknown.title()
    assert nanhunt.profile(model, step, steps=3).verdict().fits


def test_a_forward_that_overflows_comes_before_the_gradients_that_follow_from_it() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.no_grad():
        model[1].weight.fill_(6e4)
    profile = nanhunt.profile(model, lambda: model(torch.ones(4, 8)).square().sum().backward())
    verdict = profile.verdict()
    made = [one.role for one in verdict.reasons if one.makes]
    assert made.index("outputs") < made.index("weight_gradients") and verdict.keep[0] in ("1", "2")
    told = str(profile).split("\n\n")[2].splitlines()
    assert told[0] == "What stands against it, worst first"
    worst = [line.split()[1] for line in told if line[:2] in ("1.", "2.", "3.")]
    assert len(set(worst)) == 3  # three modules, and not three times one


def test_a_run_that_fits_says_what_a_profile_cannot_see() -> None:
    """The square overflows in float16 and no module gives it out."""
    model = nn.Sequential(nn.Linear(8, 8), Odd(lambda x: (x * 1e3).square().mean(-1, keepdim=True).sqrt()))
    profile = nanhunt.profile(model, lambda: model(batch()[0]))
    assert profile.verdict().fits and "nanhunt.compare runs them in float16" in " ".join(str(profile).split())
    assert "nanhunt.compare runs them in float16" in heatmap.page(profile)
    found = nanhunt.compare(model, lambda: model(batch()[0]), b="float16")
    assert found.first == "1"


def test_weights_that_do_not_fit_are_named() -> None:
    model = small()
    with torch.no_grad():
        model[2].weight[0, 0] = 1e5
    verdict = nanhunt.profile(model, lambda: model(batch()[0])).verdict()
    assert ("2", "weights") in [(one.module, one.role) for one in verdict.reasons]


def test_an_overflow_is_foretold_before_it_comes_and_in_about_the_right_number_of_steps() -> None:
    """Outputs double with each step; float16 ends at 2^16."""
    model = Odd(lambda x: x * 2.0 ** at[0])
    at = [0]

    def step() -> None:
        model(torch.ones(4))
        at[0] += 1

    profile = nanhunt.profile(model, step, steps=9)
    (warned,) = profile.verdict().warnings
    assert warned.role == "outputs" and warned.forecast.rate == pytest.approx(1.0)
    assert warned.forecast.steps == 8 and "an overflow in about 8 steps" in warned.text
    assert warned.text in str(profile).replace("\n  ", " ")
    assert nanhunt.profile(model, step, steps=1).verdict().fits  # one step says nothing about a trend


def test_a_steady_run_foretells_nothing() -> None:
    model = small()
    assert nanhunt.profile(model, trained(model, lr=1e-3), steps=12).verdict().warnings == ()


# --- the record -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded() -> Profile:
    model = small()
    return nanhunt.profile(model, trained(model), steps=3)


def test_a_profile_comes_back_from_dict_json_and_pickle(recorded: Profile) -> None:
    assert Profile.from_dict(recorded.to_dict()) == recorded == Profile.from_json(recorded.to_json(indent=1))
    assert pickle.loads(pickle.dumps(recorded)) == recorded
    assert recorded.verdict() == Profile.from_json(recorded.to_json()).verdict()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"profile": 9}', '{"profile": 1}', '{"profile": 1, "modules": [3]}'])
def test_what_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="nanhunt profile"):
        Profile.from_json(text)


def test_the_record_and_its_pages_need_no_torch(recorded: Profile, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(recorded.to_json())
    code = (
        "import sys, nanhunt; from nanhunt.report import heatmap; "
        f"p = nanhunt.Profile.from_json(open({str(file)!r}).read()); "
        "print(p, p.share('float8_e4m3fn', 8).vanish, len(heatmap.page(p))); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.DEVNULL).returncode == 0


# --- the pages ------------------------------------------------------------------------------------------------------


def numbers(exponents: dict[int, int], absmax: float) -> Numbers:
    bins = tuple((at, (n, *[0] * (CLASSES - 1))) for at, n in sorted(exponents.items()))
    return Numbers(
        dtypes=("float32",), tensors=1, absmax=absmax, trend=(absmax,), histogram=Histogram(bins=bins, zero=3)
    )


def made(modules: int = 1, name: str = "layer", exponents: dict[int, int] | None = None) -> Profile:
    held = numbers(exponents or {-30: 1, 0: 100, 17: 5}, 2.0 ** max(exponents or {17: 0}))
    rows = [
        ModuleProfile(name=f"{name}.{at}", type="Linear", calls=1, **dict.fromkeys(ROLES, held))
        for at in range(modules)
    ]
    return Profile(model="Net", modules={one.name: one for one in rows}, steps=(0,))


def test_the_text_page_has_the_answer_the_numbers_and_the_picture() -> None:
    page = str(made())
    assert "this run can move to float16: no, because layer.0 (Linear)" in page
    assert "Keep in float32: layer.0." in page
    assert "131 072" in page and "-1.0" in page
    rows = {line.partition("|")[0].strip(): line.partition("|")[2] for line in page.splitlines() if "|" in line}
    shade, half = rows["layer.0 outputs"], rows["float16"]
    assert [shade[at] != " " for at in (0, half.index("="), len(half) - 2)] == [True, False, True]
    # 2^17 lies beyond the end of float16, and 2^-30 below its beginning
    assert half[0] == " " and half[shade.rindex(shade.strip("| ")[-1])] == " "


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_the_text_page_keeps_to_its_width_and_to_a_screen(width: int) -> None:
    page = spectrum.page(made(300, "a.very.long.name.of.a.block.in.a.model"), width=width)
    assert max(map(len, page.splitlines())) <= width and len(page.splitlines()) < 70


@pytest.mark.parametrize("exponents", [{-149: 1, 127: 1}, {0: 1}, {100: 1}, {-140: 2}])
def test_the_picture_holds_whatever_exponents_there_are(exponents: dict[int, int]) -> None:
    page = str(made(exponents=exponents))
    drawn = next(line for line in page.splitlines() if "layer.0 outputs" in line and "|" in line)
    assert sum(char not in " |" for char in drawn.partition("|")[2]) == len(exponents)


def test_the_html_page_is_one_file_that_loads_nothing_and_escapes_every_text() -> None:
    page = heatmap.page(made(name='<script>alert("x")</script>'))
    assert "<script>alert" not in page and "&lt;script&gt;" in page
    assert "default-src &#x27;none&#x27;" in page or "default-src 'none'" in page
    assert page.count("<table") == len(ROLES) + 1 and 'class="limit"' in page
    assert "http" not in page.replace("http-equiv", "")


def test_rows_on_a_narrow_window_say_what_their_numbers_are() -> None:
    """The table of a finding is styled by the same names, and there they are what goes in and out."""
    model = small()
    shown = heatmap.page(nanhunt.profile(model, trained(model)))
    assert 'class="trail spread"' in shown
    assert shown.rindex('content: "largest "') > shown.rindex('content: "in "')  # the later rule counts


def test_the_html_page_of_a_huge_model_stays_small_and_says_what_it_left_out() -> None:
    page = heatmap.page(made(3000, exponents=dict.fromkeys(range(-40, 10), 5)))
    assert len(page.encode()) < 500_000 and "Not on this page, but in the record" in page


def test_a_notebook_shows_the_page_in_a_frame(recorded: Profile) -> None:
    assert "<iframe" in recorded._repr_html_() and "this run can move to float16" in recorded._repr_html_()


# --- the command line ---------------------------------------------------------------------------------------------

FACTORY = """
import torch
from torch import nn

class Big(nn.Module):
    def forward(self, x):
        return x * 1e6

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Big())
    return {"model": model, "example": torch.randn(3, 4)}

def healthy():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    batches = [torch.randn(3, 4) for _ in range(2)]
    return {"model": model, "step": lambda x: model(x).sum().backward(), "batches": batches}

def nothing():
    return nn.Linear(2, 2)
"""


@pytest.fixture
def factory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "train_of_test.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield "train_of_test"
    sys.modules.pop("train_of_test", None)


def test_the_command_prints_the_page_and_its_exit_code_is_the_answer(
    factory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["profile", f"{factory}:build", "--steps", "2"]) == 1
    assert "no, because 1 (Big): its outputs reach" in capsys.readouterr().out
    assert cli.main(["profile", f"{factory}:healthy", "--steps", "3"]) == 0
    assert cli.main(["profile", f"{factory}:build", "--dtype", "bfloat16"]) == 0


def test_the_command_writes_json_and_html(factory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", f"{factory}:healthy", "--json", "--steps", "2", "--loss-scale", "8"]) == 0
    assert Profile.from_dict(json.loads(capsys.readouterr().out)).steps == (0, 1)
    assert cli.main(["profile", f"{factory}:build", "--html"]) == 1
    assert pathlib.Path("profile.html").read_text().startswith("<!DOCTYPE html>")
    assert cli.main(["profile", f"{factory}:build", "--json", "-o", "out/p.json"]) == 1
    assert "written to" in capsys.readouterr().out
    assert set(Profile.from_json(pathlib.Path("out/p.json").read_text()).modules) == {"", "0", "1"}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["train_of_test:nothing"], "nothing to run"),
        (["train_of_test:build", "--dtype", "int8"], "a share can be had of"),
        (["train_of_test:build", "--loss-scale", "-1"], "loss_scale"),
        (["train_of_test:build", "--steps", "0"], "steps=0"),
        (["train_of_test:build", "--html", "-o", "."], "it is a folder"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(
    factory: str, capsys: pytest.CaptureFixture[str], asked: list[str], said: str
) -> None:
    assert cli.main(["profile", *asked]) == 2
    assert said in capsys.readouterr().err


# --- what it costs ------------------------------------------------------------------------------------------------


def test_the_cost_is_measured_by_one_command() -> None:
    from benchmarks import profiles

    found = profiles.measure(["tiny gpt"], seconds=0.1, quick=True)
    told = profiles.table(found)
    assert [row["tool"] for row in found] == [tool.name for tool in profiles.ROWS]
    assert all(row["ratio"] is not None for row in found) and "counts on the device, MB" in told


# --- before the fault ---------------------------------------------------------------------------------------------

# Graded cases in which a float16 overflows, and the way to their numbers before it: the steps before the fault, or the
# same step in float32. In those of `INSIDE` no module gives out the number that overflows: it stands between two ops.
FORWARD = ["01_t5_ff_wo_overflow", "03_residual_add_in_container", "11_autocast_conv_overflow_poisons_bn"]
FORWARD += ["33_tiny_temperature_in_sampler"]
INSIDE = ["25_autocast_undoes_upcast", "39_fourier_layer_half_dc_term"]
TRAINING = ["37_static_loss_scale_fp16", "39_grad_accumulation_fp16"]


def opened(kind: str, name: str) -> Any:
    if not CASES.is_dir():
        pytest.skip("the graded cases are not here")
    sys.path.insert(0, str(CASES))
    import caseapi

    (case,) = caseapi.load_file(CASES / kind / f"{name}.py")
    return case


@pytest.mark.parametrize("name", FORWARD)
def test_the_profile_in_float32_names_the_module_that_overflows_in_float16(name: str) -> None:
    case = opened("forward", name)
    case.DTYPE = torch.float32
    model, given = case.build()
    verdict = nanhunt.profile(model, lambda: case.step(model, given)).verdict("float16")
    assert verdict.reasons[0].module == case.META["expect"]["module"]
    assert case.META["expect"]["module"] in verdict.keep


def test_the_profile_of_the_steps_before_a_gradient_overflows_names_whose_comes_closest() -> None:
    case = opened("training", TRAINING[0])
    model, optimizer, batches = case.build()
    before = case.META["expect"]["step"]
    at = iter(range(before))
    profile = nanhunt.profile(model, lambda: case.step(model, optimizer, batches[i := next(at)], i), steps=before)
    assert profile.verdict("float16").closest[0].module == case.META["expect"]["module"]


def test_the_profile_in_float32_names_the_module_whose_summed_gradients_overflow_in_float16() -> None:
    case = opened("training", TRAINING[1])
    model, optimizer, batches = case.build()
    model.float()
    given = [tuple(t.float() for t in one) for one in batches]
    profile = nanhunt.profile(model, lambda: case.step(model, optimizer, given[0], 0))
    verdict = profile.verdict("float16", loss_scale=1)
    wanted = case.META["expect"]["module"], "weight_gradients"
    # `mix` stands beside it in one sum: the gradients of both biases are the same
    assert wanted in [(one.module, one.role) for one in verdict.reasons[:3]] and len(verdict.reasons) < 5


def test_these_are_at_least_half_of_the_graded_overflows_of_float16() -> None:
    if not CASES.is_dir():
        pytest.skip("the graded cases are not here")
    causes = ("fp16_overflow", "fp16_grad_overflow", "grad_accumulation_overflow", "autocast_downcast")
    graded = {
        file.stem
        for kind in ("forward", "training")
        for file in (CASES / kind).glob("*.py")
        if any(f'"cause": "{cause}"' in file.read_text() for cause in causes)
    }
    assert graded == {*FORWARD, *INSIDE, *TRAINING}
    assert 2 * len({*FORWARD, *TRAINING}) >= len(graded)
