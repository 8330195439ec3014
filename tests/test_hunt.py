"""Hunt: one run, and a second at op level when it fails; either way the state is that of one plain step."""

import copy
import inspect
import os
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as optim_module

from nanhunt.errors import NonFiniteError, UsageError
from nanhunt.finding import Finding
from nanhunt.hunter import hunt
from nanhunt.watching import watch

from .hunted import FAULTS, MODELS, RECIPES, Program, bits, differences


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums have one order only when one thread takes them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("handed", [True, False], ids=["handed over", "found in use"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_leaves_no_trace(name: str, recipe: str, fault: str, handed: bool) -> None:
    """After a hunt everything is, bit for bit and in the same memory, as after one plain step."""
    if handed and name in ("bert", "lstm"):
        pytest.skip("found in use covers more")
    plain, hunted = Program(name, recipe, fault), Program(name, recipe, fault)
    states = []
    for program, hunting in ((plain, False), (hunted, True)):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program.step(program.draw())
            program.spoil()
            x = program.draw()
            if not hunting:
                program.step(x)
            else:
                where = [t.data_ptr() for t in program.model.parameters()]
                given = {"optimizer": program.optimizer, "scaler": program.scaler} if handed else {}
                finding = hunt(program.step, x, model=program.model, **given)
                assert where == [t.data_ptr() for t in program.model.parameters()]
        states.append(program.state())
    assert differences(*states) == []
    if fault == "healthy":
        assert finding is None
    else:
        assert finding is not None
        assert finding.context["reproduced"] is True
        assert finding.step == 0
        assert finding.phase == ("optimizer" if fault == "update" else "forward")


@pytest.mark.parametrize("fault", ["loss", "update"])
@pytest.mark.parametrize("recipe", ["adamw", "sgd"])
def test_first_step_of_an_optimizer(recipe: str, fault: str) -> None:
    """State that an optimizer makes in its first step is made once, not carried over from the run that failed."""
    states = []
    for hunting in (False, True):
        program = Program("conv", recipe, fault)
        program.spoil()
        x = program.draw()
        if hunting:
            assert hunt(program.step, x, model=program.model) is not None
        else:
            program.step(x)
        states.append(program.state())
    assert differences(*states) == []


@pytest.mark.parametrize("fault", ["loss", "update"])
def test_the_comparison_can_fail(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without putting anything back the states differ in every respect, so the tests above look at something."""
    monkeypatch.setattr("nanhunt.replay.Snapshot.restore", lambda self: None)
    states = []
    for hunting in (False, True):
        program = Program("conv", "adamw", fault)
        program.step(program.draw())
        program.spoil()
        x = program.draw()
        if hunting:
            hunt(program.step, x, model=program.model)
        else:
            program.step(x)
        states.append(program.state())
    assert {"buffers", "attributes", "random"} <= set(differences(*states))
    if fault == "update":
        assert {"optimizer", "parameters"} <= set(differences(*states))


def net(*, spoilt: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    if spoilt:
        model.register_forward_pre_hook(lambda m, args: (args[0] * 1e30 * 1e30,))
    return model


def backward(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).pow(2).mean()
    loss.backward()
    return loss.detach()


def bad_batch() -> Tensor:
    return torch.tensor([[1.0, 2.0, float("nan"), 3.0]])


def test_healthy_step_runs_once() -> None:
    """A step without a fault runs once and gives None."""
    ran: list[int] = []

    def step(x: Tensor) -> Tensor:
        ran.append(1)
        return backward(model, x)

    model = net()
    assert hunt(step, torch.ones(2, 4), model=model) is None
    assert len(ran) == 1


def test_failing_step_runs_twice_and_to_its_end_once() -> None:
    """The first run is stopped at the fault, the second goes on to the end."""
    began: list[int] = []
    ended: list[int] = []

    def step(x: Tensor) -> None:
        began.append(1)
        backward(model, x)
        ended.append(1)

    model = net()
    finding = hunt(step, bad_batch(), model=model)
    assert isinstance(finding, Finding)
    assert (len(began), len(ended)) == (2, 1)
    assert finding.phase == "input"
    assert finding.context["reproduced"] is True
    assert Finding.from_json(finding.to_json()) == finding
    assert "data" not in finding.context


def test_data_drawn_from_torch_inside_the_step_is_drawn_again() -> None:
    """Random numbers are put back, so a batch made in the step is the same batch."""
    model = net()
    torch.manual_seed(3)

    def step() -> None:
        x = torch.randn(3, 4)
        backward(model, x / (x > x.max() - 1e-6).float())

    finding = hunt(step, model=model)
    assert finding is not None
    assert finding.context["reproduced"] is True
    assert "data" not in finding.context


def test_data_drawn_from_an_iterator_is_said() -> None:
    """An iterator can't be put back: the second run has another batch, and the finding says so."""
    model = net()
    batches = iter([bad_batch(), torch.ones(1, 4)])
    finding = hunt(lambda: backward(model, next(batches)), model=model)
    assert finding is not None
    assert finding.context["reproduced"] is False
    assert "draws its own data" in finding.context["data"]
    assert "Not reproduced" in (finding.why or "")


def test_iterator_that_ends_after_the_bad_batch() -> None:
    """The second run has nothing to eat: the first finding is kept, and what happened is told."""
    model = net()
    batches = iter([bad_batch()])
    finding = hunt(lambda: backward(model, next(batches)), model=model)
    assert finding is not None
    assert finding.context["reproduced"] is False
    assert "draws its own data" in finding.context["data"]
    assert finding.context["exception"].startswith("StopIteration")


def test_not_reproduced() -> None:
    """A fault that does not come back is reported as the first run has seen it."""
    model = net()
    bad = [True]

    def step(x: Tensor) -> None:
        loss = model(x).sum()
        if bad.pop() if bad else False:
            loss = loss * float("inf") * 0
        loss.backward()

    finding = hunt(step, torch.ones(2, 4), model=model)
    assert finding is not None
    assert finding.context["reproduced"] is False
    assert "data" not in finding.context
    assert "Not reproduced: run a second time, the step did not fail" in (finding.why or "")


def test_batch_that_the_step_writes_to() -> None:
    """Tensors of the arguments are put back, and so is what the step takes out of a batch."""
    model = net()
    shapes: list[Any] = []

    def step(x: Tensor, batch: dict[str, Tensor]) -> None:
        labels = batch.pop("labels")
        x.mul_(1e20)
        shapes.append((labels.clone(), x.clone()))
        (model(x) * 1e30).sub(labels).pow(2).mean().backward()

    x, batch = torch.ones(2, 4), {"labels": torch.zeros(2, 1), "more": torch.ones(1)}
    finding = hunt(step, x, batch, model=model)
    assert finding is not None
    assert finding.context["reproduced"] is True
    assert "data" not in finding.context
    assert len(shapes) == 2
    assert torch.equal(shapes[0][1], shapes[1][1])
    assert torch.equal(x, torch.full((2, 4), 1e20))
    assert list(batch) == ["more"]


class Counter:
    """Something of the user's own with a state."""

    def __init__(self) -> None:
        self.n = 0

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n = state["n"]


def test_restore() -> None:
    """What is handed to restore= is put back: an average of the weights, a generator, anything with a state_dict."""

    def run(hunting: bool) -> Any:
        model = net()
        average = torch.optim.swa_utils.AveragedModel(model)
        counter, numbers, generator = Counter(), np.random.default_rng(0), torch.Generator().manual_seed(0)
        own = random.Random(0)

        def step(x: Tensor) -> None:
            x = x + torch.rand(x.shape, generator=generator) + numbers.random() + own.random()
            counter.n += 1
            average.update_parameters(model)
            backward(model, x)
            model(x * float("nan"))

        x = torch.ones(2, 4)
        if hunting:
            finding = hunt(step, x, model=model, restore=(average, counter, generator, numbers, own))
            assert finding is not None
            assert finding.context["reproduced"] is True
        else:
            step(x)
        drawn = (numbers.random(), own.random(), torch.rand(1, generator=generator).item())
        return counter.n, drawn, bits(average.state_dict()), bits([p.grad for p in model.parameters()])

    assert run(hunting=False) == run(hunting=True)


@pytest.mark.parametrize(("error", "runs"), [(KeyError("labels"), 2), (StopIteration(), 1), (MemoryError(), 1)])
def test_exception_of_the_step_itself(error: Exception, runs: int) -> None:
    """An error without a bad number behind it leaves hunt as it is, and the state is that of one plain step."""
    ran: list[int] = []

    def run(hunting: bool) -> Any:
        model = net()

        def step(x: Tensor) -> None:
            ran.append(1)
            backward(model, x + torch.rand(2, 4))
            raise error

        with pytest.raises(type(error)) as caught:
            hunt(step, torch.ones(2, 4), model=model) if hunting else step(torch.ones(2, 4))
        assert caught.value is error
        return bits([p.grad for p in model.parameters()])

    assert run(hunting=False) == run(hunting=True)
    assert len(ran) == 1 + runs


class Sampler(nn.Module):
    """Draws from a softmax; `apart`: a child makes the NaN, else the module's own code."""

    def __init__(self, *, apart: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.softmax = nn.Softmax(-1) if apart else None

    def forward(self, x: Tensor) -> Tensor:
        scores = self.inner(x) * 1e38 * 1e38
        return torch.multinomial(self.softmax(scores) if self.softmax is not None else scores.softmax(-1), 1)


@pytest.mark.parametrize("apart", [True, False])
def test_program_that_dies_of_its_nan(apart: bool) -> None:
    """The finding is worth more than the error it caused; the error is told."""
    torch.manual_seed(0)
    model = Sampler(apart=apart)
    finding = hunt(lambda x: model(x), torch.ones(2, 4), model=model)
    assert finding is not None
    assert finding.module == ""
    assert finding.context["exception"].startswith("RuntimeError: probability tensor contains")
    assert finding.context["reproduced"] is True


@pytest.mark.parametrize(
    ("make", "op"),
    [
        (lambda loss: loss, "aten.log.default"),
        (lambda loss: {"loss": loss, "n": 3}, "aten.log.default"),
        (lambda loss: (1.0, loss.item()), "aten.log.default"),
        (lambda loss: {"metrics": [loss.numpy()]}, None),
    ],
    ids=["tensor", "dict", "float", "array"],
)
def test_returned_value_counts(make: Any, op: str | None) -> None:
    """A bad number that the step returns is a fault, wherever it stands in what is returned."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Any:
        loss = backward(model, x)
        optimizer.step()
        return make(torch.log(loss - loss) * 0)

    finding = hunt(step, torch.ones(2, 4), model=model)
    assert finding is not None
    assert (finding.phase, finding.module, finding.op, finding.step) == ("forward", None, op, 0)
    assert finding.context["reproduced"] is True


def test_returned_value_that_the_model_made() -> None:
    """When the returned number comes from the model, the module that made it is named."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Softplus())
    model.append(nn.Identity())
    spoilt = model[1]
    spoilt.forward = lambda x: x * 1e38 * 1e38  # type: ignore[method-assign]
    finding = hunt(lambda x: model(x).detach(), torch.ones(2, 4), model=model)
    assert finding is not None
    assert finding.module == "1"


def test_returned_values_that_are_no_fault() -> None:
    """Filtered logits, a loss that is finite, None."""
    model = net()

    def step(x: Tensor) -> Any:
        logits = model(x).detach().expand(2, 3)
        return {
            "logits": logits.masked_fill(torch.tensor([True, False, True]), float("-inf")),
            "none": None,
            "s": "nan",
        }

    assert hunt(step, torch.ones(2, 4), model=model) is None


def test_scaler_that_finds_its_scale() -> None:
    """A gradient norm of infinity, returned while the scaler skips the step, is calibration."""

    def run(hunting: bool) -> Any:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)

        def step(x: Tensor) -> Any:
            optimizer.zero_grad()
            loss = (model(x) * 1e4).pow(2).mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            return loss.item(), norm

        if hunting:
            assert hunt(step, torch.ones(2, 4), model=model) is None
        else:
            assert not step(torch.ones(2, 4))[1].isfinite()
        assert scaler.get_scale() == 2.0**119
        return bits(model.state_dict()), len(optimizer.state)

    assert run(hunting=False) == run(hunting=True)


def updated_by_hand(restored: bool | None) -> tuple[Any, dict[str, Any]]:
    """A step of two updates without an optimizer; None: run plain."""
    model = net()

    def step(x: Tensor) -> None:
        for _ in range(2):
            backward(model, x)
            for p in model.parameters():
                assert p.grad is not None
                p.data.add_(p.grad, alpha=-1e30)
                p.grad = None

    context: dict[str, Any] = {}
    if restored is None:
        step(torch.ones(2, 4))
    else:
        finding = hunt(step, torch.ones(2, 4), model=model, restore=(model,) if restored else ())
        assert finding is not None
        context = finding.context
    return bits(model.state_dict()), context


def test_large_model_updated_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters written by hand before any copy: no second run, unless restore= has a copy."""
    monkeypatch.setattr("nanhunt.replay._SMALL", 0)
    plain, _ = updated_by_hand(None)
    state, context = updated_by_hand(False)
    assert state == plain
    assert "reproduced" not in context
    assert context["second_run"].startswith("not run: the step has written to 0.weight, ")
    assert "restore=(model,)" in context["second_run"]
    state, context = updated_by_hand(True)
    assert state == plain
    assert context["reproduced"] is True


def test_small_model_updated_by_hand() -> None:
    """A small model has a copy from the start, so such a step runs again too."""
    state, context = updated_by_hand(False)
    assert state == updated_by_hand(None)[0]
    assert context["reproduced"] is True


def test_hook_that_the_stopped_step_could_not_remove() -> None:
    """A hook that the step takes off at its end is gone also when the first run did not get there."""
    model = net()

    def step(x: Tensor) -> None:
        handle = model[0].register_forward_hook(lambda m, args, out: None)
        backward(model, x)
        handle.remove()

    assert hunt(step, bad_batch(), model=model) is not None
    assert not model[0]._forward_hooks


def test_switches_that_the_stopped_step_left_turned() -> None:
    """Gradients switched off, evaluation mode, frozen parameters: all as the whole step leaves them."""
    model = net()

    def step(x: Tensor) -> None:
        model.eval()
        model[0].requires_grad_(False)
        torch.set_grad_enabled(False)
        model(x)
        torch.set_grad_enabled(True)
        model[0].requires_grad_(True)
        model.train()

    assert hunt(step, bad_batch(), model=model) is not None
    assert torch.is_grad_enabled()
    assert model.training
    assert all(p.requires_grad for p in model.parameters())


def _registered() -> dict[str, Any]:
    facts: dict[str, Any] = {
        name: list(value.items())
        for module in (nn_module, optim_module)
        for name, value in vars(module).items()
        if name.startswith("_global_") and isinstance(value, dict)
    }
    classes = [torch.amp.GradScaler, torch.optim.lr_scheduler.LRScheduler]
    classes += torch.optim.lr_scheduler.LRScheduler.__subclasses__()
    facts["methods"] = [(cls, name, value) for cls in classes for name, value in vars(cls).items()]
    facts["engine"] = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    return facts


@pytest.mark.parametrize("how", ["healthy", "fault", "error", "interrupt", "usage"])
def test_nothing_is_left_registered(how: str) -> None:
    """However hunt ends, torch is as it was."""
    before = _registered()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    ends: dict[str, type[BaseException]] = {"error": KeyError, "interrupt": KeyboardInterrupt, "usage": UsageError}

    def step(x: Tensor) -> Any:
        backward(model, x)
        optimizer.step()
        scheduler.step()
        if how in ("error", "interrupt"):
            raise ends[how]
        return (i for i in ()) if how == "usage" else None

    x = bad_batch() if how == "fault" else torch.ones(2, 4)
    if how in ends:
        with pytest.raises(ends[how]):
            hunt(step, x, model=model)
    else:
        hunt(step, x, model=model)
    assert _registered() == before
    assert not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in model.parameters())


def test_watch_around_a_hunt_records() -> None:
    """Of nested watches the inner one stops: the outer one lets the second run reach its end."""
    model = net()
    ended: list[int] = []

    def step(x: Tensor) -> None:
        backward(model, x)
        ended.append(1)

    with watch(model) as outer:
        assert hunt(step, bad_batch(), model=model) is not None
    assert ended == [1]
    assert outer.finding is not None
    assert outer.finding.phase == "input"


def test_watch_inside_the_step() -> None:
    """A watch that the step itself opens stops it, and hunt tells what that one has found."""
    model, other = net(), net()

    def step(x: Tensor) -> None:
        model(torch.ones(1, 4))
        with watch(other):
            other(x)

    finding = hunt(step, bad_batch(), model=model)
    assert finding is not None
    assert finding.phase == "input"


def test_step_that_swallows_the_stop() -> None:
    """A fault counts also when the step catches every exception."""
    model = net()

    def step(x: Tensor) -> None:
        try:
            backward(model, x)
        except Exception:
            pass

    finding = hunt(step, bad_batch(), model=model)
    assert finding is not None
    assert finding.context["reproduced"] is True


def test_compiled_model_runs_eagerly_and_says_so() -> None:
    """Hooks in a compiled graph are dead, so both runs are eager."""
    model = torch.compile(net(), backend="eager")
    finding = hunt(lambda x: model(x).sum().backward(), bad_batch(), model=model)
    assert finding is not None
    assert "eagerly" in finding.context["compiled"]


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """NANHUNT=0: the step runs, once, and that is all."""
    monkeypatch.setenv("NANHUNT", "0")
    model = net()
    ran: list[int] = []
    assert hunt(lambda x: (ran.append(1), backward(model, x)), bad_batch(), model=model) is None
    assert len(ran) == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: hunt(torch.ones(1), model=m), "hunt needs a function that runs one step, got a Tensor"),
        (lambda m: hunt(m, torch.ones(1, 4)), r"nanhunt\.hunt\(step, batch, model=model\)"),
        (lambda m: hunt(m, model="net"), "model is a str: pass the torch.nn.Module that the step runs"),
        (lambda m: hunt(m, model=m, optimizer=m), r"optimizer is a Sequential: pass a torch\.optim\.Optimizer"),
        (lambda m: hunt(m, model=m, scaler=3), r"scaler is a int: pass a torch\.amp\.GradScaler"),
        (
            lambda m: hunt(m, model=m, restore=m),
            r"restore is a Sequential: give a tuple of objects, such as restore=\(e",
        ),
        (lambda m: hunt(m, model=m, restore=(object(),)), r"restore holds a object, which has no state_dict\(\) and"),
        (lambda m: hunt(lambda: (i for i in ()), model=m), "the step returned a generator, so nothing has run yet"),
    ],
)
def test_usage_errors(call: Any, words: str) -> None:
    """An argument that does not fit is answered with one that does."""
    with pytest.raises(UsageError, match=words):
        call(net())


def test_lazy_model_runs_once() -> None:
    """Parameters that do not exist yet cannot be had back: the finding is that of the one run."""
    model = nn.Sequential(nn.LazyLinear(3))
    ended: list[int] = []

    def step(x: Tensor) -> None:
        model(x).sum().backward()
        ended.append(1)

    finding = hunt(step, bad_batch(), model=model)
    assert finding is not None
    assert "0.weight" in finding.context["second_run"]
    assert ended == [1]


def _rank(rank: int, where: str, out: Any) -> None:
    from nanhunt import ranks

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=2)
    for scene in ("clean", "one bad", "alone"):
        model = nn.parallel.DistributedDataParallel(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        inner = model.module if scene == "alone" else model
        ran: list[int] = []

        def step(x: Tensor, model: Any, optimizer: Any, ran: list[int]) -> None:
            ran.append(1)
            optimizer.zero_grad()
            (model(x) * torch.rand(1)).sum().backward()
            optimizer.step()

        torch.manual_seed(rank)
        step(torch.ones(1, 4), inner, optimizer, [])
        plain, other = copy.deepcopy((model.module, optimizer.state_dict())), None
        x = bad_batch() if scene != "clean" and rank == 1 else torch.ones(1, 4)
        numbers, finding = torch.get_rng_state(), None
        if scene != "alone" or rank == 1:
            ranks.PATIENCE = 5.0 if scene == "alone" else 60.0
            finding = hunt(step, x, inner, optimizer, ran, model=model)
            torch.set_rng_state(numbers)
        if scene != "alone":
            other = nn.parallel.DistributedDataParallel(plain[0])
            twin = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
            twin.load_state_dict(plain[1])
            step(x, other, twin, [])
            assert bits(other.state_dict()) == bits(model.state_dict())
            assert bits(twin.state_dict()) == bits(optimizer.state_dict())
        told = None if finding is None else (finding.phase, finding.rank, finding.context.get("second_run"))
        out.put((scene, rank, len(ran), told))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_two_ranks(tmp_path: Any) -> None:
    """The second run happens on both ranks or on none; a rank that hunts alone waits, and then does without."""
    context = torch.multiprocessing.get_context("spawn")
    out = context.Queue()
    workers = [context.Process(target=_rank, args=(rank, str(tmp_path / "store"), out)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(180)
    assert [worker.exitcode for worker in workers] == [0, 0]
    told = {row[:2]: row[2:] for row in (out.get(timeout=10) for _ in range(6))}
    assert told["clean", 0] == told["clean", 1] == (1, None)
    assert told["one bad", 0][0] == told["one bad", 1][0] == 2
    assert told["one bad", 1][1] == ("input", 1, None)
    assert told["alone", 0] == (0, None)
    assert told["alone", 1] == (1, ("input", 1, "not run: rank 0 did not answer within the time"))


def test_documented_signature() -> None:
    """The front door is the one of the contract."""
    names = list(inspect.signature(hunt).parameters)
    capsule = ["capsule", "max_mb", "slim"]
    assert names == ["step", "args", "model", "optimizer", "scaler", "restore", *capsule, "kwargs"]
    assert issubclass(NonFiniteError, FloatingPointError)
