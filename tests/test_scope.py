"""How much is looked at: patterns, forward alone, every n-th step; and what a healthy step costs, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanhunt
from nanhunt.probe import limits


class _Exp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(_Block(), _Block())
        self.exp = _Exp()
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.exp(self.encoder(x)))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, scale: float = 1.0) -> None:
    loss = model(torch.ones(4, 8) * scale).square().mean()
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def _ops(run: Callable[[], Any]) -> Counter[str]:
    """How often each op ran, also those that no dispatch mode is shown."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return Counter({e.key: e.count for e in profile.key_averages() if e.key.startswith("aten::")})


def _reductions(run: Callable[[], Any]) -> int:
    return _ops(run)["aten::aminmax"]


@pytest.fixture
def model() -> _Net:
    torch.manual_seed(0)
    return _Net()


# --- only, skip ---------------------------------------------------------------------------------------


def test_only_looks_at_a_module_with_all_that_is_inside_it(model: _Net) -> None:
    with nanhunt.watch(model, only=("exp",), on_hit="record") as hunt:
        _step(model, scale=1e4)
    found = hunt.finding
    assert found is not None and (found.module, found.phase, found.kind) == ("exp", "forward", "+inf")
    model.zero_grad()
    with nanhunt.watch(model, only=("encoder.1",)) as few, nanhunt.watch(model) as all_of_it:
        _step(model)
    assert 0 < few.seen < all_of_it.seen


def test_skip_leaves_a_module_out_with_all_that_is_inside_it(model: _Net) -> None:
    with nanhunt.watch(model, skip=("encoder",)) as few, nanhunt.watch(model, skip=("encoder.*", "encoder")) as same:
        _step(model)
    with nanhunt.watch(model) as all_of_it:
        _step(model)
    assert few.seen == same.seen < all_of_it.seen


def test_a_pattern_fits_paths_as_a_file_pattern_does(model: _Net) -> None:
    with nanhunt.watch(model, only=("encoder.*.act",)) as hunt:
        _step(model)
    # two activations and their gradients, what they are fed and its gradient, the model's input and output, the loss
    assert hunt.seen < 14


def test_what_a_module_that_was_left_out_has_made_is_told_with_that_reserve(model: _Net) -> None:
    with nanhunt.watch(model, only=("head",), on_hit="record", detail="module") as hunt:
        _step(model, scale=1e4)
    found = hunt.finding
    assert found is not None and found.module == ""
    assert any("left out" in text for text in found.context["not_seen"])


def test_parameters_of_modules_that_were_left_out_are_not_looked_at(model: _Net) -> None:
    with torch.no_grad():
        model.encoder[0].up.weight[0, 0] = torch.nan
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanhunt.watch(model, optimizer, skip=("encoder",), on_hit="record") as hunt:
        model.head(torch.ones(4, 8)).sum().backward()
        optimizer.step()
    assert hunt.finding is None


@pytest.mark.parametrize("option", ["only", "skip"])
def test_a_pattern_that_fits_nothing_is_refused_with_names_that_would(model: _Net, option: str) -> None:
    with pytest.raises(nanhunt.UsageError, match=rf"{option}: no module fits 'decoder\.\*'; there are 'encoder'"):
        nanhunt.watch(model, **{option: ("head", "decoder.*")})


@pytest.mark.parametrize("options", [{"only": ("head",)}, {"skip": ("head",)}, {"backward": False}])
def test_op_level_is_all_or_nothing(model: _Net, options: dict[str, Any]) -> None:
    with pytest.raises(nanhunt.UsageError, match="leave only=, skip= and backward= out"):
        nanhunt.watch(model, detail="op", **options)


# --- forward alone --------------------------------------------------------------------------------------


