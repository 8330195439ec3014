"""The record of a training run by plain torch code: slow and obvious, to compare `nanhunt.Monitor` with."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from nanhunt.symptoms.steps import Step

# Where optimizers keep the mean of squares (or their sum) by which an update is divided.
SECOND_MOMENTS = ("exp_avg_sq", "square_avg", "sum", "max_exp_avg_sq")


class Recorder(Protocol):
    """What a run tells of itself: once after the last backward of a step, and once when the step is over."""

    def gradients(self) -> None:
        """All gradients of this step are there, still multiplied by the loss scale, and not clipped yet."""

    def log(self, *, loss: Tensor | float, **metrics: float) -> None:
        """The step is over: `loss` is not multiplied by the loss scale."""

    def close(self) -> None:
        """No more steps come from this model."""

    @property
    def steps(self) -> Iterable[Step]:
        """What was recorded."""


class Opener(Protocol):
    """Makes a recorder; `first` is the number of its first step, of a run that was resumed."""

    def __call__(
        self, model: nn.Module, optimizer: Optimizer, scaler: GradScaler | None = None, *, first: int = 0
    ) -> Recorder: ...


class PlainRecorder:
    """Takes every number of a step from the tensors themselves, in float64.

    Args:
        every: costly numbers (of updates, weights, single gradients, activations) are taken at each n-th step only.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scaler: GradScaler | None = None,
        *,
        first: int = 0,
        every: int = 10,
    ) -> None:
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.number, self.every = first, every
        self.steps: list[Step] = []
        self.weights = [p for group in optimizer.param_groups for p in group["params"]]
        names = {p: name for name, p in model.named_parameters()}
        self.names = [names.get(p, "") for p in self.weights]
        self.known: dict[str, Any] = {}
        self.before: list[Tensor] = []
        self.dead: dict[str, bool] = {}
        self.hooks = [optimizer.register_step_pre_hook(self._before_step)]
        self.hooks += [optimizer.register_step_post_hook(self._after_step), self._handed_in()]
        self.hooks += [self._silent(name, module) for name, module in model.named_modules() if name]

    # --- what stands at the model and the optimizer ------------------------------

    def _handed_in(self) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if module.training:
                on = torch.is_autocast_enabled("cpu")
                self.known["autocast"] = _word(torch.get_autocast_dtype("cpu")) if on else None
                crc = int(self.known.get("batch", "0"), 16)
                for tensor in (a for a in args if isinstance(a, Tensor)):
                    crc = zlib.crc32(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes(), crc)
                self.known["batch"] = f"{crc:08x}"

        return self.model.register_forward_pre_hook(hook)

    def _silent(self, name: str, module: nn.Module) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._sampled() and module.training and isinstance(output, Tensor) and output.is_floating_point():
                self.dead[name] = self.dead.get(name, True) and not bool(output.detach().any())

        return module.register_forward_hook(hook)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.known["clipped_norm"] = _norm(p.grad for p in self.weights)
        if self._sampled():
            self.before = [p.detach().clone() for p in self.weights]

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.known["skipped"] = False
        if self._sampled():
            moves = [p.detach().double() - old.double() for p, old in zip(self.weights, self.before)]
            size = _norm(self.before)
            self.known["update_ratio"] = _norm(moves) / size if size else None
            pulled = [p.grad != 0 for p in self.weights if p.grad is not None]
            still = [move == 0 for move, p in zip(moves, self.weights) if p.grad is not None]
            number = sum(int(mask.sum()) for mask in pulled)
            if number:
                self.known["lost_updates"] = sum(int((a & b).sum()) for a, b in zip(pulled, still)) / number

    # --- what the run tells ------------------------------

    def gradients(self) -> None:
        """All gradients of this step are there, still multiplied by the loss scale, and not clipped yet."""
        # Read now: when the step is logged, the scaler and the schedule have moved on.
        scale = self._scale()
        self.known["lr"] = tuple(float(group["lr"]) for group in self.optimizer.param_groups)
        self.known["loss_scale"] = scale
        given = [p.grad.detach() for p in self.weights if p.grad is not None]
        self.known["grad_norm"] = _norm(given) / (scale or 1.0)
        bad = [name for name, p in zip(self.names, self.weights) if p.grad is not None and not p.grad.isfinite().all()]
        self.known.pop(
            "worst", None
        )  # an optimizer that tries several points calls more than once: the last one stands
        if bad:
            self.known["worst"] = bad[-1]  # backward comes to the last one first
        if self._sampled() and given:
            norms = {n: _norm([p.grad]) for n, p in zip(self.names, self.weights) if p.grad is not None}
            self.known.setdefault("worst", max(norms, key=lambda name: norms[name]))
            sizes = [(p.numel(), _norm([p.grad])) for p in self.weights if p.grad is not None]
            faint = sum(number for number, norm in sizes if norm < 1e-6 * self.known["grad_norm"] * (scale or 1.0))
            self.known["faint"] = faint / sum(number for number, _ in sizes)
            total = sum(grad.numel() for grad in given)
            nonzero = sum(int((grad != 0).sum()) for grad in given)
            self.known["zero_grads"] = (total - nonzero) / total
            if nonzero:
                small = sum(int(((grad != 0) & (grad.abs() < self._tiny(grad))).sum()) for grad in given)
                self.known["small_grads"] = small / nonzero

    def log(self, *, loss: Tensor | float, **metrics: float) -> None:
        """The step is over: `loss` is not multiplied by the loss scale."""
        known = {"skipped": True, **self.known}
        value = float(loss.detach()) if isinstance(loss, Tensor) else float(loss)
        moments = [
            state[name]
            for state in (self.optimizer.state[p] for p in self.weights if p in self.optimizer.state)
            for name in SECOND_MOMENTS
            if isinstance(state.get(name), Tensor)
        ]
        bad = not all(map(_finite, (value, known.get("grad_norm", 0.0))))
        if self._sampled() or bad:
            known["bad_weights"] = sum(int((~p.detach().isfinite()).sum()) for p in self.weights)
            if moments:
                frozen = sum(int((moment == float("inf")).sum()) for moment in moments)
                known["frozen"] = frozen / sum(moment.numel() for moment in moments)
        self.steps.append(
            Step(
                step=self.number,
                loss=value,
                loss_scale_after=self._scale(),
                dead=tuple(name for name, silent in self.dead.items() if silent),
                metrics=metrics,
                dtypes=_words(p for p in self.weights if p.requires_grad),
                state_dtypes=_words(
                    value
                    for state in self.optimizer.state.values()
                    if isinstance(state, Mapping)
                    for name, value in state.items()
                    if name != "step" and isinstance(value, Tensor) and value.is_floating_point()
                ),
                **known,
            )
        )
        self.number += 1
        self.known, self.before, self.dead = {}, [], {}

    def close(self) -> None:
        """Takes the hooks off."""
        for hook in self.hooks:
            hook.remove()

    def _sampled(self) -> bool:
        return self.number % self.every == 0

    def _scale(self) -> float | None:
        return self.scaler.get_scale() if self.scaler is not None and self.scaler.is_enabled() else None

    def _tiny(self, grad: Tensor) -> float:
        """Smallest normal number of the format that `grad` was computed in."""
        word = self.known.get("autocast")
        return torch.finfo(getattr(torch, word) if word and grad.dtype == torch.float32 else grad.dtype).tiny


def _norm(tensors: Iterable[Tensor | None]) -> float:
    squares = [float(t.detach().double().square().sum()) for t in tensors if t is not None]
    return sum(squares) ** 0.5


def _finite(value: float) -> bool:
    return value - value == 0


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _words(tensors: Iterable[Tensor]) -> tuple[str, ...]:
    return tuple(sorted({_word(t.dtype) for t in tensors}))


def recording(run: Callable[[int, Opener], None], seed: int, *, every: int = 10) -> list[Step]:
    """The history of a run by the plain recorder; one that is resumed follows what came before it."""
    opened: list[PlainRecorder] = []

    def plain(
        model: nn.Module, optimizer: Optimizer, scaler: GradScaler | None = None, *, first: int = 0
    ) -> PlainRecorder:
        opened.append(PlainRecorder(model, optimizer, scaler, first=first, every=every))
        return opened[-1]

    state = torch.get_rng_state()
    try:
        run(seed, plain)
    finally:
        torch.set_rng_state(state)
        for recorder in opened:
            recorder.close()
    return [step for recorder in opened for step in recorder.steps]
