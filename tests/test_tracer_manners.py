"""The op level among programs: what they read, what they die of, and what is left alone."""

from __future__ import annotations

import gc
import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nanhunt import probe, sites
from nanhunt.births import Birth
from nanhunt.naming import Names
from nanhunt.tracer import Tracer

from .op_runner import traced

nan, inf = math.nan, math.inf
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


# --- reading, dying, telling ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [lambda t: t.item(), float, lambda t: bool(t > 0) or t.item()])
def test_a_bad_number_that_the_host_reads(read: Callable[[torch.Tensor], Any]) -> None:
    """It may decide what the program does next; printing does not."""
    seen: list[Birth] = []
    tracer = Tracer(names=Names(nn.Linear(1, 1)), current_call=lambda: None, on_host_read=lambda t, b: seen.append(b))
    with tracer:
        bad = torch.tensor(-1.0).sqrt()
        str(bad)
        assert seen == []
        read(bad)
        float(torch.tensor(inf))  # a literal
    assert [b.op for b in seen] == ["aten.sqrt.default"]


def test_an_exception_of_the_listener_reaches_the_program() -> None:
    """The deliberate stop is raised from inside an op, and leaves nothing behind."""

    def stop(tensor: torch.Tensor, birth: Birth) -> None:
        raise FloatingPointError("stop")

    with (
        pytest.raises(FloatingPointError),
        Tracer(names=Names(nn.Linear(1, 1)), current_call=lambda: None, on_host_read=stop),
    ):
        torch.tensor(-1.0).sqrt().item()
    assert torch.ones(1).sum().item() == 1


def test_what_a_program_died_of() -> None:
    """`multinomial` refuses NaN: the culprit is where that NaN was born."""
    tracer = Tracer(names=Names(nn.Linear(1, 1)), current_call=lambda: None)
    with pytest.raises(RuntimeError), tracer:
        torch.multinomial((torch.zeros(1, 3) / 0.0).softmax(-1), 1)
    birth = tracer.died_of()
    assert birth is not None and birth.op == "aten.div.Tensor"


def test_the_path_from_birth_to_notice() -> None:
    """One op a line, in order; a long way loses its middle."""

    def code() -> torch.Tensor:
        x = torch.zeros(2).log()
        for _ in range(20):
            x = x * 2
        return x.sum()

    bad, tracer = traced(code)
    birth = tracer.birth_of(bad)
    assert birth is not None
    lines = tracer.path(birth, bad)
    assert len(lines) == 12
    assert "aten.log.default" in lines[0] and "x = torch.zeros(2).log()" in lines[0]
    assert "more ops" in lines[6]
    assert "aten.sum.default" in lines[-1]
    assert tracer.counts == {"born": 1, "propagated": 21, "absorbed": 0}


def test_absorbed_is_counted() -> None:
    """A bad operand with a finite result."""
    out, tracer = traced(lambda: torch.nan_to_num(torch.zeros(2).log()))
    assert tracer.counts["absorbed"] == 1 and tracer.births[0].absorbed_by == {"nan_to_num"}
    assert tracer.birth_of(out) is None


def test_many_births_alike_stay_cheap() -> None:
    """A guarded loop makes thousands: all are followed, few are looked at in full."""

    def code() -> torch.Tensor:
        for _ in range(500):
            x = torch.zeros(2).log()
        return x

    bad, tracer = traced(code)
    assert len(tracer.births) == 500
    assert len({id(b.evidence) for b in tracer.births}) == 3
    assert tracer.birth_of(bad) is tracer.births[-1]


def test_what_this_rank_sent_is_its_own() -> None:
    """After an all-reduce a local birth is still the culprit; without one it came from another process."""
    dist = torch.distributed
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch was built without gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:

        def code() -> tuple[torch.Tensor, torch.Tensor]:
            mine, other = torch.zeros(2).log(), torch.ones(2)
            for t in (mine, other):
                dist.all_reduce(t)
            other.untyped_storage().copy_(torch.tensor([nan, 1.0]).untyped_storage())  # as if received
            return mine, other * 2

        (mine, other), tracer = traced(code)
    finally:
        dist.destroy_process_group()
    births = [tracer.birth_of(mine), tracer.birth_of(other)]
    assert [b.cause or b.op if b else None for b in births] == ["aten.log.default", "collective"]


# --- leaving things alone ------------------------------------------------------------------------------------------


def gradients(code: Callable[[torch.Tensor], Any]) -> Callable[[], Any]:
    def run() -> Any:
        x = torch.rand(3, 4, requires_grad=True)
        out = code(x)
        out.sum().backward()
        return out.detach(), x.grad

    return run