def test_forward_alone_hangs_nothing_on_gradients(model: _Net) -> None:
    out: list[Tensor] = []
    with nanhunt.watch(model, backward=False):
        out.append(model(torch.ones(4, 8)))
        assert out[0]._backward_hooks is None
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_forward_alone_finds_what_forward_makes_and_a_bad_loss(model: _Net) -> None:
    with nanhunt.watch(model, backward=False, on_hit="record") as hunt:
        _step(model, scale=1e4)
    assert hunt.finding is not None and hunt.finding.module == "exp"
    with nanhunt.watch(model, backward=False, on_hit="record") as hunt:
        (model(torch.ones(4, 8)).sum() * torch.nan).backward()
    assert hunt.finding is not None and (hunt.finding.phase, hunt.finding.module) == ("forward", None)


def test_forward_alone_knows_a_weight_that_was_bad_before(model: _Net) -> None:
    with torch.no_grad():
        model.head.weight[0, 0] = torch.nan
    with nanhunt.watch(model, backward=False, on_hit="record") as hunt:
        _step(model)
    assert hunt.finding is not None and (hunt.finding.phase, hunt.finding.tensor) == ("state", "head.weight")


def test_forward_alone_lays_a_weight_that_an_update_has_spoiled_to_the_update(model: _Net) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=float("inf"))
    with nanhunt.watch(model, optimizer, backward=False, on_hit="record") as hunt:
        _step(model, optimizer)
        assert hunt.finding is None and hunt.step == 1
        _step(model, optimizer)
    found = hunt.finding
    assert found is not None and (found.phase, found.step) == ("optimizer", 0)


# --- what is not looked at twice ------------------------------------------------------------------------


def test_a_tensor_that_several_modules_hand_on_is_reduced_once() -> None:
    """One forward of nested containers around one layer: its input, its output."""
    model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Identity()), nn.Flatten(0, 0)).eval()
    with torch.no_grad(), nanhunt.watch(model, detail="module"):
        model(torch.ones(2, 4))
        assert _reductions(lambda: model(torch.ones(2, 4))) == 2


def test_the_output_of_one_module_is_not_reduced_again_as_the_input_of_the_next() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(6)))
    with nanhunt.watch(model, detail="module"):
        _first = model(torch.ones(2, 4))
        assert _reductions(lambda: model(torch.ones(2, 4))) == 1 + 6


def test_small_gradients_are_reduced_together(model: _Net) -> None:
    with nanhunt.watch(model, detail="module") as hunt:
        _step(model)
        before = hunt.seen
        loss = model(torch.ones(4, 8)).square().mean()
        forward = hunt.seen - before
        reductions = _reductions(loss.backward)
        backward = hunt.seen - before - forward
    parameters = len(list(model.parameters()))
    assert reductions == backward - parameters + 1


def test_a_bad_gradient_among_small_ones_is_still_told_apart(model: _Net) -> None:
    def double_overflow(grad: Tensor) -> Tensor:
        return grad * torch.inf

    model.encoder[1].down.bias.register_hook(double_overflow)
    with nanhunt.watch(model, on_hit="record", detail="module") as hunt:
        _step(model)
    assert hunt.finding is not None and hunt.finding.tensor == "grad of encoder.1.down.bias"


@pytest.mark.parametrize("late", [False, True])
def test_a_hook_that_uses_up_a_gradient_at_once_does_not_hide_it(model: _Net, late: bool) -> None:
    """An optimizer step inside the backward: our look comes before it wherever that hook was hung."""

    def spoil(p: Tensor) -> None:
        p.grad = None

    bias = model.head.bias
    bias.register_hook(lambda grad: grad * torch.nan)
    if not late:
        bias.register_post_accumulate_grad_hook(lambda p: None)
    with nanhunt.watch(model, on_hit="record", detail="module") as hunt:
        if late:
            bias.register_post_accumulate_grad_hook(spoil)
        _step(model)
    assert hunt.finding is not None and hunt.finding.tensor == "grad of head.bias"


def test_optimizer_state_is_read_only_when_it_can_have_gone_bad(model: _Net) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with nanhunt.watch(model, optimizer, detail="module") as hunt:
        looks = []
        for _ in range(33):
            before = hunt.seen
            _step(model, optimizer)
            looks.append(hunt.seen - before)
    state = 2 * len(list(model.parameters()))
    usual = min(looks)
    assert [i for i, n in enumerate(looks) if n >= usual + state] == [0, 16, 32]


