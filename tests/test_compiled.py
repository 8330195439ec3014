"""Compiled models: checks inside the graph, the same graphs and numbers as without, the right module by name."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.modules import module as nn_module
from torch.utils.checkpoint import checkpoint

import nanhunt
from nanhunt import traces

pytestmark = pytest.mark.filterwarnings("ignore:Using `torch.compile")


def _hooks() -> int:
    return len(nn_module._global_forward_hooks) + len(nn_module._global_forward_pre_hooks)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    gc.collect()
    nn.Identity()(torch.ones(1))
    assert _hooks() == 0, "the hooks go when the compiled code has gone"


class Scale(nn.Module):
    """Multiplies by a number, in code of its own."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by * self.by


class Root(nn.Module):
    """The derivative of a square root at zero is infinite; its weight has a finite gradient, or none."""

    def __init__(self, weight: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(())) if weight else None

    def forward(self, x: Tensor) -> Tensor:
        y = (x - x.detach()).abs().sqrt()
        return y if self.weight is None else y * self.weight


class Block(nn.Module):
    def __init__(self, width: int = 8, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.out, self.middle = nn.Linear(width, width), middle or nn.GELU()
        self.into, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.middle(self.into(self.norm(x))))


class Net(nn.Module):
    """Its children are registered in another order than they run in."""

    def __init__(self, depth: int = 2, **middle: nn.Module) -> None:
        super().__init__()
        self.head, self.batchnorm = nn.Linear(8, 3), nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList([Block(middle=middle.get(f"m{i}")) for i in range(depth)])
        self.scale = 1.0
        self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.batchnorm(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x * self.scale)


Wrap = Callable[[nn.Module, Any], tuple[Callable[..., Any], nn.Module]]


def _whole(model: nn.Module, backend: Any) -> tuple[Callable[..., Any], nn.Module]:
    fast: Any = torch.compile(model, backend=backend, fullgraph=True)
    return fast, fast


def _inner(model: nn.Module, backend: Any) -> tuple[Callable[..., Any], nn.Module]:
    """The watch is given the user's own model."""
    return torch.compile(model, backend=backend, fullgraph=True), model  # type: ignore[return-value]


def _method(model: nn.Module, backend: Any) -> tuple[Callable[..., Any], nn.Module]:
    model.compile(backend=backend, fullgraph=True)
    return model, model


def _layers(model: nn.Module, backend: Any) -> tuple[Callable[..., Any], nn.Module]:
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend=backend, fullgraph=True)
    return model, model


def _forward(model: nn.Module, backend: Any) -> tuple[Callable[..., Any], nn.Module]:
    model.forward = torch.compile(model.forward, backend=backend, fullgraph=True)  # type: ignore[method-assign]
    return model, model


def _function(model: nn.Module, backend: Any) -> tuple[Callable[..., Any], nn.Module]:
    return torch.compile(lambda x: model(x), backend=backend, fullgraph=True), model


def _broken(model: nn.Module, backend: Any) -> tuple[Callable[..., Any], nn.Module]:
    """A graph break in the middle of each block."""
    for block in model.blocks:  # type: ignore[union-attr]
        block.norm.register_forward_hook(lambda module, args, out: torch._dynamo.graph_break())
    fast: Any = torch.compile(model, backend=backend)
    return fast, fast


WRAPS: dict[str, Wrap] = {
    wrap.__name__.strip("_"): wrap for wrap in (_whole, _inner, _method, _layers, _forward, _function, _broken)
}
wraps = pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)


class Watched:
    """Opens a watch, or nothing, around each step of a run."""

    def __init__(self, on: bool, **options: Any) -> None:
        self.on, self.options = on, {"on_hit": "record", **options}
        self.seen: list[int] = []
        self.findings: list[nanhunt.Finding] = []

    def step(self, model: nn.Module, optimizer: Any, run: Callable[[], Any]) -> Any:
        if not self.on:
            return run()
        with nanhunt.watch(model, optimizer, **self.options) as hunt:
            made = run()
        assert not hunt.errors
        assert not hunt._observer.blind
        self.seen.append(hunt.seen)
        self.findings += hunt.findings
        return made


