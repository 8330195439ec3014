"""The op level: what is born, where it is put, and how it is followed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nanhunt.internals import Storage

from .op_runner import Net, Runner, text_of, traced, trained

nan, inf = math.nan, math.inf
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


# --- births and their places -------------------------------------------------------------------------------------


def test_the_culprit_is_the_birth_that_reached_this_tensor() -> None:
    """Not the first infinity of the program."""

    def code() -> tuple[torch.Tensor, torch.Tensor]:
        one = torch.zeros(2).log()  # a birth that leads elsewhere
        other = torch.full((2,), -1.0).sqrt() + 1
        return one, other

    (one, other), tracer = traced(code)
    assert [b.op for b in tracer.births] == ["aten.log.default", "aten.sqrt.default"]
    first, second = tracer.birth_of(one), tracer.birth_of(other)
    assert first is not None and first.op == "aten.log.default" and first.kind == "-inf"
    assert second is not None and second.op == "aten.sqrt.default" and second.kind == "nan"
    assert tracer.birth_of(torch.ones(2)) is None


def test_inf_that_becomes_nan_is_traced_to_the_inf() -> None:
    """An overflow is the culprit of the NaN it turns into."""
    (bad, tracer) = traced(lambda: (lambda y: y - y)(torch.full((2,), 100.0).exp()))
    birth = tracer.birth_of(bad)
    assert birth is not None and birth.op == "aten.exp.default" and birth.kind == "+inf"
    assert [b.kind for b in tracer.births] == ["+inf", "nan"]
    assert tracer.births[1].parents == (birth,)


@pytest.mark.parametrize(
    "mask",
    [
        lambda: torch.full((2, 2), -inf),
        lambda: torch.zeros(2, 2).fill_(-inf),
        lambda: torch.zeros(2, 2).masked_fill(torch.ones(2, 2).bool(), -inf),
        lambda: torch.where(torch.ones(2, 2).bool(), torch.tensor(-inf), torch.zeros(2, 2)),
        lambda: torch.where(torch.zeros(2, 2).bool(), torch.zeros(2, 2), -inf),
        lambda: F.pad(torch.zeros(2, 0), (2, 0), value=-inf),
        lambda: torch.tensor([[-inf, -inf]] * 2),
        lambda: torch.zeros(2, 2) + -inf,
        lambda: torch.zeros(2, 2).new_full((2, 2), -inf),
        lambda: torch.zeros(2, 2).index_fill(0, torch.tensor([0, 1]), -inf),
    ],
)
def test_a_literal_infinity_is_intent(mask: Callable[[], torch.Tensor]) -> None:
    """A mask is never the answer while there is another: softmax over a full row is."""
    (made, out), tracer = traced(lambda: (lambda m: (m, (m + 1.0).softmax(-1)))(mask()))
    literal, birth = tracer.birth_of(made), tracer.birth_of(out)
    assert literal is not None and literal.literal
    assert birth is not None and birth.op == "aten._softmax.default" and birth.kind == "nan"
    assert all(parent.literal for parent in birth.parents)


def test_an_overflow_among_masked_scores_is_not_hidden_by_the_mask() -> None:
    """With its literal operands made harmless the op still overflows: its own doing."""

    def code() -> torch.Tensor:
        mask = torch.full((2, 2), -inf).triu(1)
        return (mask - 3e38) + torch.full((2, 2), -3e38)

    bad, tracer = traced(code)
    birth = tracer.birth_of(bad)
    assert birth is not None and birth.op == "aten.add.Tensor" and not birth.literal


def test_an_op_in_place_can_not_hide_its_operand() -> None:
    """Ranges are those from before the op."""
    bad, tracer = traced(lambda: torch.tensor([-4.0, 9.0]).sqrt_())
    birth = tracer.birth_of(bad)
    assert birth is not None and birth.evidence is not None
    assert birth.evidence.at == {"self": -4.0}
    assert birth.evidence.tensors[0].min == -4.0 and birth.evidence.tensors[0].nan == 0


def test_lists_of_tensors_are_told_apart() -> None:
    """One bad item of a `_foreach_` op does not taint its neighbours."""

    def code() -> list[torch.Tensor]:
        parts = [torch.ones(2), torch.zeros(2), torch.ones(2)]
        torch._foreach_reciprocal_(parts)
        torch._foreach_mul_(parts, 2.0)
        return parts

    parts, tracer = traced(code)
    assert [tracer.birth_of(p) is not None for p in parts] == [False, True, False]
    assert len(tracer.births) == 1 and tracer.births[0].evidence is not None
    assert tracer.births[0].evidence.at == {"self": 0.0}


def test_a_healed_memory_is_forgotten() -> None:
    """What was overwritten with finite numbers has no birth any more; a freed storage leaves none behind."""

    def code() -> torch.Tensor:
        x = torch.zeros(64).log()
        del x
        y = torch.zeros(64).log()
        y.zero_()
        return y / y

    bad, tracer = traced(code)
    birth = tracer.birth_of(bad)
    assert birth is not None and birth.op == "aten.div.Tensor" and birth.parents == ()


def test_views_share_what_their_storage_holds_and_no_more() -> None:
    """Two halves of one buffer: the bad half has a birth, and each its own."""

    def code() -> torch.Tensor:
        both = torch.ones(2, 4)
        both[0].copy_(torch.zeros(4).log())
        both[1].copy_(torch.full((4,), -1.0).sqrt())
        return both

    both, tracer = traced(code)
    births = [tracer.birth_of(both[0]), tracer.birth_of(both[1].view(2, 2))]
    assert [b.op if b else None for b in births] == ["aten.log.default", "aten.sqrt.default"]


def test_storage_keys_are_not_reused_while_held() -> None:
    """The identity of a storage outlives it, so that an address can't be inherited."""
    held = [Storage(torch.ones(64).untyped_storage()) for _ in range(50)]
    assert len({one.key for one in held}) == 50
    assert all(one.gone() for one in held)
    alive = torch.ones(3)
    assert not Storage(alive.untyped_storage()).gone()