@pytest.mark.parametrize("own", [False, True])
def test_optimizer_state_that_can_have_gone_bad_is_read(own: bool) -> None:
    """A gradient whose square overflows, and an optimizer that nobody knows."""

    class Own(torch.optim.Adam):
        def step(self, closure: Any = None) -> None:
            super().step()
            for kept in self.state.values():
                kept["exp_avg_sq"] += steps > 3

    model = nn.Linear(4, 1, bias=False)
    optimizer = (Own if own else torch.optim.Adam)(model.parameters(), lr=1e-3)
    with nanhunt.watch(model, optimizer, on_hit="record") as hunt:
        for steps in range(6):
            loss = model(torch.ones(2, 4)).sum() * (1e25 if steps == 4 and not own else 1.0)
            loss.backward()
            if own and steps == 4:
                next(iter(optimizer.state.values()))["exp_avg_sq"].fill_(torch.inf)
            optimizer.step()
            optimizer.zero_grad()
    assert hunt.finding is not None
    assert (hunt.finding.phase, hunt.finding.step) == ("optimizer", 4)
    assert "exp_avg_sq" in str(hunt.finding.tensor)


def test_memory_order_is_followed_whatever_the_layout() -> None:
    """channels_last, transposed and expanded tensors are reduced as they lie: no copy, no slow path."""
    x = torch.ones(2, 8, 6, 6).to(memory_format=torch.channels_last)
    for tensor in (x, torch.ones(6, 9).t(), torch.ones(5, 1).expand(5, 7)):
        ops = _ops(lambda tensor=tensor: limits(tensor))
        assert ops["aten::aminmax"] == 1
        assert not {"aten::clone", "aten::contiguous", "aten::copy_", "aten::_to_copy"} & set(ops)


def test_steps_that_are_left_out_reduce_nothing(model: _Net) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with nanhunt.watch(model, optimizer, every=3):
        per_step = [_reductions(lambda: _step(model, optimizer)) for _ in range(6)]
    assert [n > 0 for n in per_step] == [True, False, False, True, False, False]


# --- the way of accelerators ------------------------------------------------------------------------------


def test_where_reads_are_deferred_the_host_reads_once_a_phase(model: _Net) -> None:
    """Forward, backward and update of one device and dtype: one copy each, and no number read in between."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with nanhunt.watch(model, optimizer, detail="module", _defer=True) as hunt:
        _step(model, optimizer)
        slots = hunt._observer.slots
        before = slots.reads
        ops = _ops(lambda: _step(model, optimizer))
        assert 1 <= slots.reads - before <= 4
    plain = _ops(lambda: _step(model, optimizer))
    assert ops["aten::_local_scalar_dense"] == plain["aten::_local_scalar_dense"]


def test_deferred_ranges_say_the_same_as_those_read_at_once(model: _Net) -> None:
    trails = []
    for defer in (False, True):
        model.zero_grad()
        with nanhunt.watch(model, detail="module", on_hit="record", _defer=defer) as hunt:
            _step(model)
            model.zero_grad()
            _step(model, scale=1e4)
        assert hunt.finding is not None and hunt.finding.module == "exp"
        trails.append([str((c.module, c.absmax_in, c.absmax_out)) for c in hunt.finding.trail])
    at_once, later = trails  # which goes on behind the birth, and has dropped as many at its other end
    both = [row for row in at_once if row in later]
    assert len(both) > 8 and both == [row for row in later if row in at_once]


def test_a_deferred_gradient_is_noted_once_also_while_something_waits_to_be_judged() -> None:
    """What came back to a call decides whether it can have overflowed: twice the sum would be another answer."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    incoming = []
    for defer in (False, True):
        for alert in (False, True):
            with nanhunt.watch(model, detail="module", on_hit="record", _defer=defer) as hunt:
                loss = model(torch.ones(2, 4)).sum()
                hunt._observer.judge.alert = alert
                loss.backward()
                incoming.append(hunt._observer.calls.last["1"].incoming)
            model.zero_grad()
    assert incoming[0] > 0 and incoming == [incoming[0]] * 4