def train(
    wrap: Wrap,
    watched: Watched,
    backend: str = "aot_eager",
    steps: int = 3,
    batches: Callable[[int], int] = lambda i: 6,
    **facts: Any,
) -> tuple[list[Tensor], int]:
    """Everything that a few steps of training leave behind, and how many graphs were compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net(1 if backend == "inductor" else 2)
    for name, value in facts.items():
        setattr(model, name, value)
    counter = CompileCounterWithBackend(backend)
    call, whole = wrap(model, counter)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    left: list[Tensor] = []
    for i in range(steps):
        x = torch.randn(batches(i), 8)

        def run(x: Tensor = x) -> Tensor:
            loss = call(x).square().mean()
            loss.backward()
            left.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        left.append(watched.step(whole, optimizer, run))
    left += [p.detach() for p in model.parameters()] + list(model.buffers())
    return left, counter.frame_count


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# --- nothing changes ----------------------------------------------------------------------------------


@wraps
def test_training_is_bitwise_equal_in_as_many_graphs_through_many_watches(wrap: Wrap) -> None:
    plain, graphs = train(wrap, Watched(False))
    on = Watched(True)
    seen, watched_graphs = train(wrap, on)
    assert same(plain, seen)
    assert watched_graphs == graphs
    assert len(set(on.seen)) == 1 and on.seen[0] > 20, "each of the watches looks at the same tensors"
    assert on.findings == []


@pytest.mark.parametrize("wrap", [_whole, _layers], ids=["whole", "layers"])
def test_inductor_makes_the_same_numbers_in_as_many_graphs(wrap: Wrap) -> None:
    plain, graphs = train(wrap, Watched(False), "inductor", 3)
    seen, watched_graphs = train(wrap, Watched(True), "inductor", 3)
    assert same(plain, seen)
    assert watched_graphs == graphs


@wraps
def test_activation_checkpoints_inside_a_graph_are_looked_into(wrap: Wrap) -> None:
    if wrap in (_layers, _broken):
        pytest.skip("dynamo wants no graph break in a checkpoint")
    plain, graphs = train(wrap, Watched(False), checkpointed=True)
    on = Watched(True)
    seen, watched_graphs = train(wrap, on, checkpointed=True)
    assert same(plain, seen)
    assert watched_graphs == graphs
    assert on.seen[0] > 20


@pytest.mark.parametrize("wrap", [_whole, _layers, _function], ids=["whole", "layers", "function"])
def test_a_batch_of_another_size_costs_the_one_dynamic_graph_it_always_costs(wrap: Wrap) -> None:
    plain, graphs = train(wrap, Watched(False), batches=lambda i: 4 + i)
    seen, watched_graphs = train(wrap, Watched(True), batches=lambda i: 4 + i)
    assert same(plain, seen)
    assert watched_graphs == graphs


@pytest.mark.parametrize("wrap", [_whole, _layers, _function], ids=["whole", "layers", "function"])
def test_steps_that_are_left_out_run_a_second_graph_and_no_third(wrap: Wrap) -> None:
    plain, graphs = train(wrap, Watched(False), steps=6)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    counter = CompileCounterWithBackend("aot_eager")
    call, whole = wrap(model, counter)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    with nanhunt.watch(whole, optimizer, every=2, on_hit="record") as hunt:
        for _ in range(6):
            before = hunt.seen
            loss = call(torch.randn(6, 8)).square().mean()
            loss.backward()
            looked = hunt.seen - before
            optimizer.step()
            optimizer.zero_grad()
            losses.append((loss.detach(), looked))
    assert counter.frame_count == 2 * graphs
    assert [bool(looked) for _, looked in losses] == [True, False] * 3
    assert all(any(torch.equal(loss, one) for one in plain) for loss, _ in losses)


@wraps
def test_gradients_of_several_forwards_add_up(wrap: Wrap) -> None:
    def run(on: bool) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Net()
        call, whole = wrap(model, CompileCounterWithBackend("aot_eager"))
        for _ in range(2):
            with nanhunt.watch(whole, on_hit="record") if on else torch.enable_grad():
                first, second = call(torch.randn(4, 8)).sum(), call(torch.randn(4, 8)).sum()
                second.backward()
                first.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert same(run(False), run(True))


@pytest.mark.parametrize("wrap", [_whole, _layers], ids=["whole", "layers"])
def test_two_backwards_through_one_graph(wrap: Wrap) -> None:
    def run(on: bool) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Net()
        call, whole = wrap(model, CompileCounterWithBackend("aot_eager"))
        for _ in range(2):
            with nanhunt.watch(whole, on_hit="record") if on else torch.enable_grad():
                loss = call(torch.randn(4, 8)).square().sum()
                loss.backward(retain_graph=True)
                loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert same(run(False), run(True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
@pytest.mark.parametrize("wrap", [_whole, _method, _function], ids=["whole", "method", "function"])
def test_inference_and_autocast(wrap: Wrap, mode: Callable[[], Any]) -> None:
    def run(on: bool) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        call, whole = wrap(Net().eval(), CompileCounterWithBackend("aot_eager"))
        made = []
        for _ in range(2):
            hunt = nanhunt.watch(whole) if on else None
            with mode():
                made.append(call(torch.randn(4, 8)))
            if hunt is not None:
                hunt.__exit__(None, None, None)
                assert hunt.seen > 10
                assert not hunt.errors
        return made

    assert same(run(False), run(True))


def test_reduce_overhead() -> None:
    def run(on: bool) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Block()
        fast: Any = torch.compile(model, mode="reduce-overhead")
        for _ in range(3):
            with nanhunt.watch(fast, on_hit="record") if on else torch.enable_grad():
                fast(torch.randn(4, 8)).square().sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    assert same(run(False), run(True))


def test_a_step_that_is_compiled_with_its_backward_runs_on_and_is_seen() -> None:
    def run(on: bool) -> tuple[list[Tensor], Any]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        fast = torch.compile(step, backend="aot_eager")
        hunt = nanhunt.watch(model, optimizer, on_hit="record") if on else None
        losses = [fast(torch.randn(4, 8)).detach() for _ in range(3)]
        if hunt is not None:
            hunt.__exit__(None, None, None)
        return losses + [p.detach() for p in model.parameters()], hunt

    (plain, _), (seen, hunt) = run(False), run(True)
    assert same(plain, seen)
    assert not hunt.errors
    assert hunt.seen > 20


# --- the right name -----------------------------------------------------------------------------------


def _forward_fault(wrap: Wrap, model: Net, x: Tensor, backend: str = "eager") -> nanhunt.Finding:
    call, whole = wrap(model, CompileCounterWithBackend(backend))
    with pytest.raises(nanhunt.NonFiniteError) as stop, nanhunt.watch(whole):
        call(x).sum().backward()
    return stop.value.finding


@wraps
def test_an_overflow_in_a_child_is_that_childs(wrap: Wrap) -> None:
    finding = _forward_fault(wrap, Net(m1=Scale(1e30)), torch.randn(6, 8))
    assert (finding.phase, finding.module, finding.kind) == ("forward", "blocks.1.middle", "+inf")
    assert finding.module_type == "Scale"
    assert finding.call == 1
    assert finding.context["detail"] == "module" or wrap is _broken
    assert "inside the compiled graph" in finding.context["compiled"]


@wraps
def test_what_a_container_computes_itself_is_no_childs(wrap: Wrap) -> None:
    model = Net()
    model.scale = 2e38
    finding = _forward_fault(wrap, model, torch.randn(6, 8) * 10)
    assert (finding.phase, finding.module, finding.kind) == ("forward", "", "+inf")
    assert finding.tensor == "input of head" or wrap is _layers  # whose eager parent is run again at op level


@wraps
def test_a_bad_batch_is_nobodys_fault(wrap: Wrap) -> None:
    x = torch.randn(6, 8)
    x[2, 3] = float("nan")
    finding = _forward_fault(wrap, Net(), x)
    assert (finding.phase, finding.module, finding.cause) == ("input", None, "bad_input")


@wraps
def test_a_bad_weight_is_named(wrap: Wrap) -> None:
    model = Net()
    with torch.no_grad():
        model.blocks[1].into.weight[0, 0] = float("nan")  # type: ignore[index,union-attr]
    finding = _forward_fault(wrap, model, torch.randn(6, 8))
    assert (finding.phase, finding.module, finding.tensor) == ("state", "blocks.1.into", "blocks.1.into.weight")


@wraps
def test_a_log_of_zero_is_no_mask(wrap: Wrap) -> None:
    class Log(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 0).log()

    finding = _forward_fault(wrap, Net(m0=Log()), torch.randn(6, 8))
    assert (finding.phase, finding.module, finding.kind) == ("forward", "blocks.0.middle", "-inf")


@wraps
@pytest.mark.parametrize("weight", [True, False])
def test_a_gradient_that_is_made_in_a_graph_is_found_by_the_parameters_behind_it(wrap: Wrap, weight: bool) -> None:
    finding = _forward_fault(wrap, Net(m1=Root(weight)), torch.randn(6, 8))
    assert (finding.phase, finding.module) == ("backward", "blocks.1.middle")


def test_inductor_names_them_too() -> None:
    for fault, phase in ((Scale(1e30), "forward"), (Root(False), "backward")):
        torch._dynamo.reset()
        finding = _forward_fault(_whole, Net(1, m0=fault), torch.randn(6, 8), "inductor")
        assert (finding.phase, finding.module) == (phase, "blocks.0.middle")


def test_a_module_that_is_called_twice_in_a_graph_is_told_apart() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.fc = Scale(1e15), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.scale(self.fc(self.scale(x)))

    finding = _forward_fault(_whole, Twice(), torch.randn(6, 8))  # type: ignore[arg-type]
    assert (finding.module, finding.call) == ("scale", 2)


def test_keyword_arguments_and_structures_are_seen_as_in_eager_mode() -> None:
    class Attends(nn.Module):
        def forward(self, x: Tensor, *, pair: dict[str, Tensor]) -> dict[str, Any]:
            return {"a": (x + pair["y"], x), "n": 3}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.fc = Attends(), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.inner(x, pair={"y": x / 0})["a"][0])

    finding = _forward_fault(_whole, Model(), torch.ones(6, 8))  # type: ignore[arg-type]
    assert (finding.phase, finding.module, finding.tensor) == ("forward", "", "input of inner")


def test_the_line_of_a_call_inside_the_graph_is_known() -> None:
    finding = _forward_fault(_whole, Net(m1=Scale(1e30)), torch.randn(6, 8))
    assert finding.line is not None and finding.line.startswith(__file__)
    assert "self.out(self.middle" in (finding.source or "")


def test_ranges_can_wait_on_the_device() -> None:
    """Deferred, as on an accelerator: nothing is read until the step's region ends."""
    model = Net(m1=Scale(1e30))
    fast: Any = torch.compile(model, backend="aot_eager")
    with nanhunt.watch(fast, on_hit="record", _defer=True) as hunt:
        fast(torch.randn(6, 8)).sum().backward()
    assert hunt.finding is not None
    assert hunt.finding.module == "blocks.1.middle"
    assert not hunt.errors


