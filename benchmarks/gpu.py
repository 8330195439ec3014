"""The figures of an accelerator, in one run of a few minutes: right answers, syncs, kernels, overhead, memory.

    python benchmarks/gpu.py [--out gpu.json] [--device cuda] [--minutes 3.7] [--quick]

Stands alone: it takes nanhunt from the folder that it lies in and installs nothing. One section that fails does not
lose the others; a section for which no time is left says so. `--device cpu --quick` is a rehearsal.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own notes are not for the reader
if not __package__:  # run as a file: its folder holds names that must not hide those of installed packages
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
from torch import Tensor, nn

import nanhunt
from benchmarks import apart, faults, overhead, pairs, tools
from benchmarks.device import PROGRAMS, Mixed, Run
from benchmarks.launches import kernels, memory, sync
from benchmarks.pairs import Spread

DETAILS = ("module", "auto", "op")
# Rows of the eager tables, by a word of their names.
ROWS = (
    "bare again",
    "floor: one aminmax",
    "nanhunt, module",
    "nanhunt, auto",
    "nanhunt, forward",
    "nanhunt, every",
    "anomaly",
    "isfinite",
    "sum of each",
    "DebugUnderflow",
)


# --- sections -------------------------------------------------------------------------------------


def correctness(run: Run) -> dict[str, Any]:
    """Each fault at each level: what was said, where it is not what had to be said."""
    wrong: dict[str, str] = {}
    asked = 0
    for fault in faults.FAULTS:
        for detail in DETAILS:
            asked += 1
            said = _said(fault, detail, run)
            if said != "right":
                wrong[f"{fault.name}, {detail}"] = said
    for detail in DETAILS[:2]:
        asked += 1
        model, scaler, step = faults.calibrating(run.device)
        high = scaler.get_scale()
        with nanhunt.watch(model, scaler=scaler, detail=detail, on_hit="record", **run.options) as watch:
            step()
        if watch.finding is not None or watch.errors or not scaler.get_scale() < high:
            wrong[f"calibration of a loss scale, {detail}"] = f"finding {watch.finding}, errors {watch.errors}"
    return {"asked": asked, "right": asked - len(wrong), "wrong": wrong}


def _said(fault: faults.Fault, detail: str, run: Run) -> str:
    model, step = fault.make(run.device)
    options = {} if detail == "op" else run.options
    try:
        with nanhunt.watch(model, detail=detail, **options):
            step()
    except nanhunt.NonFiniteError as error:
        found = error.finding
        right = (found.phase, found.module) == (fault.phase, fault.module) and fault.cause in (None, found.cause)
        return "right" if right else f"{found.phase}, {found.module}, {found.cause}"
    return "nothing was found"


def eager(name: str, run: Run, seconds: float) -> dict[str, Any]:
    """Ratios by the clock for each tool, and by device events for the watch and the noise."""
    program = PROGRAMS[name](run)
    for _ in range(3):
        program.train()
    rows = [tool for tool in tools.tools(**run.options) if any(word in tool.name for word in ROWS)]
    half = 0.01 if run.quick else 0.25
    found = overhead.of_program(
        program, "train", rows, seconds=seconds * 0.7, half=half, quick=run.quick, timer=run.wall
    )
    few = [tool for tool in rows if tool.name in ("bare again", "nanhunt, auto")]
    again = overhead.of_program(
        program, "train", few, seconds=seconds * 0.3, half=half, quick=run.quick, timer=run.events
    )
    result: dict[str, Any] = {"bare_ms": next((row.bare_ms for row in found if row.bare_ms), None)}
    result |= {row.tool: row.ratio.json() if row.ratio else row.note for row in found}
    return result | {f"{row.tool}, by events": row.ratio.json() if row.ratio else row.note for row in again}


def compiled(name: str, run: Run) -> dict[str, Any]:
    """A watched compiled model beside an unwatched one of the same weights."""
    torch._dynamo.reset()
    bare, subject = PROGRAMS[name](run), PROGRAMS[name](run)
    begin = time.monotonic()
    bare.model = torch.compile(bare.model)  # type: ignore[assignment]
    losses = _losses(bare)
    took = time.monotonic() - begin
    result: dict[str, Any] = {"seconds_to_compile": round(took, 1)}
    if took > run.left - 15:
        return result | {"note": "no time left to compile it again"}
    subject.model = torch.compile(subject.model)  # type: ignore[assignment]
    around = functools.partial(
        tools.watched, subject, subject.train, tools.COMPILED | {"on_hit": "record", **run.options}
    )
    try:
        with around():
            watched = _losses(subject)
    except nanhunt.UsageError as error:
        return result | {"note": "refused: " + apart.words(error)}
    result["equal"] = losses == watched
    times = pairs.times_for(bare.train, 0.01 if run.quick else 0.25, run.wall)
    order = random.Random(0)
    found = [pairs.pair(bare.train, around, times, order, run.wall) for _ in range(2 if run.quick else 8)]
    return result | {
        "bare_ms": round(1e3 * Spread.of(p.bare for p in found).median, 3),
        "ratio": Spread.of(p.ratio for p in found).json(),
    }


def _losses(program: Mixed) -> list[float]:
    losses = []
    for _ in range(3):
        program.train()
        losses.append(program.last.item())
    return losses


def graph(device: str) -> dict[str, Any]:
    """A CUDA graph of a watched forward pass: captured or not, equal or not, in words."""
    model = faults.Two(nn.Linear(64, 64), nn.LayerNorm(64)).to(device)
    x = torch.randn(8, 64, device=device)
    with torch.no_grad():
        expected = model(x)
        with nanhunt.watch(model, on_hit="record") as watch:
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    model(x)
            torch.cuda.current_stream().wait_stream(side)
            captured = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(captured):
                    out = model(x)
            except Exception as error:
                return {"captured": False, "note": apart.words(error)}
            captured.replay()
            torch.cuda.synchronize()
            equal = torch.equal(out, expected)
            x.fill_(float("nan"))
            captured.replay()
            torch.cuda.synchronize()
            model(torch.randn(8, 64, device=device))
    return {
        "captured": True,
        "equal": equal,
        "nan_of_a_replay_is_seen": watch.finding is not None,
        "errors": [apart.words(error) for error in watch.errors],
    }


def captured(run: Run) -> dict[str, Any]:
    if not run.cuda:
        return {"note": "only CUDA has graphs"}
    found: dict[str, Any] = apart.run(graph, str(run.device), seconds=min(45.0, max(20.0, run.left)))
    return found


def devices(run: Run) -> dict[str, Any]:
    """A model over two devices: its fault is named on the second."""
    if not run.cuda or torch.cuda.device_count() < 2:
        return {"note": "one device only"}

    class Across(faults.Two):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x).to("cuda:1"))
            return out

    second = nn.Linear(16, 16).to("cuda:1")
    model = Across(nn.Linear(16, 16).to("cuda:0"), second)
    x = torch.randn(4, 16, device="cuda:0")
    with nanhunt.watch(model) as watch:
        model(x).sum().backward()
    healthy = watch.finding is None and not watch.errors
    nn.init.constant_(second.weight, 3e38)
    try:
        with nanhunt.watch(model):
            model(x * 100).sum().backward()
    except nanhunt.NonFiniteError as error:
        return {"healthy": healthy, "named": error.finding.module, "right": error.finding.module == "second"}
    return {"healthy": healthy, "named": "nothing", "right": False}


def sections(run: Run) -> dict[str, tuple[float, Callable[[], Any]]]:
    """Each with the seconds it should have; the most wanted first."""
    share = 0.4 if run.quick else 28.0
    return {
        "correctness": (5, lambda: correctness(run)),
        "sync": (5, lambda: sync(run)),
        "kernels": (5, lambda: kernels(run)),
        "memory": (5, lambda: memory(run)),
        "gpt2 eager": (share, lambda: eager("gpt2", run, share)),
        "resnet eager": (share, lambda: eager("resnet", run, share)),
        "graph": (15, lambda: captured(run)),
        "devices": (2, lambda: devices(run)),
        "gpt2 compiled": (60, lambda: compiled("gpt2", run)),
        "resnet compiled": (60, lambda: compiled("resnet", run)),
    }


def measure(run: Run, wanted: list[str] | None = None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (seconds, section) in sections(run).items():
        if wanted is not None and name not in wanted:
            continue
        begin = time.monotonic()
        if run.left < seconds:
            result: Any = {"note": "no time left"}
        else:
            try:
                result = section()
            except Exception as error:
                traceback.print_exc()
                result = {"error": apart.words(error)}
        if run.cuda:
            torch.cuda.empty_cache()
        result["seconds"] = round(time.monotonic() - begin, 1)
        print(f"{name}: {json.dumps(result, default=str)}", flush=True)
        head, _, tail = name.partition(" ")
        if tail:
            found.setdefault(head, {})[tail] = result
        else:
            found[head] = result
    return found


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or, for a rehearsal, cpu")
    parser.add_argument("--minutes", type=float, default=3.7, help="no section begins that would end after this")
    parser.add_argument("--quick", action="store_true", help="tiny models and few rounds")
    parser.add_argument("--sections", nargs="+", metavar="NAME", help='such as "sync" or "gpt2 eager"; all by default')
    asked = parser.parse_args(given)
    device = torch.device(asked.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here; --device cpu --quick rehearses the script")
    run = Run(device=device, quick=asked.quick, end=time.monotonic() + 60 * asked.minutes)
    unknown = set(asked.sections or ()) - sections(run).keys()
    if unknown:
        parser.error(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(sections(run))}")
    if device.index is not None and run.cuda:
        torch.cuda.set_device(device)
    result = {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if run.cuda else "cpu",
        "devices": torch.cuda.device_count() if run.cuda else 0,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "nanhunt": nanhunt.__version__,
        "quick": asked.quick,
        "sections": measure(run, asked.sections),
    }
    asked.out.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")
    print(f"written: {asked.out}")


if __name__ == "__main__":
    main()