def test_ctc_alphas_and_fresh_memory_are_allowed_to_be_anything() -> None:
    """The second output of CTC and what `empty` leaves there are nobody's births."""

    def code() -> torch.Tensor:
        torch.empty(1000)
        logp = torch.zeros(6, 1, 4).log_softmax(-1)
        return F.ctc_loss(logp, torch.tensor([[1, 2]]), torch.tensor([6]), torch.tensor([2]))

    _, tracer = traced(code)
    assert [b for b in tracer.births if not b.literal] == []


# --- backward ----------------------------------------------------------------------------------------------------


def root(x: torch.Tensor) -> torch.Tensor:
    return (x * 0).sqrt()


def test_backward_names_the_forward_op_and_line() -> None:
    """Without anomaly mode, by the number of the node."""
    found = trained(Net(root))
    assert text_of(found)[:3] == ("backward", "piece", "aten.sqrt.default")
    assert found is not None and found["source"] == "return (x * 0).sqrt()"
    assert found["tensor"] == "grad_input"


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_backward(reentrant: bool) -> None:
    """Recomputation is forward again; the derivative that fails in it keeps its op and line."""
    found = trained(Net(lambda x: checkpoint(root, x, use_reentrant=reentrant)))
    assert text_of(found)[:3] == ("backward", "piece", "aten.sqrt.default")
    assert found is not None and found["source"] == "return (x * 0).sqrt()"


def clamped(x: torch.Tensor) -> torch.Tensor:
    return torch.exp(x + 100).clamp(max=1e8)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_discarded_forward_value_is_the_first_of_the_chain(wrapped: bool) -> None:
    """The loss is finite, the derivative reads the Inf that the clamp threw away."""
    found = trained(Net((lambda x: checkpoint(clamped, x, use_reentrant=False)) if wrapped else clamped))
    assert text_of(found) == ("forward", "piece", "aten.exp.default", "+inf")
    assert found is not None and found["source"] == "return torch.exp(x + 100).clamp(max=1e8)"


def test_in_place_on_a_view() -> None:
    """CopySlices is numbered after the op whose result it copies."""

    def code(x: torch.Tensor) -> torch.Tensor:
        y = x * 0
        y[:, 0].sqrt_()
        return y

    found = trained(Net(code))
    assert text_of(found)[:3] == ("backward", "piece", "aten.sqrt_.default")
    assert found is not None and found["source"] == "y[:, 0].sqrt_()"


