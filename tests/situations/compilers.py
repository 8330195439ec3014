"""Scripting, tracing, exporting and compiling a model while it is watched."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from .harness import Spans
from .models import Net, batch, mlp, situation, squared, step

PROFILING = "the profiling executor of TorchScript fuses at its own time"


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


def _script(module: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(module)


@situation(loose=PROFILING)
def script_module(watch: Spans) -> object:
    """A ScriptModule as the model."""
    model = _script(_Plain())
    with watch(model):
        losses = [squared(model(batch())) for _ in range(3)]
        torch.stack(losses).sum().backward()
    return [losses, [p.grad for p in model.parameters()]]


@situation(loose=PROFILING)
def script_inside(watch: Spans) -> object:
    """A ScriptModule as a child of an ordinary model."""
    model = nn.Sequential(nn.Linear(4, 4), _script(_Plain()), nn.Tanh())
    with watch(model):
        losses = [squared(model(batch())) for _ in range(3)]
        torch.stack(losses).sum().backward()
    return [losses, [p.grad for p in model.parameters()]]


@situation(loose=PROFILING)
def jit_script_while_hooked(watch: Spans) -> object:
    """torch.jit.script of the watched model, and the code that it makes."""
    model = _Plain()
    with watch(model):
        scripted = _script(model)
        out = scripted(batch())
        other = model(batch())
    return [scripted.code, out, other]


@situation()
def jit_trace_while_hooked(watch: Spans) -> object:
    """torch.jit.trace of the watched model: the tool's own operators must not be in the graph."""
    model = _Plain()
    with watch(model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = torch.jit.trace(model, batch())
        out = model(batch())
    kinds = [node.kind() for node in traced.inlined_graph.nodes()]
    return [kinds, out]


@situation()
def fx_symbolic_trace_while_hooked(watch: Spans) -> object:
    """torch.fx.symbolic_trace of the watched model, and the GraphModule that runs watched."""
    model = _Plain()
    with watch(model):
        graph = torch.fx.symbolic_trace(model)
        out = graph(batch())
        other = model(batch())
    made = step(watch, graph, batch())
    return [graph.code, out, other, made["loss"], [p.grad for p in model.parameters()]]


@situation()
def make_fx_while_hooked(watch: Spans) -> object:
    """make_fx of a function that calls the watched model, real, fake and symbolic."""
    model = _Plain()
    with watch(model):
        codes = []
        for mode in ("real", "fake", "symbolic"):
            tracer = make_fx(lambda x: model(x).sum(), tracing_mode=mode, _allow_non_fake_inputs=True)
            codes.append(tracer(batch()).code)
        out = model(batch())
    return [codes, out]


@situation()
def export_while_hooked(watch: Spans) -> object:
    """torch.export of the watched model: the same graph comes out, with no operator of the tool in it."""
    model = _Plain()
    with watch(model):
        exported = torch.export.export(model, (batch(),))
        out = model(batch())
    return [exported.graph_module.code, out]


@situation()
def export_strict_while_hooked(watch: Spans) -> object:
    """strict=True cannot be had with any global module hook in place: torch says so, and nothing else breaks."""
    model, error = _Plain(), None
    with watch(model):
        try:
            torch.export.export(model, (batch(),), strict=True)
        except Exception as caught:
            error = type(caught).__name__
        out = model(batch())
    assert error in (None, "Unsupported")
    return out


@situation()
def exported_module_runs(watch: Spans) -> object:
    """An exported program's module is itself watched."""
    model = torch.export.export(_Plain(), (batch(),)).module()
    with watch(model):
        out = model(batch())
        squared(out).backward()
    return [out, [p.grad for p in model.parameters()]]


def _forget() -> None:
    """Throw away all compiled code: the hooks that were traced into it go at the next call of any module."""
    torch._dynamo.reset()
    nn.Identity()(torch.ones(1))


def _compiled(watch: Spans, backend: str, before: bool, **options: Any) -> object:
    _forget()
    model = Net().eval()
    fast = torch.compile(model, backend=backend, **options)
    losses = []
    if before:
        squared(fast(batch())).backward()
    for _ in range(3):
        with watch(model):
            loss = squared(fast(batch()))
            loss.backward()
        losses.append(loss.item())
    _forget()
    return [losses, [p.grad for p in model.parameters()]]


@situation(warns=True)
def compile_after_watch(watch: Spans) -> object:
    """A model that is compiled by its first watched call."""
    return _compiled(watch, "eager", before=False)


@situation(warns=True, sees=False)
def compile_before_watch(watch: Spans) -> object:
    """A model that was compiled and run before anybody watched."""
    return _compiled(watch, "eager", before=True)


@situation(warns=True)
def compile_aot_eager(watch: Spans) -> object:
    """The same through AOTAutograd, forward and backward graphs."""
    return _compiled(watch, "aot_eager", before=False)


@situation(warns=True)
def compile_layer_by_layer(watch: Spans) -> object:
    """Regional compilation, module.compile() on each of several equal layers, run eagerly while watched."""
    _forget()
    model = Net(depth=3).eval()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    losses = []
    for _ in range(3):
        with watch(model, compiled="eager"):
            loss = squared(model(batch()))
            loss.backward()
        losses.append(loss.item())
    _forget()
    return [losses, [p.grad for p in model.parameters()]]


@situation(warns=True)
def compile_watched_throughout(watch: Spans) -> object:
    """A watched function that is compiled around the model, with a graph break inside."""
    _forget()
    model = mlp(4, 6, 3)

    def run(x: Tensor) -> Tensor:
        y = model(x)
        torch._dynamo.graph_break()
        return squared(model(x) + y)

    fast = torch.compile(run, backend="aot_eager")
    losses = []
    with watch(model):
        for _ in range(3):
            loss = fast(batch())
            loss.backward()
            losses.append(loss.item())
    _forget()
    return [losses, [p.grad for p in model.parameters()]]


@situation(warns=True)
def compile_fullgraph(watch: Spans) -> object:
    """fullgraph=True forbids graph breaks: a watch must cause none."""
    _forget()
    model = _Plain()
    explained = torch.compile(model, backend="eager", fullgraph=True)
    with watch(model):
        losses = [squared(explained(batch())) for _ in range(2)]
        losses[0].backward()
    _forget()
    return [losses[0].item(), losses[1].item(), [p.grad for p in model.parameters()]]
