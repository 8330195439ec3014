"""What to do about a symptom: numbers first, then the scale, then the optimiser."""

from __future__ import annotations

from collections.abc import Iterable

from .steps import Step, Symptom

_HUNT = (
    "Run the step that fails under nanhunt.hunt, or the steps before it under nanhunt.watch: they name the operation."
)

ADVICE: dict[str, tuple[str, ...]] = {
    # nan_inf
    "sudden": (
        _HUNT,
        "Check that step's batch and the weights before it for NaN and Inf: nothing in the curves announced it.",
        "Then run the same step in float32 or bfloat16: if it goes away, a number was too large for float16.",
    ),
    "from_start": (
        "Check the weights that were loaded, the buffers and the first batch for NaN and Inf.",
        _HUNT,
    ),
    "hidden": (
        _HUNT,
        "Go back to a checkpoint from before this step: the weights are NaN from there on.",
        "transformers: logging_nan_inf_filter=False shows the NaN that a loss of 0.0 hides.",
    ),
    "gradient": (
        "Find the parameter whose gradient is bad first: nanhunt.watch names it, and the operation with detail='op'.",
        "In float16 without a GradScaler: use one, so that such steps are skipped.",
        "Go back to a checkpoint from before this step if such gradients were applied.",
    ),
    "scale_collapse": (
        "Do not lower the loss scale or its minimum: the gradients are bad at every scale.",
        _HUNT,
        "Check the weights for NaN and Inf: once they are bad, every step is skipped from there on.",
    ),
    "weights": (
        "Go back to a checkpoint from before this step.",
        _HUNT,
    ),
    "metric": (
        "Run the evaluation under nanhunt.watch: the training loss was finite there.",
        "Check the validation data, and metrics that divide by a count which may be zero.",
    ),
    "one_batch": (
        "Look at that batch: training went on, so it is the data, or a rare case of the loss.",
        _HUNT,
    ),
    # loss_explosion
    "growth": (
        "Lower the learning rate, or lengthen the warm-up.",
        "Clip the gradients: torch.nn.utils.clip_grad_norm_(parameters, 1.0), after scaler.unscale_(optimizer).",
        "Go back to a checkpoint from before the rise; a smaller loss scale does not help against it.",
    ),
    "level": (
        "Go back to a checkpoint from before the jump, with a lower learning rate or gradient clipping.",
        "Look at the batches of the jump: was the data, the order or the task changed there?",
    ),
    "slow": (
        "Lower the learning rate: the loss has been rising for a long time.",
        "Check weight decay and the sign of the loss's parts.",
    ),
    # vanishing_gradient
    "no_gradient": (
        "Check that the loss is connected to the weights: requires_grad, detach(), torch.no_grad().",
        "In float16: check whether every step is skipped (a falling loss scale, OVERFLOW messages).",
        "Look at the activations: a dead ReLU or a saturated sigmoid gives zeros.",
    ),
    "tiny": (
        "In float16: raise the initial loss scale, GradScaler(init_scale=2.0**16) or more.",
        "Look at the activations for saturation (sigmoid, tanh, softmax) and for dead ReLUs.",
        "Add normalisation or residual connections, or initialise for the activation in use.",
    ),
    "saturated": (
        "Look at the activations: saturated sigmoid or tanh, dead ReLU.",
        "Add normalisation or residual connections, or initialise for the activation in use.",
        "In float16: raise the loss scale.",
    ),
    "under_scaled": (
        "Scale the loss: torch.amp.GradScaler(init_scale=2.0**16), or raise the scale that is in use.",
        "Or use bfloat16, which needs no loss scale.",
    ),
    "frozen": (
        "Reset the optimizer's state of these weights: an infinite second moment makes every later update zero.",
        "Clip the gradients before the optimizer sees them, so that their square stays finite.",
        "Keep the optimizer's state in float32.",
    ),
    "clipped_before_unscale": (
        "Call scaler.unscale_(optimizer) before clip_grad_norm_: the limit was applied to gradients times the scale.",
    ),
    "dead": (
        "Lower the learning rate, or use LeakyReLU or GELU: these modules give out constant zeros.",
        "Check the initialisation and the biases of the layers before them.",
    ),
    "cut_off": (
        "Look at the activations between these layers and the loss: saturated sigmoid or tanh, dead ReLU.",
        "Add normalisation or residual connections, or initialise for the activation in use.",
    ),
    "skipped": (
        "Find out why every step is skipped: " + _HUNT[0].lower() + _HUNT[1:],
        "Start with a smaller loss scale only if a float32 run of the same step has finite gradients.",
    ),
    # non_convergence
    "lost_updates": (
        "Keep float32 master weights: autocast over a float32 model, not model.bfloat16() or model.half().",
        "Or use an optimizer with stochastic rounding or Kahan summation.",
        "A larger learning rate only hides it.",
    ),
    "low_precision_state": (
        "Keep the optimizer's moments in float32: float16 and bfloat16 swallow small updates.",
        "Keep float32 master weights.",
    ),
    "tiny_updates": (
        "Raise the learning rate: find it with a short range test, from 1e-6 upwards.",
        "Check that nothing divides the loss, or the gradients, by a large number.",
    ),
    "clipped_to_nothing": (
        "Raise max_norm of the gradient clipping to about the usual gradient norm.",
        "With a GradScaler: clip after scaler.unscale_(optimizer), not before it.",
    ),
    "no_lr": (
        "Check the scheduler: the learning rate is zero.",
        "transformers and DeepSpeed: check the warm-up, and whether every step is skipped.",
    ),
    "plateau": (
        "Compare with a float32 run of the same batches: nanhunt.compare.",
        "Keep the weights and the optimizer's state in float32.",
        "Then try a ten times larger and a ten times smaller learning rate, and check the labels.",
    ),
    # metric_fluctuation
    "jumps": (
        "Fix the seed and evaluate the same weights twice: is the metric itself steady?",
        "Lower the learning rate towards the end, or average the weights (EMA).",
        "Enlarge the validation set.",
    ),
    "rate": (
        "Lower the learning rate again, or raise it over a longer warm-up.",
        "Fix the seed and evaluate the same weights twice: is the metric itself steady?",
    ),
    "scale_churn": (
        "Steady the loss scale: a larger growth_interval, a longer warm-up, or bfloat16.",
        "Then fix the seed and enlarge the validation set.",
    ),
}


def symptom(
    name: str,
    form: str,
    first: Step,
    cause: str,
    evidence: Iterable[str],
    *,
    confidence: str,
    seen: Step,
    before: Step | None = None,
) -> Symptom:
    """A symptom that begins with the record `first`, with the advice for its form; empty sentences are left out."""
    return Symptom(
        name=name,
        form=form,
        step=first.step,
        line=first.line,
        cause=cause,
        advice=ADVICE[form],
        evidence=tuple(line for line in evidence if line),
        confidence=confidence,
        before=before,
        first=first,
        seen=seen.step,
    )
