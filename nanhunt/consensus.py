"""Who was first of many ranks: their findings to one verdict, by step, phase and order of events, never by clocks."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import numerics
from .finding import PHASES, Finding, TensorStats
from .numerics import fmt

MADE, HANDED = "made", "handed"  # what a rank did with a bad value: its own code made it, another process sent it
_NAMED = 8  # ranks, or runs of them, that a sentence names
_SENT = 8  # ranks whose part in a collective the table shows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Consensus:
    """What all ranks together say.

    Attributes:
        verdict: the finding that was first, told for all ranks; None when no rank has a fault.
        world: how many ranks there are, as far as anybody knows.
        faults: for each rank that has any, its faults in the order in which it met them.
        clean: ranks that said they have none.
        silent: ranks of which nothing is known: killed, too late, their file is missing or torn.
    """

    verdict: Finding | None
    world: int
    faults: dict[int, tuple[Finding, ...]]
    clean: tuple[int, ...]
    silent: tuple[int, ...]


def was_handed(finding: Finding) -> bool:
    """True when nothing bad was made on that rank before: what it met may have come from another process."""
    return finding.context.get("handed") is not None or finding.cause == "collective"


def consent(words: Mapping[int, Sequence[Finding]], *, world: int | None = None) -> Consensus:
    """The verdict over what each rank has recorded; the same from the same words, whoever asks.

    Args:
        words: by rank, its findings; a rank with nothing to tell has an empty list, a lost one no entry.
        world: the number of ranks; None: the largest that a finding tells of, and all that are in `words`.
    """
    faults = {rank: tuple(f for f in words[rank] if f.handled is None) for rank in sorted(words)}
    told = [_size(f.context.get("world_size")) for found in faults.values() for f in found]
    size = max([world or 0, max(words, default=-1) + 1, *told])
    clean = tuple(rank for rank, found in faults.items() if not found)
    faults = {rank: found for rank, found in faults.items() if found}
    silent = tuple(rank for rank in range(size) if rank not in words)
    firsts = {rank: min(found, key=lambda f: _place(f, rank)) for rank, found in faults.items()}
    verdict = None
    if firsts:
        rank = min(firsts, key=lambda rank: _place(firsts[rank], rank))
        verdict = _told(firsts[rank], rank, firsts, size, silent)
    return Consensus(verdict=verdict, world=size, faults=faults, clean=clean, silent=silent)


def _size(world: Any) -> int:
    return world if isinstance(world, int) else 0


def _place(finding: Finding, rank: int) -> tuple[Any, ...]:
    """Where a finding stands among those of all ranks.

    Within a step, what a rank was handed comes after what any rank has made: a pipeline stage meets a bad input, which
    another made in its forward. Ranks that run the same program look at the same tensors in the same order, so the
    number of those (`order`) tells more than the phase, which begins anew with each part of an accumulated batch.
    """
    handed = was_handed(finding)
    # Whoever it came from may count one step more: a stage of a pipeline before its optimizer was ever seen.
    step = (finding.step if finding.step is not None else -1) + handed
    phase = PHASES.index(finding.phase) if finding.phase in PHASES else len(PHASES)
    order = finding.context.get("order")
    place = (0, order, phase) if isinstance(order, int) and finding.phase != "state" else (0, 0, phase)
    return (step, handed, *place, finding.call or 0, rank)


# --- the one verdict -------------------------------------------------------------------------------


def _told(first: Finding, rank: int, firsts: Mapping[int, Finding], world: int, silent: tuple[int, ...]) -> Finding:
    handed = [r for r, f in firsts.items() if r != rank and (was_handed(f) or (f.step or 0) > (first.step or 0))]
    others = [r for r in firsts if r != rank and r not in handed]
    nobody = was_handed(first)  # of all ranks none has seen it being made
    said: list[str] = []
    rows: tuple[TensorStats, ...] = ()
    if nobody:
        rows = tuple(row for row in (_sent(firsts[r], r) for r in sorted(firsts)[:_SENT]) if row is not None)
        said.append(_of_nobody(first, firsts, world, silent))
    elif world > 1:
        said.append(f"Rank {rank} was the first of {fmt(world)} ranks.")
        if handed:
            whole = len(handed) == world - 1
            who = ("the other was" if world == 2 else "the others were") if whole else f"{ranks_in_words(handed)} had"
            by = _by([firsts[r] for r in handed])
            said.append(f"{who[0].upper()}{who[1:]} {'handed' if whole else 'been handed'} it{by}.")
    if others and not nobody:
        own = "made one of its own" if len(others) == 1 else "made some of their own"
        said.append(f"{ranks_in_words(others).capitalize()} {own} in this step.")
    if silent:
        said.append(f"Nothing is known of {ranks_in_words(silent)}.")
    why = " ".join([*([first.why] if first.why else []), *said])
    about = {
        "world": world,
        "first": None if nobody else rank,
        "handed": ranks_in_words(handed) or None,
        "made": ranks_in_words(others if nobody else [rank, *others]) or None,
        "unheard": ranks_in_words(silent) or None,
    }
    context = {**first.context, "ranks": {key: value for key, value in about.items() if value is not None}}
    return dataclasses.replace(
        first,
        rank=None if nobody else rank,
        why=why or None,
        context=context,
        tensors=(*first.tensors, *rows),
        advice=_advice(first, nobody),
    )


def _advice(first: Finding, nobody: bool) -> tuple[str, ...]:
    if not nobody or first.cause != "collective":
        return first.advice
    return (
        "Divide by the number of ranks before the sum and not after it, or reduce in float32 or bfloat16.",
        "See that every receive buffer is written: the same collective, with the same shapes, on every rank.",
    )


def _by(findings: Sequence[Finding]) -> str:
    """` by the all-reduce of fc.weight`: what most of them say it came by."""
    ways = Counter(str(f.context["handed"]) for f in findings if f.context.get("handed") is not None)
    return f" by {ways.most_common(1)[0][0]}" if ways else ""


def _of_nobody(first: Finding, firsts: Mapping[int, Finding], world: int, silent: tuple[int, ...]) -> str:
    """No rank has made it: the sum itself, a buffer that nobody filled, or a rank that cannot be asked any more."""
    sent = {rank: _absmax(f) for rank, f in firsts.items()}
    known = {rank: size for rank, size in sent.items() if size is not None}
    by = str(first.context.get("handed") or "a collective")
    parts = ", ".join(f"{fmt(size)} on rank {rank}" for rank, size in list(known.items())[:_NAMED])
    more = f" and {len(known) - _NAMED} more" if len(known) > _NAMED else ""
    given = f": what went in was finite, |x| up to {parts}{more}" if known else ""
    if silent and len(known) < world:
        return f"No rank that can be asked has made it, it came out of {by}{given}; {ranks_in_words(silent)} may have."
    dtype = _collective(first).get("dtype") or next((t.dtype for t in first.tensors if t.first_bad), None)
    limit = numerics.format_of(str(dtype)) if dtype is not None else None
    total = sum(known.values())
    if limit is not None and len(known) > 1 and total > limit.max and first.kind != "nan":
        return f"No rank has made it, it came out of {by}{given}. The sum passes {fmt(limit.max)}, where {dtype} ends."
    return f"No rank has seen it being made, it came out of {by}{given}."


def _collective(finding: Finding) -> Mapping[str, Any]:
    told = finding.context.get("collective")
    return told if isinstance(told, Mapping) else {}


def _absmax(finding: Finding) -> float | None:
    size = _collective(finding).get("sent_absmax")
    return float(size) if isinstance(size, (int, float)) else None


def _sent(finding: Finding, rank: int) -> TensorStats | None:
    size, dtype = _absmax(finding), _collective(finding).get("dtype")
    if size is None:
        return None
    return TensorStats(
        role="sent",
        name=f"by rank {rank}",
        dtype=str(dtype) if dtype is not None else None,
        absmax=size,
        headroom_bits=numerics.headroom_bits(size, str(dtype)) if dtype is not None else None,
    )


def ranks_in_words(ranks: Iterable[int]) -> str:
    """`rank 3`, `ranks 0, 2-7 and 9`; many are counted: `ranks 0, 2, 4, ... (500 of them)`. Empty for none."""
    known = sorted(set(ranks))
    if not known:
        return ""
    runs: list[list[int]] = []
    for rank in known:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:_NAMED]]
    if len(runs) > _NAMED:
        return f"ranks {', '.join(shown)}, ... ({len(known)} of them)"
    word = "rank" if len(known) == 1 else "ranks"
    return f"{word} {' and '.join([', '.join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)}"
