"""Function transforms: functional_call, grad, vmap, jvp, jacobians, dual numbers."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)

from .harness import Spans
from .models import Net, batch, mlp, situation, squared


@situation()
def functional_call_(watch: Spans) -> object:
    """functional_call with parameters that are not the module's own."""
    model = Net()
    weights = {name: (p.detach() * 1.1).requires_grad_() for name, p in model.named_parameters()}
    with watch(model):
        loss = squared(functional_call(model, weights, (batch(),)))
        loss.backward()
    return [model, weights, loss]


@situation()
def maml(watch: Spans) -> object:
    """Meta-learning: an inner update by create_graph, then the outer backward through it."""
    model = mlp(4, 8, 3)
    weights = dict(model.named_parameters())
    with watch(model):
        inner = squared(functional_call(model, weights, (batch(),)))
        grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), grads, strict=True)}
        outer = squared(functional_call(model, fast, (batch(),)))
        outer.backward()
    return [model, inner, outer]


def _pure(model: nn.Module) -> tuple[dict[str, Tensor], Any]:
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return weights, lambda w, x: squared(functional_call(model, w, (x,)))


@situation(sees=False)
def func_grad(watch: Spans) -> object:
    """torch.func.grad and grad_and_value over functional_call."""
    model = mlp(4, 8, 3)
    weights, loss = _pure(model)
    with watch(model):
        return [model, grad(loss)(weights, batch()), grad_and_value(loss)(weights, batch())]


@situation(sees=False)
def func_vmap_grad(watch: Spans) -> object:
    """Gradients per sample: vmap over grad."""
    model = mlp(4, 8, 3)
    weights, loss = _pure(model)
    with watch(model):
        return [model, vmap(grad(loss), in_dims=(None, 0))(weights, batch(5, 4))]


@situation(sees=False)
def func_vmap(watch: Spans) -> object:
    """An ensemble: stacked weights under vmap, and a batched module call."""
    models = [mlp(4, 8, 3) for _ in range(3)]
    weights, buffers = stack_module_state(models)
    x = batch()
    with watch(models[0]):
        outs = vmap(lambda w, b: functional_call(models[0], (w, b), (x,)))(weights, buffers)
        rows = vmap(models[0])(x)
        dropped = vmap(nn.Dropout(0.5), randomness="different")(x)
        squared(outs).backward()
    return [models, weights, outs, rows, dropped]


@situation(sees=False)
def func_jvp(watch: Spans) -> object:
    """Forward-mode derivatives by torch.func.jvp and linearize, vjp beside them."""
    model = mlp(4, 8, 3)
    x, v = batch(), batch()
    with watch(model):
        first = jvp(model, (x,), (v,))
        out, pull = vjp(model, x)
        return [model, first, out, pull(torch.ones_like(out))]


@situation(sees=False)
def func_jacrev_jacfwd(watch: Spans) -> object:
    """Jacobians both ways and a hessian."""
    model = mlp(4, 5, 1)
    x = batch(4)
    with watch(model):
        jacobians = [jacrev(model)(x), jacfwd(model)(x)]
        return [model, jacobians, hessian(lambda y: model(y).sum())(x)]


@situation()
def forward_ad_(watch: Spans) -> object:
    """Dual numbers go through a module, and a backward through the tangent."""
    model = mlp(4, 8, 3)
    with watch(model), forward_ad.dual_level():
        dual = forward_ad.make_dual(batch(grad=True), batch())
        out = forward_ad.unpack_dual(model(dual))
        squared(out.tangent).backward()
        primal, tangent = out.primal.detach().clone(), out.tangent.detach().clone()
    return [model, primal, tangent]


@situation(sees=False)
def autograd_functional(watch: Spans) -> object:
    """torch.autograd.functional: jacobian, hvp, vectorised."""
    model = mlp(4, 5, 2)
    x = batch(4)
    with watch(model):
        jac = torch.autograd.functional.jacobian(model, x, vectorize=True)
        plain = torch.autograd.functional.jacobian(model, x, create_graph=True)
        hvp = torch.autograd.functional.hvp(lambda y: model(y).pow(2).sum(), x, batch(4))
    return [model, jac, plain, hvp]


@situation()
def batched_grad(watch: Spans) -> object:
    """A batch of gradients in one autograd.grad, by is_grads_batched."""
    model = mlp(4, 5, 3)
    with watch(model):
        x = batch(4, grad=True)
        jac = torch.autograd.grad(model(x), x, torch.eye(3), is_grads_batched=True)
    return [model, jac]
