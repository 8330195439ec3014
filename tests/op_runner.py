"""A minimal watch around the tracer alone, for the tests of the op level: what confirms a fault, and no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _nn_module

from nanhunt import probe, sites
from nanhunt.births import Birth
from nanhunt.naming import Names, type_name
from nanhunt.tracer import Tracer
from nanhunt.verdict import Call

sites._known[__file__] = False  # the runner stands in for nanhunt's own hooks


class Found(Exception):
    """The step has shown a fault; carries the fields."""

    def __init__(self, fields: dict[str, Any], birth: Birth) -> None:
        super().__init__(str(fields))
        self.fields, self.birth = fields, birth


class Runner:
    """Runs a step under a `Tracer` with its own module stack and asks for the births of what is bad."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, reads: bool = False
    ) -> None:
        self.names, self.model, self.optimizer = Names(model), model, optimizer
        self.stack: list[Call] = []
        self.counts: dict[str, int] = {}
        self.found: Found | None = None
        self.skips = False
        self.had: set[str] = set()
        self.reads: list[tuple[float, Birth]] = []
        self.tracer = Tracer(
            names=self.names,
            current_call=lambda: self.stack[-1] if self.stack else None,
            on_host_read=self._read,
        )

    def _read(self, tensor: torch.Tensor, birth: Birth) -> None:
        self.reads.append((float(tensor.detach().reshape(-1)[0]), birth))

    def _hit(self, birth: Birth | None) -> None:
        if birth is not None and self.found is None:
            self.found = Found(self.tracer.explain(birth), birth)

    def _births(self, tensors: list[torch.Tensor]) -> Birth | None:
        births = [b for t in tensors if (b := self.tracer.birth_of(t)) is not None]
        births = [b for b in births if not b.literal] or births
        return min(births, key=lambda b: b.number) if births else None

    def _pre(self, module: torch.nn.Module, args: Any) -> None:
        aliases = self.names.modules.get(id(module))
        if aliases is None and not self.stack:
            return
        if aliases is None:
            self.names.refresh()
            aliases = self.names.modules.get(id(module), ["?"])
        self.counts[aliases[0]] = self.counts.get(aliases[0], 0) + 1
        call = Call(
            aliases[0], type_name(module), self.counts[aliases[0]], self.stack[-1] if self.stack else None, id(module)
        )
        call.site = sites.user_site()
        self.stack.append(call)

    def _post(self, module: torch.nn.Module, args: Any, out: Any) -> None:
        if self.stack and self.stack[-1].module_id == id(module):
            self.stack.pop()
            if not self.stack and torch._C._current_graph_task_id() == -1:
                bad = [
                    t
                    for _, t in probe.leaves(out)
                    if "nan" in probe.kinds(t) or (not t.requires_grad and probe.kinds(t))
                ]
                birth = self._births(bad)
                if (
                    birth is not None
                    and not birth.literal
                    and (birth.phase in ("state", "input") or not torch.is_grad_enabled())
                ):
                    self._hit(birth)

    def run(self, step: Any) -> dict[str, Any] | None:
        """The fields of the fault that `step()` shows, or None."""
        handles = [
            _nn_module.register_module_forward_pre_hook(self._pre),
            _nn_module.register_module_forward_hook(self._post, always_call=True),
        ]
        engine = torch.autograd._engine_run_backward

        def watched(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            self._hit(self._births([t for t in outputs if isinstance(t, torch.Tensor)]))
            return engine(outputs, *args, **kwargs)

        torch.autograd._engine_run_backward = watched
        before = {name for name, t in self._watched() if probe.kinds(t)}
        scaler, update = torch.amp.GradScaler, torch.amp.GradScaler.update
        raised: Exception | None = None

        def skipped(this: Any, *args: Any) -> Any:
            scale = float(this._scale)
            update(this, *args)
            self.skips = self.skips or float(this._scale) < scale

        scaler.update = skipped  # type: ignore[method-assign]
        self.skips = False
        try:
            with self.tracer:
                result = step()
        except Exception as failure:
            raised = failure
            result = None
        finally:
            torch.autograd._engine_run_backward = engine
            scaler.update = update  # type: ignore[method-assign]
            for handle in handles:
                handle.remove()
        if self.found is None:
            bad = [t for name, t in self._watched() if probe.kinds(t) and name not in before]
            grads = (
                []
                if self.skips
                else [p.grad for p in self.model.parameters() if p.grad is not None and probe.kinds(p.grad)]
            )
            results = [t for _, t in probe.leaves(result) if probe.kinds(t)]
            self._hit(self._births([*bad, *grads, *results]))
        if self.found is None and raised is not None:
            raise raised
        self.tracer.end_step()
        return self.found.fields if self.found is not None else None

    def _watched(self) -> list[tuple[str, torch.Tensor]]:
        found = [(n, p) for n, p in self.model.named_parameters()]
        found += [(n, b) for n, b in self.model.named_buffers()]
        if self.optimizer is not None:
            for p, state in self.optimizer.state.items():
                found += [(f"{k} {id(p)}", v) for k, v in state.items() if isinstance(v, torch.Tensor)]
        return [(n, t) for n, t in found if t.is_floating_point()]


class Piece(nn.Module):
    """A module whose forward is the function it is given."""

    def __init__(self, code: Callable[..., Any]) -> None:
        super().__init__()
        self.code = code

    def forward(self, *args: Any) -> Any:
        return self.code(*args)


class Net(nn.Module):
    """A linear layer, then a piece that may fail."""

    def __init__(self, code: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.piece = nn.Linear(4, 4), Piece(code)

    def forward(self, x: torch.Tensor) -> Any:
        return self.piece(self.lin(x))


def trained(model: nn.Module, runner: Runner | None = None) -> dict[str, Any] | None:
    def step() -> torch.Tensor:
        loss = model(torch.ones(2, 4)).float().sum()
        loss.backward()
        return loss.detach()

    runner = runner or Runner(model)
    found = runner.run(step)
    assert runner.tracer.failures == []
    return found


def traced(code: Callable[[], Any], model: nn.Module | None = None) -> tuple[Any, Tracer]:
    model = model or nn.Linear(1, 1)
    tracer = Tracer(names=Names(model), current_call=lambda: None)
    with tracer:
        out = code()
    assert tracer.failures == []
    return out, tracer


def text_of(found: dict[str, Any] | None) -> tuple[Any, ...]:
    assert found is not None
    return found["phase"], found["module"], found["op"], found["kind"]
