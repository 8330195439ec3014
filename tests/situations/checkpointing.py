"""Activation checkpointing in all its forms: forwards that run again inside the backward."""

import logging
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from .harness import Spans
from .models import Block, Net, batch, conv_net, mlp, situation, squared, step


class Checkpointed(nn.Module):
    """Blocks that each run under a checkpoint."""

    def __init__(self, depth: int = 3, **options: Any) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self._options = options

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, **self._options)
        return x


@situation()
def checkpoint_reentrant(watch: Spans) -> object:
    """The reentrant form, with dropout."""
    return step(watch, Checkpointed(use_reentrant=True), batch())


@situation()
def checkpoint_nonreentrant(watch: Spans) -> object:
    """The non-reentrant form, with dropout."""
    return step(watch, Checkpointed(use_reentrant=False), batch())


@situation()
def checkpoint_without_rng(watch: Spans) -> object:
    """preserve_rng_state=False: the recomputation draws other numbers, in a known order."""
    model = Checkpointed(use_reentrant=False, preserve_rng_state=False)
    return step(watch, model, batch())


@situation()
def checkpoint_without_early_stop(watch: Spans) -> object:
    """The recomputation runs to its end."""
    with set_checkpoint_early_stop(False):
        return step(watch, Checkpointed(use_reentrant=False), batch())


@situation()
def checkpoint_debug(watch: Spans) -> object:
    """debug=True records every operator of both runs and compares them."""
    # Its records are no proper log messages: the handler that a test runner has put there would choke on them.
    with mock.patch.object(logging.getLogger("LoggingTensor"), "handlers", []):
        return step(watch, Checkpointed(use_reentrant=False, debug=True), batch())


class _InplaceCheckpoint(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.net, self._options = conv_net(), options

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.net, x, **self._options)


@situation()
def checkpoint_nonreentrant_inplace(watch: Spans) -> object:
    """In-place ReLU and batch norm, which updates its statistics twice, inside a checkpoint."""
    return step(watch, _InplaceCheckpoint(use_reentrant=False), batch(2, 3, 14, 14))


@situation()
def checkpoint_reentrant_inplace(watch: Spans) -> object:
    """The same in the reentrant form."""
    return step(watch, _InplaceCheckpoint(use_reentrant=True), batch(2, 3, 14, 14, grad=True))


@situation()
def checkpoint_nested(watch: Spans) -> object:
    """A checkpoint inside a checkpoint inside a checkpoint."""

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Checkpointed(use_reentrant=False)
            self.block = Block()

        def pair(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, checkpoint(self.inner, x, use_reentrant=False), use_reentrant=False)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.pair, x, use_reentrant=False)

    return step(watch, Nested(), batch())


@situation()
def selective_checkpoint(watch: Spans) -> object:
    """Matrix products are saved, the rest is recomputed."""
    saved = [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return step(watch, Checkpointed(use_reentrant=False, context_fn=contexts), batch())


@situation()
def checkpoint_sequence(watch: Spans) -> object:
    """checkpoint_sequential over two segments."""

    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(*(Block() for _ in range(4)))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint_sequential(self.body, 2, x, use_reentrant=False)

    return step(watch, Segments(), batch(3, 8))


@situation()
def checkpoint_wrapper(watch: Spans) -> object:
    """The wrapper module that FSDP users apply."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    model = Net()
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
    return step(watch, model, batch())


@situation()
def checkpoint_under_autocast(watch: Spans) -> object:
    """A checkpointed network in bfloat16 autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        return step(watch, Checkpointed(use_reentrant=False), batch())


@situation()
def checkpoint_with_user_hooks(watch: Spans) -> object:
    """The user's hooks fire in the forward and again in the recomputation."""
    model, log = Checkpointed(use_reentrant=False), []
    for i, block in enumerate(model.blocks):
        block.up.register_forward_hook(lambda m, a, o, i=i: log.append(i))
        block.down.register_full_backward_hook(lambda m, gi, go, i=i: log.append(-i))
    return {**step(watch, model, batch()), "log": log}


@situation()
def checkpoint_twice_backward(watch: Spans) -> object:
    """retain_graph and a second backward through a checkpoint, then autograd.grad with create_graph."""
    model = Checkpointed(use_reentrant=False)
    with watch(model):
        x = batch(grad=True)
        loss = squared(model(x))
        loss.backward(retain_graph=True)
        loss.backward()
        (grad,) = torch.autograd.grad(squared(model(x)), x, create_graph=True)
        grad.pow(2).sum().backward()
    return {"model": model, "x": x, "loss": loss}


@situation()
def checkpoint_fails_inside(watch: Spans) -> object:
    """The recomputation raises, and so does a function that differs from its first run."""

    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.calls = nn.Linear(4, 4), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 2:
                raise ValueError("not twice")
            return self.lin(x).sin() if self.calls != 4 else self.lin(x).double().sin().sum()

    model, errors = Fickle(), []
    for _ in range(2):
        try:
            with watch(model):
                checkpoint(model, batch(grad=True), use_reentrant=False).sum().backward()
        except (ValueError, RuntimeError) as error:
            errors.append(f"{type(error).__name__} {str(error)[:80]}")
    return {"model": model, "errors": errors}


@situation()
def checkpoint_no_grad_forward(watch: Spans) -> object:
    """A checkpoint under no_grad and one whose backward never comes."""
    model = Checkpointed(use_reentrant=False)
    with watch(model):
        with torch.no_grad():
            first = model(batch())
        second = model(batch())
    return {"model": model, "first": first, "second": second.detach()}


@situation()
def saved_tensors_hooks_(watch: Spans) -> object:
    """Saved tensors are packed to float16 bytes by the user's hooks; packs are counted."""
    counts = {"pack": 0, "unpack": 0}

    def pack(x: Tensor) -> Any:
        counts["pack"] += 1
        return x.detach().clone()

    def unpack(x: Any) -> Tensor:
        counts["unpack"] += 1
        return x * 1

    with saved_tensors_hooks(pack, unpack):
        return {**step(watch, Net(), batch()), "counts": counts}


@situation()
def saved_tensors_on_cpu(watch: Spans) -> object:
    """save_on_cpu around forward and backward."""
    with save_on_cpu():
        return step(watch, Net(), batch())


@situation()
def saved_tensors_forbidden(watch: Spans) -> object:
    """disable_saved_tensors_hooks: nothing may install such hooks."""
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        return step(watch, mlp(4, 4, 3), batch())
