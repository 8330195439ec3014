# ruff: noqa: E501  a table of specimens reads better in long rows
"""Each cause word is earned by programs that end that way, with the numbers in its sentence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nanhunt import advice
from nanhunt.causes import CAUSES, explain
from nanhunt.evidence import Evidence
from nanhunt.finding import TensorStats

from .op_runner import Runner

nan, inf = math.nan, math.inf
pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom.*")


class Code(nn.Module):
    """A model whose forward is the function it is given; `w` is there to be trained."""

    def __init__(self, forward: Callable[..., Any], **tensors: torch.Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)
        self.code = forward

    def forward(self, *args: Any) -> Any:
        return self.code(self, *args)


def fault(forward: Callable[..., Any], *args: Any, **tensors: torch.Tensor) -> dict[str, Any]:
    """Forward, sum and backward of `forward(model, *args)`: the fault that shows."""
    torch.manual_seed(0)
    model = Code(forward, **tensors)
    runner = Runner(model)

    def step() -> Any:
        out = model(*args)
        loss = out if out.dim() == 0 else out.float().sum()
        if loss.requires_grad:
            loss.backward()
        return loss.detach()

    found = runner.run(step)
    assert runner.tracer.failures == []
    assert found is not None
    return found


def half(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float16)


def log_of_lost_eps(m: Code) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        p = torch.sigmoid(F.linear(m.w.reshape(1, 1) * 20, torch.ones(1, 1)))
        return torch.log(1 - p.clamp(1e-7, 1 - 1e-7))


def guarded_root(m: Code, x: torch.Tensor) -> torch.Tensor:
    y = x * m.w
    return torch.where(y > 0, y.sqrt(), y)


def guarded_quotient(m: Code, x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x / (x * m.w), 0.0)


def guarded_reciprocal(m: Code, x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, 1 / (x * m.w), 0.0)


def dropped_quotient(m: Code, x: torch.Tensor) -> torch.Tensor:
    ratio = x / (x * m.w)
    return ratio[~torch.isnan(ratio)]


def dropped_exponential(m: Code, x: torch.Tensor) -> torch.Tensor:
    return torch.where(x < 50, torch.exp(x * m.w), 0.0)


def dropped_log(m: Code, p: torch.Tensor) -> torch.Tensor:
    return torch.where(p > 0, p * torch.log(p * m.w), 0.0)


def constant_row_norm(m: Code, x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x * m.w, (4,), eps=0.0)


def no_alignment(m: Code) -> torch.Tensor:
    logp = (torch.zeros(3, 1, 5) * m.w).log_softmax(-1)
    return F.ctc_loss(logp, torch.tensor([[1, 1, 2, 2]]), torch.tensor([3]), torch.tensor([4]))


def masked_attention(m: Code) -> torch.Tensor:
    q = torch.ones(1, 1, 2, 4) * m.w
    mask = torch.tensor([[0.0, 0.0], [-inf, -inf]])
    return (q @ q.transpose(-1, -2) + mask).softmax(-1) @ q


def partly_written(m: Code) -> torch.Tensor:
    buffer = torch.empty(4)
    buffer.view(torch.int32).bitwise_or_(0x7FC00000)  # what stands in fresh memory by bad luck
    fresh = torch.empty(0)
    fresh.set_(buffer.untyped_storage(), 0, (4,))
    return fresh * m.w


# cause, part of the sentence, phase, op, forward, arguments, parameters and buffers
SPECIMENS: list[tuple[str, str, str, str, Any, tuple[Any, ...], dict[str, Any]]] = [
    ("overflow", "up to x = 88.72", "forward", "exp", lambda m, x: torch.exp(x * m.w), (torch.tensor([1.0, 95.0]),), {}),
    ("overflow", "80 000", "forward", "mul", lambda m, x: x * 400 * m.w.half(), (half(200, 1),), {}),
    ("overflow", "bits over the 65 504", "forward", "sum", lambda m, x: (x * m.w.half()).sum(), (torch.full((64,), 2e3).half(),), {}),
    ("overflow", "was cast to float16", "forward", "_to_copy", lambda m, x: (x * m.w).half(), (torch.tensor([7e4]),), {}),
    ("overflow", "a step on the way to it does not", "forward", "mm", lambda m, a, b: a @ (b * m.w), (torch.tensor([[3e38, -3e38]]), torch.tensor([[1.2], [1.0]])), {}),
    ("overflow", "float16", "forward", "mm", lambda m, a: a @ (a.T * m.w.half()), (half(300, 300).reshape(1, 2),), {}),
    ("overflow", "the exact result is 1e+40", "forward", "pow", lambda m, x: (x * m.w) ** 2, (torch.tensor([1e20]),), {}),
    ("overflow", "exp", "forward", "exp", dropped_exponential, (torch.tensor([1.0, 100.0]),), {}),
    ("underflow", "1e-12 given to clamp_min", "forward", "div", lambda m, x: F.normalize(x * m.w.half(), dim=0), (half(0, 0),), {}),
    ("underflow", "0.9999999", "forward", "log", log_of_lost_eps, (), {}),
    ("underflow", "1e-10 given to add", "forward", "div", lambda m, x: x / (x * m.w.half() + 1e-10), (half(0, 1),), {}),
    ("zero_division", "a count of nothing", "forward", "div", lambda m, x: x.sum(1) * m.w / torch.tensor([3.0, 0.0, 1.0]), (torch.zeros(3, 2),), {}),
    ("zero_division", "std) is 0 in 1 of 3", "forward", "div", lambda m, x: (x * m.w) / m.std, (torch.ones(2, 3),), {"std": torch.tensor([0.5, 0.0, 0.1])}),
    ("zero_division", "1 / 0", "forward", "rsqrt", lambda m, x: (x * m.w).rsqrt(), (torch.tensor([4.0, 0.0]),), {}),
    ("zero_division", "1 / 0", "forward", "reciprocal", lambda m, x: (x * m.w).reciprocal(), (torch.tensor([4.0, 0.0]),), {}),
    ("zero_division", "variance 0", "forward", "native_layer_norm", constant_row_norm, (torch.ones(2, 4),), {}),
    ("domain", "log of 0", "forward", "log", lambda m, x: torch.log(x * m.w), (torch.tensor([0.0, 1.0]),), {}),
    ("domain", "log of -1", "forward", "log", lambda m, x: torch.log(x * m.w), (torch.tensor([-1.0, 1.0]),), {}),
    ("domain", "sqrt of -0.25", "forward", "sqrt", lambda m, x: torch.sqrt(x * m.w), (torch.tensor([-0.25, 1.0]),), {}),
    ("domain", "0.5 outside", "forward", "acos", lambda m, x: torch.acos(x * m.w), (torch.tensor([1.5, 0.0]),), {}),
    ("domain", "exactly at the edge", "forward", "atanh", lambda m, x: torch.atanh(x * m.w), (torch.tensor([1.0, 0.0]),), {}),
    ("domain", "-2 to the power of 0.5", "forward", "pow", lambda m, x: (x * m.w) ** 0.5, (torch.tensor([-2.0]),), {}),
    ("domain", "no alignment", "forward", "_ctc_loss", no_alignment, (), {}),
    ("domain", "singular", "forward", "_linalg_slogdet", lambda m: torch.logdet(torch.ones(2, 2) * m.w), (), {}),
    ("inf_arithmetic", "0 * inf", "forward", "mul", lambda m, x: x * m.w * inf, (torch.tensor([0.0, 1.0]),), {}),
    ("inf_arithmetic", "inf - inf", "forward", "sub", lambda m, x: x * m.w - x, (torch.tensor([inf, 1.0]),), {}),
    ("inf_arithmetic", "met an Inf", "forward", "nll_loss", lambda m, x: F.cross_entropy(x * m.w, torch.tensor([0, 1]), m.weight), (torch.zeros(2, 2),), {"weight": torch.tensor([1.0, inf])}),
    ("masked_row", "1 of 2 rows hold nothing but -inf", "forward", "_softmax", masked_attention, (), {}),
    ("masked_row", "2 of 2 rows", "forward", "_softmax", lambda m, x: (x * m.w).masked_fill(torch.ones(2, 3).bool(), -inf).softmax(-1), (torch.zeros(2, 3),), {}),
    ("empty_reduction", "n - 1 = 0", "forward", "std", lambda m, x: (x * m.w).std(), (torch.ones(1),), {}),
    ("empty_reduction", "over no numbers", "forward", "mean", lambda m, x: (x * m.w)[x > 2].mean(), (torch.ones(3),), {}),
    ("empty_reduction", "every target is ignored", "forward", "nll_loss", lambda m, x: F.cross_entropy(x * m.w, torch.tensor([-100, -100])), (torch.ones(2, 3),), {}),
    ("empty_reduction", "one number", "forward", "var", lambda m, x: (x * m.w).var(0), (torch.ones(1, 3),), {}),
    ("singular_gradient", "sqrt is not defined at 0", "backward", "sqrt", lambda m, x: (x * m.w).sqrt(), (torch.tensor([0.0, 1.0]),), {}),
    ("singular_gradient", "0 * inf is NaN", "backward", "sqrt", guarded_root, (torch.tensor([0.0, 1.0]),), {}),
    ("singular_gradient", "-1 and 1", "backward", "acos", lambda m, x: (x * m.w).acos(), (torch.tensor([1.0, 0.0]),), {}),
    ("singular_gradient", "pow is not defined", "backward", "pow", lambda m, x: (x * m.w) ** 0.5, (torch.tensor([0.0, 1.0]),), {}),
    ("singular_gradient", "equal eigenvalues", "backward", "_linalg_eigh", lambda m: torch.linalg.eigh(torch.eye(3) * m.w)[1].sum(), (), {}),
    ("singular_gradient", "thrown away by where", "backward", "div", guarded_quotient, (torch.tensor([0.0, 1.0]),), {}),
    ("singular_gradient", "thrown away by where", "forward", "reciprocal", guarded_reciprocal, (torch.tensor([0.0, 1.0]),), {}),
    ("zero_division", "thrown away by index", "backward", "div", dropped_quotient, (torch.tensor([0.0, 1.0]),), {}),
    ("singular_gradient", "log is not defined at 0", "backward", "log", dropped_log, (torch.tensor([0.0, 1.0]),), {}),
    ("bad_input", "1 of 2 numbers, first at [1]", "input", None, lambda m, x: x * m.w, (torch.tensor([0.0, nan]),), {}),
    ("bad_input", "when it came in", "input", None, lambda m, x: F.linear(x, m.w.expand(1, 2)), (torch.full((3, 2), nan),), {}),
    ("bad_parameter", "parameter p held nan", "state", "mul", lambda m, x: m.p * x * m.w, (torch.ones(2),), {"p": nn.Parameter(torch.tensor([nan, 1.0]))}),
    ("bad_parameter", "parameter p held +inf", "state", "addmm", lambda m, x: F.linear(x, m.p, m.w.expand(1)), (torch.ones(1, 2),), {"p": nn.Parameter(torch.tensor([[inf, 1.0]]))}),
    ("bad_buffer", "buffer b held nan", "state", "add", lambda m, x: x * m.w + m.b, (torch.ones(2),), {"b": torch.tensor([nan, 1.0])}),
    ("bad_buffer", "nan in 1 of 2", "state", "native_batch_norm", lambda m, x: F.batch_norm(x * m.w, m.mean, m.b), (torch.ones(3, 2),), {"mean": torch.zeros(2), "b": torch.tensor([nan, 1.0])}),
    ("literal", "nan as a number", "forward", "masked_fill", lambda m, x: (x * m.w).masked_fill(x > 0, nan), (torch.ones(2),), {}),
    ("literal", "other = nan", "forward", "mul", lambda m, x: x * m.w * nan, (torch.ones(2),), {}),
    ("literal", "-inf", "forward", "masked_fill", lambda m, x: (x * m.w).masked_fill(x > 1, -inf), (torch.tensor([1.0, 2.0]),), {}),
]  # fmt: skip


@pytest.mark.parametrize("specimen", SPECIMENS, ids=lambda s: f"{s[0]}-{s[3]}-{s[1][:12]}")
def test_cause_word(specimen: Any) -> None:
    """The word, the phase, the op, and the telling part of the sentence."""
    cause, said, phase, op, forward, args, tensors = specimen
    found = fault(forward, *args, **tensors)
    assert found["cause"] == cause, found["why"]
    assert found["phase"] == phase
    assert (found["op"] or "").removeprefix("aten.").split(".")[0] == (op or "")
    assert said in found["why"]
    assert found["advice"]
    assert found["line"] is not None


def test_loss_scale_is_named_with_the_largest_that_fits() -> None:
    """A gradient that fits without the constant the backward began with: the scale is to blame."""
    linear = nn.Linear(2, 2).half()
    with torch.no_grad():
        linear.weight.fill_(1)

    def step() -> None:
        (linear(half(1, 1).reshape(1, 2)).float().sum() * 2.0**18).backward()

    found = Runner(linear).run(step)
    assert found is not None and found["cause"] == "loss_scale"
    assert "262 144" in found["why"]
    assert any("largest loss scale that fits here is 32 768" in line for line in found["advice"])


def test_loss_scale_that_the_watch_knows() -> None:
    """A scaler's scale is told to the tracer by the watch."""
    linear = nn.Linear(2, 2).half()
    runner = Runner(linear)
    runner.tracer.loss_scale = 2.0**10

    def step() -> None:
        linear(half(1, 1).reshape(1, 2)).backward(half(6e4, 6e4).reshape(1, 2).repeat(1, 1))
        linear(half(1, 1).reshape(1, 2)).backward(half(6e4, 6e4).reshape(1, 2))

    found = runner.run(step)
    assert found is not None and (found["op"], found["cause"]) == ("AccumulateGrad", "overflow")


