"""A capsule run again: the culprit on its own inputs, or the failing op alone, and whether it is the same fault."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import UsageError
from ..finding import Finding
from ..leaves import leaves
from ..watching import watch
from . import op_list, rebuild, rehearsal
from .culprit import inside, rebuilt, rooted
from .reading import MOST_MB, Opened, Piece
from .running import as_recorded, cast, casting, first_line, kinds, op_gives, outcome, own, set_modes
from .unpacked import Missing

Tensor = torch.Tensor

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_FIELDS = ("phase", "module", "op", "kind")
_AGAIN = 3  # a backward needs the forward's numbers, and about as much once more for its gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One way to run a fault again, and what came of it.

    Attributes:
        how: "module" (the culprit on its own inputs), "op" (the operation on its own operands), "model" (the whole
            model on the batch), or "batch" (a batch that was bad when it came).
        kinds: what is bad in the result.
        finding: of a module or a model: what the op level found this time, or None.
        differs: of phase, module, op and kind those that are not as recorded.
    """

    how: str
    kinds: tuple[str, ...]
    finding: Finding | None = None
    differs: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """True when the recorded fault has come again."""
        return not self.differs


class Capsule:
    """A fault that was written into a folder: what its culprit was given, and how to run it again.

    Made by `nanhunt.load_capsule`. Opening one runs no code of whoever made it.

    Attributes:
        finding: the `Finding` as it was recorded.
        left_out, missing: what the capsule does not hold, in words.
        hashes: step and hash of the failing batch, and of the one before it.
        versions: of python, torch and the machine, where it was recorded.
    """

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self.finding = opened.finding
        self.left_out, self.missing = opened.left_out, opened.missing
        self.hashes, self.versions = opened.hashes, opened.versions

    def __repr__(self) -> str:
        return f"<Capsule {self._opened.folder.name}: {self.finding.title()}>"

    # --- as a test ----------------------------------------------------------------------------------

    @property
    def args(self) -> tuple[Any, ...]:
        """What the culprit was called with, by position; new copies each time.

        Raises:
            UsageError: when the capsule does not hold it.
        """
        return own(self._piece().call()[0])  # type: ignore[no-any-return]

    @property
    def kwargs(self) -> dict[str, Any]:
        """The same by keyword."""
        return own(self._piece().call()[1])  # type: ignore[no-any-return]

    def module(self, model: nn.Module | None = None) -> nn.Module:
        """The culprit: rebuilt when it is a module of torch.nn, else that of `model`, which keeps its own weights.

        Raises:
            UsageError: when it cannot be rebuilt and no model is given, or the model has no module of that name.
        """
        path = self.finding.module
        if path is None:
            raise UsageError(f"this fault was in no module (phase {self.finding.phase}): there is none to call")
        if model is not None:
            return inside(model, path)
        return rebuilt(self._piece())

    def run(self, model: nn.Module | None = None) -> Any:
        """What the culprit makes of its recorded inputs; of a fault in backward, a pair of it and the gradients.

        A module of torch.nn has the recorded weights; one of `model` is called with those of the model given, so that
        a test sees what has been mended since. Each is in training or in evaluation as it was recorded.

        Raises:
            UsageError: as `module` and `args`.
        """
        piece = self._piece()
        grads = piece.gradients() if self.finding.phase == "backward" else {}
        module = self.module(model)
        modes = [(one, one.training) for one in module.modules()]
        set_modes(piece, module)
        try:
            with as_recorded(piece, autocast=True):
                return outcome(module, own(piece.call()), grads)
        finally:
            for one, training in modes:
                one.training = training

    def bad(self, model: nn.Module | None = None) -> tuple[str, ...]:
        """Which of nan, +inf and -inf stand in what `run` gives; empty once the fault is mended."""
        return kinds(self.run(model))

    def described(self) -> tuple[Any, dict[str, Tensor]]:
        """How the culprit is built, and its parameters and buffers."""
        piece = self._piece()
        return piece.value("build"), piece.state()

    def random(self) -> Any:
        """The state of the generators of random numbers, as it was."""
        return self._piece().value("random", dict)

    def _piece(self) -> Piece:
        piece = self._opened.call
        if piece is None or "call" not in piece:
            why = "; ".join(self.missing) or "it was left out"
            raise Missing(f"this capsule does not hold the inputs of its culprit: {why}")
        return piece

    # --- again --------------------------------------------------------------------------------------

    def replay(self, model: nn.Module | None = None, *, dtype: str | None = None) -> list[Attempt]:
        """Run the fault again in each way in which it can be; the recorded weights are put into `model`.

        Args:
            model: the model, as a factory makes it: for a culprit that is no module of torch.nn.
            dtype: compute all of it in this dtype instead, without autocast; the culprit in `model` stays in it.

        Raises:
            UsageError: when there is no way, saying what each would need.
        """
        if dtype is not None and dtype not in DTYPES:
            raise UsageError(f"dtype={dtype!r} is not known: use one of {', '.join(DTYPES)}")
        kind = DTYPES[dtype] if dtype is not None else None
        attempts: list[Attempt] = []
        why_not: list[str] = []
        for way in (self._by_module, self._by_op, self._by_model, self._by_batch):
            try:
                if way != self._by_model or not attempts:  # the whole model says no more than its culprit
                    attempts.append(way(model, kind))
            except UsageError as error:
                why_not.append(str(error))
        if not attempts:
            raise UsageError("this capsule cannot be run again:\n  " + "\n  ".join(dict.fromkeys(why_not)))
        return attempts

    def trial(
        self, model: nn.Module | None, dtype: torch.dtype | None, *, how: str | None = None
    ) -> tuple[str, Callable[[Any], Any], Any]:
        """How the call can be run on other inputs than its own, a function that gives what it makes then, its inputs.

        The inputs are a pair: the arguments of the call, and the gradients that came back. `how` is None for the first
        way that there is; "op"; or "module" for its forward alone, which no hook of a watch that runs here sees.

        Raises:
            UsageError: when there is no way.
        """
        if how is None and self.finding.phase == "input" and self._opened.batches:
            return "batch", (lambda given: given), (self._opened.batches[-1].call(), {})
        if how == "op":
            func, call = self._operation()

            def gives(given: Any) -> Any:
                return op_gives(func, *(given[0] if dtype is None else cast(given[0], dtype)))

            return "op", gives, (call, {})
        try:
            piece, _, module, call, grads = self._prepared(model, quiet=how is not None)
        except UsageError:
            if how is not None or self._opened.op is None:
                raise
            return self.trial(model, dtype, how="op")
        if dtype is not None:
            module.to(dtype)
        before = {name: t.detach().clone() for name, t in module.named_buffers()}

        def run(given: Any) -> Any:
            for name, t in module.named_buffers():
                t.copy_(before[name])
            call, grads = given if dtype is None else cast(given, dtype)
            with as_recorded(piece, autocast=dtype is None):
                return outcome(module if how is None else module.forward, call, grads)

        return "module", run, (call, grads)

    def _prepared(
        self, model: nn.Module | None, *, quiet: bool = False
    ) -> tuple[Piece, nn.Module, nn.Module, Any, dict[int, Tensor]]:
        """The culprit with its recorded weights, the root that it stands in, its call, and what came back."""
        piece, path = self._piece(), self.finding.module
        if path is None:
            raise UsageError(f"this fault was in no module (phase {self.finding.phase})")
        state = piece.state()
        if model is None:
            module = rebuilt(piece)
            root = rooted(module, path)
        else:
            root, module = model, inside(model, path)
            missing = rebuild.fit(module, own(state))
            if missing:
                raise UsageError(f"the capsule does not hold {', '.join(missing[:5])} of {path or 'the model'}")
        set_modes(piece, module)
        if quiet and next(module.children(), None) is not None:
            raise UsageError(f"{path or 'the model'} calls other modules")
        grads = piece.gradients() if self.finding.phase in ("backward", "forward") and not quiet else {}
        call = piece.call()
        if model is None:  # what anybody's file describes is measured first
            ghost = rebuild.built(piece.value("build"), rehearsal.shadow(state))
            set_modes(piece, ghost)
            args, kwargs = rehearsal.shadow(call)
            with casting(piece.casts()):
                times = _AGAIN if grads else 1
                rehearsal.rehearse(
                    lambda: (ghost.forward if quiet else ghost)(*args, **kwargs), most=self._opened.most, times=times
                )
        return piece, root, module, call, grads

    def _by_module(self, model: nn.Module | None, dtype: torch.dtype | None) -> Attempt:
        piece, root, module, call, grads = self._prepared(model)
        return self._watched("module", piece, root, module, call, grads, dtype)

    def _by_model(self, model: nn.Module | None, dtype: torch.dtype | None) -> Attempt:
        finding = self.finding
        if finding.phase in ("backward", "optimizer") or (finding.phase == "forward" and finding.module is None):
            where = "the loss" if finding.phase == "forward" else finding.phase
            raise UsageError(f"this fault was in {where}: a forward of the whole model does not show it")
        if model is None or not self._opened.batches:
            raise UsageError(
                "the whole model can be run with --model module:factory, on a batch that the capsule holds"
            )
        piece = self._opened.batches[-1]
        return self._watched("model", piece, model, model, piece.call(), {}, dtype)

    def _by_batch(self, model: nn.Module | None, dtype: torch.dtype | None) -> Attempt:
        if self.finding.phase != "input" or not self._opened.batches:
            raise UsageError("the batch itself was not what was bad")
        bad = kinds(self._opened.batches[-1].call())
        return Attempt(how="batch", kinds=bad, differs=() if self.finding.kind in bad else ("kind",))

    def _operation(self) -> tuple[Any, tuple[tuple[Any, ...], dict[str, Any]]]:
        piece = self._opened.op
        if piece is None:
            raise UsageError("the capsule does not hold the operation: nanhunt.hunt and detail='op' take it")
        func = op_list.op_of(piece.text("name"))
        args, kwargs = own((piece.value("args", tuple), piece.value("kwargs", dict)))
        if not any(True for _ in leaves((args, kwargs))):
            raise UsageError("the operation has no tensor to work on")
        ghosts = rehearsal.shadow((args, kwargs))
        rehearsal.rehearse(lambda: func(*ghosts[0], **ghosts[1]), most=self._opened.most)
        return func, (args, kwargs)

    def _by_op(self, model: nn.Module | None, dtype: torch.dtype | None) -> Attempt:
        func, call = self._operation()
        args, kwargs = call if dtype is None else cast(call, dtype)
        try:
            bad = kinds(op_gives(func, args, kwargs))
        except Exception as error:
            raise UsageError(f"{func} does not run on its operands: {first_line(error)}") from None
        return Attempt(how="op", kinds=bad, differs=() if self.finding.kind in bad else ("kind",))

    def _watched(
        self,
        how: str,
        piece: Piece,
        root: nn.Module,
        module: nn.Module,
        call: tuple[tuple[Any, ...], dict[str, Any]],
        grads: Mapping[int, Tensor],
        dtype: torch.dtype | None,
    ) -> Attempt:
        """Call a module under the op level, with the gradients that came back, and compare what is found."""
        given, grads = own(call), dict(grads)
        if dtype is not None:
            module.to(dtype)
            given, grads = cast(given, dtype), cast(grads, dtype)
        died: Exception | None = None
        result: Any = ()
        with as_recorded(piece, autocast=dtype is None), watch(root, detail="op", on_hit="record") as hunt:
            try:
                result = outcome(module, given, grads)
            except Exception as error:  # a program may die of what it has made
                died = error
        bad = kinds(result)
        found = hunt.finding or next((one for one in hunt.findings if one.kind == self.finding.kind), None)
        if found is None and died is not None:
            raise UsageError(
                f"{self.finding.module or 'the model'} does not run on what it was given: {first_line(died)}"
            )
        if found is None:
            return Attempt(how=how, kinds=bad, differs=("kind",))
        differs = tuple(
            name for name in _FIELDS if getattr(found, name) != getattr(self.finding, name)
            and not (name == "op" and self.finding.op is None)
        )  # fmt: skip
        return Attempt(how=how, kinds=bad, finding=found, differs=differs)


def load_capsule(path: str | os.PathLike[str], *, max_mb: float = MOST_MB, device: str = "cpu") -> Capsule:
    """Open the capsule in a folder, of anybody: no code of it runs, and no more memory is taken than `max_mb`.

    Args:
        path: the folder, as `finding.context["capsule"]` names it.
        max_mb: megabytes of tensors that are read; beside them stand two texts of at most 4 MB.
        device: where the tensors are put, such as "cuda".

    Raises:
        UsageError: for what is no capsule, is damaged, or is larger than that, with the reason.
    """
    return Capsule(Opened(path, max_mb=max_mb, device=device))
