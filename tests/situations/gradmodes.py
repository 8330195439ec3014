"""Ways of taking gradients: twice, by hand, not at all, by transforms, after the watch has closed."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import allow_mutation_on_saved_tensors, register_multi_grad_hook

from .harness import Spans
from .models import Block, Net, batch, conv_net, mlp, situation, squared, step


@situation()
def no_grad_fwd(watch: Spans) -> object:
    """Evaluation under no_grad, and gradient modes that are switched back and forth."""
    model = Net().eval()
    with watch(model):
        with torch.no_grad():
            first = model(batch())
            with torch.enable_grad():
                second = model(batch())
        torch.set_grad_enabled(False)
        third = model(batch())
        torch.set_grad_enabled(True)
    return [model, first, second, third]


@situation()
def inference_mode(watch: Spans) -> object:
    """Evaluation in inference mode: the outputs are inference tensors."""
    model = conv_net().eval()
    with watch(model), torch.inference_mode():
        out = model(batch(2, 3, 14, 14))
    return [model, out]


@situation()
def watch_inside_inference_mode(watch: Spans) -> object:
    """The watch is opened inside inference mode and no_grad."""
    model = Net()
    with torch.inference_mode(), watch(model):
        first = model(batch())
    with torch.no_grad(), watch(model):
        second = model(batch())
    return [model, first, second, step(watch, model, batch())]


@situation()
def inference_tensor_then_train(watch: Spans) -> object:
    """A tensor made in inference mode is cloned into training."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    with watch(model):
        with torch.inference_mode():
            features = model[0](batch())
        squared(model[1](features.clone())).backward()
    return [model, features]


@situation()
def double_backward(watch: Spans) -> object:
    """A gradient penalty: autograd.grad with create_graph, then backward."""
    model = Net()
    with watch(model):
        x = batch(grad=True)
        out = model(x)
        (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = squared(out) + (g.norm(dim=1) - 1).pow(2).mean()
        loss.backward()
    return [model, x, loss, g]


@situation()
def third_derivative(watch: Spans) -> object:
    """A physics-informed loss: derivatives of the output up to the third."""
    model = mlp(1, 8, 1)
    with watch(model):
        x = batch(6, 1, grad=True)
        y, loss = model(x), torch.zeros(())
        for _ in range(3):
            (y,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
            loss = loss + squared(y)
        loss.backward()
    return [model, x, loss]


@situation()
def retain_graph_twice(watch: Spans) -> object:
    """Two backwards through one graph, then one too many, whose error must be torch's own."""
    model, error = Net(), None
    with watch(model):
        loss = squared(model(batch()))
        loss.backward(retain_graph=True)
        loss.backward()
        try:
            loss.backward()
        except RuntimeError as caught:
            error = caught
    return [model, loss, error]


@situation()
def autograd_grad(watch: Spans) -> object:
    """autograd.grad with unused inputs and weights, which touches no .grad."""
    model, extra = Net(), nn.Parameter(torch.ones(2))
    with watch(model):
        loss = squared(model(batch()))
        grads = torch.autograd.grad(loss, [*model.parameters(), extra], allow_unused=True, materialize_grads=True)
    return [model, grads]


@situation()
def backward_inputs_arg(watch: Spans) -> object:
    """backward(inputs=...) fills the gradients of a few leaves only."""
    model = Net()
    with watch(model):
        x = batch(grad=True)
        squared(model(x)).backward(inputs=[x, model.head.weight])
    return [model, x]


@situation()
def backward_with_gradient(watch: Spans) -> object:
    """torch.autograd.backward on several roots with given gradients; a backward from the middle."""
    model = mlp(4, 6, 3)
    with watch(model):
        hidden = model[0](batch())
        out = model[2](model[1](hidden))
        torch.autograd.backward([out, hidden], [torch.ones_like(out), torch.full_like(hidden, 0.5)])
    return [model, out, hidden]


@situation()
def retained_grads(watch: Spans) -> object:
    """retain_grad on outputs and tensor hooks of the user before and after."""
    model, log = mlp(4, 6, 3), []
    with watch(model):
        hidden = model[0](batch())
        hidden.retain_grad()
        hidden.register_hook(lambda g: log.append("a"))
        hidden.register_hook(lambda g: g * 2)
        out = model[2](model[1](hidden))
        out.retain_grad()
        handle = register_multi_grad_hook([hidden, out], lambda gs: log.append(len(gs)))
        squared(out).backward()
        handle.remove()
    return [model, hidden, out, log]


@situation()
def detached_output(watch: Spans) -> object:
    """Outputs that are detached, stop-gradient targets, straight-through estimators."""
    model = mlp(4, 6, 3)
    with watch(model):
        a, b = model(batch()), model(batch()).detach()
        hard = a + (a.round() - a).detach()
        loss = (a - b).pow(2).mean() + squared(hard)
        loss.backward()
    return [model, loss]


@situation()
def frozen_params(watch: Spans) -> object:
    """All but the head is frozen; then a layer is thawed while watched."""
    model = Net()
    model.stem.requires_grad_(False)
    model.blocks.requires_grad_(False)
    with watch(model):
        squared(model(batch())).backward()
        model.blocks[1].requires_grad_(True)
        squared(model(batch())).backward()
    return model


@situation()
def backward_after_exit(watch: Spans) -> object:
    """The backward comes when the watch has closed, and one more in a later watch."""
    model = Net()
    with watch(model):
        first, second = squared(model(batch())), squared(model(batch()))
    first.backward()
    with watch(model):
        second.backward()
    return [model, first, second]


@situation()
def forward_before_enter(watch: Spans) -> object:
    """The forward ran before the watch, its backward runs inside."""
    model = Net()
    first = squared(model(batch()))
    with watch(model):
        first.backward()
    return [model, first]


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flag: bool) -> tuple[Tensor, Tensor, int]:
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return x * 2, x.detach() + 0, 7

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, a: Tensor | None, b: Tensor | None, c: None) -> tuple[Tensor | None, None]:
        (x,) = ctx.saved_tensors
        assert b is None, "a hook has made a gradient of nothing"
        return (None if a is None else a * 2 + x * 0), None