@pytest.mark.parametrize("rate", [nan, inf])
def test_optimizer_with_a_rate_that_is_not_finite(rate: float) -> None:
    """A NaN or Inf learning rate is the update's own fault, whatever the gradients."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.param_groups[0]["lr"] = rate
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    found = Runner(model, optimizer).run(step)
    assert found is not None
    assert (found["phase"], found["cause"], found["module"]) == ("optimizer", "optimizer", None)
    assert "learning rate" in found["why"] and found["tensor"] == "weight"


def test_uninitialised_memory() -> None:
    """What torch.empty left in place is not blamed on the op that reads it."""
    model = nn.Linear(2, 2)

    def step() -> Any:
        fresh = torch.empty(2, 2)
        fresh.untyped_storage().copy_(torch.full((2, 2), nan).untyped_storage())
        return model(fresh).sum()

    found = Runner(model).run(step)
    assert found is not None and found["cause"] == "uninitialised"


def test_uninitialised_memory_that_was_filled_is_not() -> None:
    """A buffer that was written is nobody's accident."""
    model = nn.Linear(2, 2)

    def step() -> Any:
        fresh = torch.empty(2, 2)
        fresh.fill_(0.0)
        return (model(fresh) / 0.0).sum()

    found = Runner(model).run(step)
    assert found is not None and found["cause"] == "zero_division"


