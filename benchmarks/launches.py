"""What a step asks of an accelerator, bare and watched: waits for it, kernels on it, memory in it."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import nanhunt

from . import apart, counts
from .device import Run, gpt2
from .pairs import Step


@contextlib.contextmanager
def drains_allowed(mode: str, run: Run) -> Iterator[list[int]]:
    """Within, a sync is an error or a warning (`mode`), but not inside a drain. The list has an entry a drain."""
    from nanhunt.recorder import Slots

    drains: list[int] = []
    original = Slots.drain

    @functools.wraps(original)
    def drain(*args: Any, **kwargs: Any) -> Any:
        drains.append(1)
        if not run.cuda:
            return original(*args, **kwargs)
        torch.cuda.set_sync_debug_mode("default")
        try:
            return original(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    Slots.drain = drain  # type: ignore[method-assign]
    try:
        if run.cuda:
            torch.cuda.set_sync_debug_mode(mode)
        yield drains
    finally:
        if run.cuda:
            torch.cuda.set_sync_debug_mode("default")
        Slots.drain = original  # type: ignore[method-assign]


def _syncs(step: Step, run: Run) -> tuple[int, list[str], int]:
    """How many syncs of a step are outside the drains, where they are, and how many drains there were."""
    with warnings.catch_warnings(record=True) as seen, drains_allowed("warn", run) as drains:
        warnings.simplefilter("always")
        with counts.lists() as lists:
            step()
    places = [f"{Path(w.filename).name}:{w.lineno}" for w in seen if "synchroniz" in str(w.message)]
    return len(places), list(dict.fromkeys(places)), len(drains) if run.cuda or drains else len(lists)


def sync(run: Run) -> dict[str, Any]:
    """A whole watched step may wait for the device only in a drain: by count, and with every other sync an error."""
    program = gpt2(run)
    step = program.step("train")
    step()
    bare, bare_places, _ = _syncs(step, run)
    result: dict[str, Any] = {"bare": bare}
    if bare_places:
        result["bare_places"] = ", ".join(bare_places)
    with nanhunt.watch(program.model, program.optimizer, on_hit="record", **run.options) as watch:
        step()
        number, places, drains = _syncs(step, run)
        result |= {"outside_the_drain": number - bare, "drains": drains}
        if places:
            result["places"] = ", ".join(places)
        try:
            with drains_allowed("error", run):
                step()
            result["as_errors"] = "passes" if not watch.errors else f"the watch: {apart.words(watch.errors[0])}"
        except RuntimeError as error:
            result["as_errors"] = apart.words(error)
    return result if run.cuda else result | {"note": "a CPU has no sync debug mode"}


def kernels(run: Run) -> dict[str, Any]:
    """Kernels and copies of a step, bare and watched, and how many more for one tensor looked at."""
    program = gpt2(run)
    step = program.step("train")
    step()
    bare = _launches(step, run)
    with nanhunt.watch(program.model, program.optimizer, on_hit="record", **run.options) as watch:
        step()
        before = watch.seen
        watched = _launches(step, run)
        looks = watch.seen - before
    return {
        "bare": bare,
        "watched": watched,
        "looks": looks,
        "per_look": round((watched["kernels"] - bare["kernels"]) / max(1, looks), 3),
    }


def _launches(step: Step, run: Run) -> dict[str, int]:
    from torch.profiler import ProfilerActivity, profile

    if not run.cuda:
        return {"kernels": sum(counts.ops(step).values()), "copies": 0}
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        run.wait()
    names = [e.name for e in seen.events() or () if e.device_type == torch._C._autograd.DeviceType.CUDA]
    copies = sum(name.startswith(("Memcpy", "Memset")) for name in names)
    return {"kernels": len(names) - copies, "copies": copies}


def memory(run: Run) -> dict[str, Any]:
    """Bytes on the device after a step: what the watch adds, what each further step adds, and the peak."""
    program = gpt2(run)
    step = program.step("train")
    step()
    if not run.cuda:
        return counts.kept(program, {"on_hit": "record", **run.options}, steps=2)

    def after(times: int) -> tuple[int, int]:
        torch.cuda.reset_peak_memory_stats()
        for _ in range(times):
            step()
        run.wait()
        return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()

    bare, bare_peak = after(2)
    with nanhunt.watch(program.model, program.optimizer, on_hit="record"):
        first, peak = after(2)
        last, _ = after(5)
    left, _ = after(1)
    return {
        "bare_bytes": bare,
        "watch_bytes": first - bare,
        "bytes_per_step": round((last - first) / 5),
        "peak_bytes_over_bare": peak - bare_peak,
        "bytes_left_after_it": left - bare,
    }