def forward_mode() -> Any:
    import torch.autograd.forward_ad as forward_ad

    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.rand(4), torch.ones(4))
        return forward_ad.unpack_dual(dual.sin()).tangent


def sparse_step() -> Any:
    table = nn.Embedding(8, 4, sparse=True)
    table(torch.tensor([1, 2, 2])).sum().backward()
    torch.optim.SparseAdam(table.parameters()).step()
    return table.weight.detach()


def nested() -> Any:
    rows = torch.nested.nested_tensor([torch.rand(2, 4), torch.rand(3, 4)], layout=torch.jagged, requires_grad=True)
    out = F.linear(rows, torch.ones(4, 4)).values()  # type: ignore[attr-defined]
    out.sum().backward()
    return out.detach()


def compiled() -> Any:
    return torch.compile(lambda x: x.sin() + 1, backend="eager", fullgraph=True)(torch.rand(4))


SCRIPTED = torch.jit.trace(lambda x: x * 2, torch.rand(3))
ODD: list[Callable[[], Any]] = [
    gradients(lambda x: x.cumsum(0).relu_().view(-1)[::2]),
    gradients(lambda x: torch.fft.fft(x).abs()),
    gradients(lambda x: checkpoint(torch.sin, x, use_reentrant=True)),
    gradients(lambda x: F.dropout(x, 0.5)),
    lambda: torch.func.jvp(torch.sin, (torch.rand(4),), (torch.ones(4),)),
    lambda: torch.func.vmap(torch.func.grad(lambda v: v.sin().sum()))(torch.rand(3, 4)),
    lambda: torch.func.hessian(lambda v: v.sin().prod())(torch.rand(4)),
    forward_mode,
    sparse_step,
    nested,
    compiled,
    lambda: torch.rand(4).to(torch.float8_e4m3fn).float(),
    lambda: (
        torch.eye(3).to_sparse_csr() @ torch.rand(3, 3),
        torch.sparse.mm(torch.eye(3).to_sparse(), torch.rand(3, 3)),
    ),
    lambda: torch.rand(2, device="meta").shape,
    lambda: torch.quantize_per_tensor(torch.rand(4), 0.1, 0, torch.qint8).dequantize(),
    lambda: torch.cond(torch.tensor(True), lambda x: x * 2, lambda x: x * 3, (torch.rand(3),)),
    lambda: SCRIPTED(torch.rand(3)),
    lambda: torch.add(torch.ones(3), torch.rand(3), out=torch.empty(3)),
]


@pytest.mark.parametrize("number", range(len(ODD)))
def test_the_program_is_not_changed(number: int) -> None:
    """Odd tensors, transforms and modes: the same numbers to the bit, and no failure of ours."""
    torch.manual_seed(1)
    plain = ODD[number]()

    def again() -> Any:
        torch.manual_seed(1)
        return ODD[number]()

    watched, _ = traced(again)
    for (_, a), (_, b) in zip(probe.leaves(plain), probe.leaves(watched)):
        assert torch.equal(a, b)


def test_nothing_is_kept_alive() -> None:
    """A step under the tracer leaves no tensor behind, bad ones included."""
    model = nn.Linear(4, 4)

    def step() -> None:
        for _ in range(3):
            ((model(torch.rand(2, 4)) * 0) / 0).sum().backward()
            model.zero_grad()

    tracer = Tracer(names=Names(model), current_call=lambda: None)
    with tracer:
        step()
        gc.collect()
        before = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
        for _ in range(20):
            step()
        gc.collect()
        after = sum(isinstance(o, torch.Tensor) for o in gc.get_objects())
    assert after <= before and tracer.births


def test_a_failure_of_ours_is_counted_and_the_program_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("ours")

    monkeypatch.setattr(probe, "limits", broken)
    tracer = Tracer(names=Names(nn.Linear(1, 1)), current_call=lambda: None)
    with tracer:
        assert (torch.ones(2) * 2).tolist() == [2, 2]
    assert set(tracer.failures) == {"ValueError: ours"}


def test_sites_are_the_users() -> None:
    """Torch, nanhunt and the standard library are skipped; what a notebook or `python -c` runs is not."""
    assert sites.is_user(__file__)
    assert not sites.is_user(torch.nn.functional.__file__)
    assert not sites.is_user(probe.__file__)
    assert not sites.is_user(importlib.__file__)
    assert sites.is_user("<ipython-input-3>") and not sites.is_user("<frozen importlib._bootstrap>")
    assert sites.text(None) == (None, None)
    line, source = sites.text(sites.user_site())
    assert line is not None and line.startswith(__file__) and source == "line, source = sites.text(sites.user_site())"