@pytest.mark.parametrize("word", sorted(CAUSES))
def test_every_word_is_documented_and_advised(word: str) -> None:
    """One table says what each word means, another what to do."""
    assert len(CAUSES[word]) > 15
    assert advice.of(word)


def test_collective_and_unknown_are_said_plainly() -> None:
    """Words that need other processes, or nothing at all."""
    row = TensorStats(role="tensor", numel=4, nan=1)
    e = Evidence(op="", phase="forward", kinds=("nan",), tensors=(row,), bad=1, of=4)
    assert "another process" in explain(e, "collective", "t", "nan").why
    assert explain(e, "collective", "t", "nan").cause == "collective"
    odd = explain(Evidence(op="odd", phase="forward", kinds=("nan",), inherited=False, exact=None), None, "t", "nan")
    assert odd.cause in CAUSES
    assert explain(None, None, "t", "nan").cause == "unknown"


def test_no_number_is_invented() -> None:
    """Evidence without numbers still makes a sentence."""
    for op in ("div", "log", "exp", "mm", "to_copy", "softmax", "sqrt", "pow", "nll_loss_forward", "add"):
        for phase in ("forward", "backward", "optimizer"):
            for kinds in (("nan",), ("+inf",)):
                for inherited in (False, True):
                    e = Evidence(
                        op=op,
                        phase=phase,
                        kinds=kinds,
                        inherited=inherited,
                        forward=op if phase == "backward" else None,
                    )
                    verdict = explain(e, None, "output", kinds[0])
                    assert verdict.cause in CAUSES
                    assert verdict.why.endswith(".") and "None" not in verdict.why