def test_float8_is_looked_at_and_whole_numbers_are_not() -> None:
    class Casts(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return (x * 1e9).to(torch.float8_e5m2), x.long()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.casts = Casts()

        def forward(self, x: Tensor) -> Tensor:
            small, whole = self.casts(x)
            return small.float() + whole

    fast: Any = torch.compile(Model(), backend="aot_eager", fullgraph=True)
    with nanhunt.watch(fast, on_hit="record") as hunt:
        fast(torch.ones(6, 8))
    assert not hunt._observer.blind
    assert hunt.finding is not None
    assert (hunt.finding.module, hunt.finding.kind) == ("casts", "+inf")


def test_float64_has_a_range_of_its_own() -> None:
    fast: Any = torch.compile(Net(m0=Scale(1e30)).double(), backend="aot_eager")
    with nanhunt.watch(fast, on_hit="record") as hunt:
        fast(torch.randn(6, 8).double()).sum().backward()
    assert hunt.finding is None


# --- what was compiled before -------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [_whole, _method, _layers, _forward], ids=["whole", "method", "layers", "forward"])
def test_a_model_that_ran_before_the_watch_is_refused_and_can_be_had_in_two_ways(wrap: Wrap) -> None:
    model = Net(m1=Scale(1e30))
    counter = CompileCounterWithBackend("aot_eager")
    call, whole = wrap(model, counter)
    call(torch.randn(6, 8))
    with pytest.raises(nanhunt.UsageError, match=r'before it was watched.*compiled="retrace".*compiled="eager"'):
        nanhunt.watch(whole)
    before = counter.frame_count
    for way, recompiled in (("eager", False), ("retrace", True)):
        with nanhunt.watch(whole, on_hit="record", compiled=way) as hunt:
            call(torch.randn(6, 8)).sum().backward()
        assert hunt.finding is not None
        assert hunt.finding.module == "blocks.1.middle"
        assert ("eagerly" in hunt.finding.context["compiled"].split(":")[0]) is not recompiled
        assert (counter.frame_count > before) is recompiled


def test_a_model_that_was_watched_from_the_start_is_never_refused() -> None:
    fast: Any = torch.compile(Net(), backend="aot_eager")
    for train_mode in (True, False, True):
        fast.train(train_mode)
        with nanhunt.watch(fast):
            fast(torch.randn(6, 8))
        fast(torch.randn(6, 8))  # without a watch, in between


def test_an_eager_model_is_not_refused_for_compiled_ones_of_its_class() -> None:
    torch.compile(Net(), backend="eager")(torch.randn(6, 8))
    with nanhunt.watch(Net()) as hunt:
        pass
    assert hunt.finding is None


def test_a_model_compiled_beside_a_watched_one_can_be_watched_later() -> None:
    """Its graphs were traced with our hooks but no checks, and are traced once more with them."""
    first, second = Net(), Net(m1=Scale(1e30))
    fast: Any = torch.compile(second, backend="aot_eager")
    eager: Any = torch.compile(first, backend="aot_eager")
    with nanhunt.watch(eager):
        eager(torch.randn(6, 8))
        fast(torch.randn(6, 8))
    with nanhunt.watch(fast, on_hit="record") as hunt:
        fast(torch.randn(6, 8)).sum().backward()
    assert hunt.finding is not None
    assert hunt.finding.module == "blocks.1.middle"


def test_where_old_code_hides_the_modules_inside_the_finding_says_so() -> None:
    """Nothing tells that this model is compiled: somebody else holds the compiled one."""
    model = Net(m1=Scale(1e30))
    fast: Any = torch.compile(model, backend="eager")
    fast(torch.randn(6, 8))
    with nanhunt.watch(model, on_hit="record", detail="module") as hunt:
        fast(torch.randn(6, 8)).sum().backward()
    assert hunt.finding is not None
    assert hunt.finding.module == ""
    assert list(hunt.finding.context["not_seen"]) == [
        "the modules inside the model: its code was compiled before the watch began"
    ]


def test_op_detail_runs_a_compiled_model_eagerly_and_says_so() -> None:
    fast: Any = torch.compile(Net(m1=Scale(1e30)), backend="aot_eager")
    fast(torch.randn(6, 8))
    with nanhunt.watch(fast, on_hit="record", detail="op") as hunt:
        fast(torch.randn(6, 8)).sum().backward()
    assert hunt.finding is not None
    assert (hunt.finding.module, hunt.finding.op) == ("blocks.1.middle", "aten.mul.Tensor")
    assert "eagerly" in hunt.finding.context["compiled"]


@pytest.mark.parametrize("ran", [False, True])
def test_hunt_looks_into_the_graph_where_it_can_and_explains_by_an_eager_run(ran: bool) -> None:
    fast: Any = torch.compile(Net(m1=Scale(1e30)), backend="aot_eager")
    if ran:
        fast(torch.randn(6, 8))

    def step(x: Tensor) -> None:
        fast(x).sum().backward()

    finding = nanhunt.hunt(step, torch.randn(6, 8), model=fast)
    assert finding is not None
    assert (finding.module, finding.op) == ("blocks.1.middle", "aten.mul.Tensor")
    assert finding.context["reproduced"] is True
    assert ("inside the compiled graph" in finding.context["compiled"]) is not ran


# --- what stands, and what is left --------------------------------------------------------------------


def _traced() -> tuple[Net, Any]:
    model = Net()
    return model, torch.compile(model, backend="aot_eager")


def test_a_model_that_was_never_compiled_is_left_as_it_was() -> None:
    model = Net()
    before = [dict(module.__dict__) for module in model.modules()]
    with nanhunt.watch(model):
        model(torch.randn(6, 8))
        during = [dict(module.__dict__) for module in model.modules()]
    assert [set(one) for one in before] == [set(one) for one in during] == [set(m.__dict__) for m in model.modules()]
    assert _hooks() == 0


def test_after_a_watch_nothing_stands_on_the_modules_and_the_hooks_stay_as_long_as_the_code() -> None:
    model, fast = _traced()
    before = [set(module.__dict__) for module in model.modules()]
    with nanhunt.watch(fast):
        fast(torch.randn(6, 8))
        assert traces.SEAT in model.head.__dict__
    assert [set(module.__dict__) for module in model.modules()] == before
    assert _hooks() == 2, "without them the compiled code would be compiled again"


def test_copies_pickles_and_states_of_a_watched_model_have_nothing_of_ours() -> None:
    model, fast = _traced()
    names = set(model.state_dict())
    with nanhunt.watch(fast):
        x = torch.randn(6, 8)
        fast(x)
        assert set(model.state_dict()) == names
        assert len(list(model.buffers())) == 3
        twin, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        file = io.BytesIO()
        torch.save(model, file)
        assert b"nanhunt.traces" not in file.getvalue() + pickle.dumps(model)
        for one in (twin, loaded):
            assert getattr(one.head, traces.SEAT) is None
            assert torch.equal(one.eval()(x), model.eval()(x))
            model.train()
            fast_copy: Any = torch.compile(one, backend="aot_eager")
            fast_copy(x)


def test_a_watch_that_ends_by_an_error_leaves_the_compiled_model_usable() -> None:
    model, fast = _traced()
    model.eval()
    x = torch.randn(6, 8)
    with pytest.raises(nanhunt.NonFiniteError), nanhunt.watch(fast):
        fast(x * float("nan")).sum().backward()
    with nanhunt.watch(fast) as hunt:
        fast(x).sum().backward()
    assert hunt.finding is None
    assert fast(x).isfinite().all()


def test_two_watches_see_the_same_graph() -> None:
    model, fast = _traced()
    model.blocks[1].middle = Scale(1e30)  # type: ignore[union-attr]
    with nanhunt.watch(fast, on_hit="record") as outer, nanhunt.watch(model.blocks, on_hit="record") as inner:
        fast(torch.randn(6, 8)).sum().backward()
    assert outer.finding is not None and inner.finding is not None
    assert (outer.finding.module, inner.finding.module) == ("blocks.1.middle", "1.middle")