class Flawed(torch.autograd.Function):
    """Right in forward, divides by zero in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad / (x - x)


def test_the_users_own_backward() -> None:
    """The line inside `backward`, the module of the forward."""
    found = trained(Net(Flawed.apply))
    assert text_of(found) == ("backward", "piece", "aten.div.Tensor", "+inf")
    assert found is not None and found["source"] == "return grad / (x - x)"
    assert found["cause"] == "zero_division"


def test_the_users_hook() -> None:
    """A tensor hook that spoils a gradient is named by its own line."""

    def spoil(grad: torch.Tensor) -> torch.Tensor:
        return (grad - grad).log()

    model = Net(lambda x: x * 2)
    model.lin.weight.register_hook(spoil)
    found = trained(model)
    assert text_of(found)[0::2] == ("backward", "aten.log.default")
    assert found is not None and found["source"] == "return (grad - grad).log()"


def test_double_backward() -> None:
    """What fails when a gradient is differentiated is put on the first forward op."""

    class Steep(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * x).pow(0.75)  # second derivative at 0: 0.75 * -0.25 * 0 ** -1.25

    model = nn.Sequential(nn.Linear(1, 1, bias=False), Steep())

    def step() -> torch.Tensor:
        x = torch.zeros(2, 1, requires_grad=True)
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        grad.sum().backward()
        return grad.detach().sum()

    found = Runner(model).run(step)
    assert found is not None
    assert (found["phase"], found["module"]) == ("backward", "1")
    assert str(found["op"]).startswith("aten.pow.")
    assert found["source"] == "return (x * x).pow(0.75)  # second derivative at 0: 0.75 * -0.25 * 0 ** -1.25"


def test_relu_swallows_what_came_back() -> None:
    """A bad gradient that ends on the way has harmed nobody."""
    model = Net(lambda x: torch.relu(x - 100).sqrt())
    assert trained(model) is None


def test_accumulation_names_parameter_and_the_line_of_backward() -> None:
    """Each gradient is finite, their sum in `.grad` is not."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False)).half()

    def step() -> None:
        for _ in range(3):
            out = model(torch.full((1, 1), 2.0).half())
            (out.float() * 2e4).backward()

    found = Runner(model).run(step)
    assert text_of(found) == ("backward", "0", "AccumulateGrad", "+inf")
    assert found is not None and found["source"] == "(out.float() * 2e4).backward()"
    assert found["tensor"] == "grad of 0.weight" and found["module_type"] == "Linear"


# --- update, state, input ----------------------------------------------------------------------------------------


def test_what_happens_to_gradients_after_backward_is_the_optimizer_phase() -> None:
    """Unscaling by hand, with gradient mode on, by the memory it works on."""
    model = nn.Linear(2, 1)

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()
        for p in model.parameters():
            p.grad.mul_(1e30).mul_(1e30)  # type: ignore[union-attr]

    found = Runner(model).run(step)
    assert text_of(found) == ("optimizer", None, "aten.mul_.Tensor", "+inf")
    assert found is not None and found["tensor"] == "grad of weight"


def test_loss_code_of_the_next_step_is_forward_again() -> None:
    """After a step has ended, arithmetic outside of modules is not an update."""
    model = nn.Linear(2, 1)
    runner = Runner(model)

    def first() -> None:
        model(torch.ones(1, 2)).sum().backward()

    def second() -> torch.Tensor:
        with torch.no_grad():
            return torch.zeros(2).log()

    assert runner.run(first) is None
    found = runner.run(second)
    assert text_of(found) == ("forward", None, "aten.log.default", "-inf")


@pytest.mark.parametrize("kind", ["foreach", "fused", "plain"])
def test_optimizer_state_is_named(kind: str) -> None:
    """A second moment that overflows freezes a parameter without any NaN in it."""
    model = nn.Linear(1, 1, bias=False)
    how: dict[str, Any] = {} if kind == "plain" else {kind: True}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, **how)

    def step() -> None:
        model(torch.full((1, 1), 1e25)).sum().backward()
        optimizer.step()

    found = Runner(model, optimizer).run(step)
    assert found is not None and found["phase"] == "optimizer" and found["module"] is None
    assert found["source"] == "optimizer.step()"
    assert found["tensor"] == "exp_avg_sq of weight"


def test_a_cast_weight_is_read_by_the_op_it_was_cast_for() -> None:
    """Under autocast the copy of a NaN weight is not where the user reads it."""
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight[0, 0] = nan

    def step() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(torch.ones(1, 2))

    found = Runner(model).run(step)
    assert text_of(found) == ("state", "", "aten.addmm.default", "nan")
    assert found is not None and found["tensor"] == "weight"


def test_input_has_the_line_that_called_the_root() -> None:
    """The batch was bad before any module ran; it has the name that the watch gave it."""
    model = Net(lambda x: x)
    batch = torch.ones(2, 4)
    batch[1, 2] = nan
    runner = Runner(model)

    def step() -> torch.Tensor:
        runner.tracer.note_input(batch, "batch['x']")
        return model(batch).sum()

    found = runner.run(step)
    assert text_of(found) == ("input", None, None, "nan")
    assert found is not None and found["tensor"] == "batch['x']"
    assert found["source"] == "return model(batch).sum()"