class _HalvesModule(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return _Halves.apply(x, True)


@situation()
def custom_autograd_fn(watch: Spans) -> object:
    """A custom Function whose unused output must get None as its gradient, once differentiable."""
    model = nn.Sequential(nn.Linear(4, 4), _HalvesModule())
    return step(watch, model, batch(), loss=lambda o: squared(o[0]))


@situation()
def anomaly_mode(watch: Spans) -> object:
    """detect_anomaly around a watched step."""
    with torch.autograd.detect_anomaly(check_nan=True):
        return step(watch, Net(), batch())


@situation()
def mutation_allowed(watch: Spans) -> object:
    """allow_mutation_on_saved_tensors around a watched step that overwrites what backward needs."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    with watch(model), allow_mutation_on_saved_tensors():
        out = model(batch())
        loss = out.sum()
        out.mul_(0)
        loss.backward()
    return [model, out]


@situation()
def graph_edges(watch: Spans) -> object:
    """The program walks the graph: node names, edges, GradientEdge, node hooks, metadata."""
    model, names = mlp(4, 6, 3), []
    with watch(model):
        out = model(batch())
        node: Any = out.grad_fn
        while node is not None:
            names.append((node.name(), len(node.next_functions), sorted(node.metadata)))
            node = node.next_functions[-1][0] if node.next_functions else None
        edge = torch.autograd.graph.get_gradient_edge(out)
        out.grad_fn.register_prehook(lambda g: names.append("pre"))
        torch.autograd.backward([edge], [torch.ones_like(out)])
    return [model, names]


@situation()
def partial_graph(watch: Spans) -> object:
    """Some outputs never get a gradient, some graphs are dropped without a backward."""
    model = nn.ModuleList(Block() for _ in range(3))
    with watch(model):
        x = batch(5, 8)
        used = model[0](x)
        model[1](used)
        model[2](x)
        squared(used).backward()
    return model


@situation()
def accumulated_views(watch: Spans) -> object:
    """Expanded, zero-strided and transposed gradients arrive at outputs and parameters."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6, bias=False))
    with watch(model):
        out = model(batch())
        (out.sum() + out.t().matmul(torch.ones(5)).sum() + out.expand(3, 5, 6).sum()).backward()
    return [model, out]
