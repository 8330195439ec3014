"""The one command: measures everything on this CPU, writes the results, the tables and the picture.

python -m benchmarks [--minutes N] [--models NAME ...] [--tools WORD ...] [--quick] [--tables]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own notes are not for the reader

import torch

import nanhunt

from . import apart, compiled, counts, models, monitored, overhead, permodule, scaling, tables, tools

SHARE = 0.75  # of the time for the ratios; the rest is what the fixed parts take at about 12 minutes
PARTS = ("overhead", "permodule", "scaling", "counts", "monitor", "compiled")
PACKAGES = ("transformers", "nndiagnostics", "sherlorch", "torchlens", "mindstudio-probe")


def processor() -> str:
    """The name of the processor, as its maker writes it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def machine(command: str) -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        "command": command,
        "processor": processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nanhunt": nanhunt.__version__,
        "packages": {name: metadata.version(name) for name in PACKAGES if tools.absent(name) is None},
    }


def measure(asked: argparse.Namespace, given: list[str]) -> dict[str, Any]:
    """All parts that were asked for, with a bar on a terminal that counts the seconds of the ratios."""
    results: dict[str, Any] = {"machine": machine(shlex.join(["python", "-m", "benchmarks", *given]))}
    quick: bool = asked.quick
    if "overhead" in asked.parts:
        seconds = 60 * asked.minutes * SHARE
        with Bar(seconds) as told:
            rows = overhead.measure_all(
                asked.models, tools.named(asked.tools), seconds=seconds, quick=quick, told=told.update
            )
        results["overhead"] = [row.json() for row in rows]
    if "permodule" in asked.parts:
        results["permodule"] = permodule.measure(quick=quick)
    if "scaling" in asked.parts:
        results["scaling"] = _scaling(quick)
    if "counts" in asked.parts:
        results["counts"] = counts.measure([m for m in counts.COUNTED if m in asked.models], quick=quick)
    if "monitor" in asked.parts:
        results["monitor"] = monitored.measure([m for m in monitored.MEASURED if m in asked.models], quick=quick)
    if "compiled" in asked.parts:
        results["compiled"] = _compiled(quick)
    return results


def merged(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What was measured now, and of what was measured before the parts, models and tools that were not asked for."""
    results = before | now
    if "overhead" in now and "overhead" in before:
        new = {(row["model"], row["mode"], row["tool"]): row for row in now["overhead"]}
        old = [(row["model"], row["mode"], row["tool"]) for row in before["overhead"]]
        rows = [new.pop(key, row) for key, row in zip(old, before["overhead"])]
        results["overhead"] = [*rows, *new.values()]
    return results


def _scaling(quick: bool) -> list[dict[str, Any]]:
    if quick:
        return scaling.measure(quick)
    found: list[dict[str, Any]] = apart.run(scaling.measure, quick, seconds=420)
    return found


def _compiled(quick: bool) -> dict[str, Any]:
    reason = compiled.available()
    if reason is not None:
        return {"status": "not measured", "note": reason}
    try:
        found: dict[str, Any] = apart.run(compiled.measure, quick, seconds=420)
    except apart.Failed as failure:
        return {"status": "failed", "note": str(failure)}
    return found


class Bar:
    """A progress bar where tqdm is installed and somebody looks on; silent in a pipe."""

    def __init__(self, total: float) -> None:
        self._bar: Any = None
        try:
            from tqdm import tqdm
        except ImportError:
            return
        self._bar = tqdm(
            total=round(total), unit="s", desc="ratios", disable=None, bar_format="{l_bar}{bar}| {n:.0f} s"
        )

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, seconds: float) -> None:
        if self._bar is not None:
            self._bar.update(seconds)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=12, help="about how long it may take in all (default 12)")
    parser.add_argument("--models", nargs="+", choices=list(models.MODELS), default=list(models.MODELS), metavar="NAME")
    parser.add_argument("--tools", nargs="+", metavar="WORD", help="only rows whose name holds one of these words")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--quick", action="store_true", help="tiny models and few rounds: to see that it runs")
    parser.add_argument("--out", type=Path, default=tables.RESULTS / "cpu.json", help="where the results go")
    parser.add_argument("--tables", action="store_true", help="measure nothing: write the tables from the results")
    asked = parser.parse_args(given)
    if asked.minutes <= 0:
        parser.error(f"--minutes {asked.minutes:g}: give a number above 0")
    if asked.tools is not None and not tools.named(asked.tools):
        parser.error(f"--tools {' '.join(asked.tools)}: no row has such a name")
    return asked


def main(given: list[str] | None = None) -> None:
    asked = arguments(given)
    usual = asked.out == tables.RESULTS / "cpu.json"
    if not asked.tables:
        before = json.loads(asked.out.read_text(encoding="utf-8")) if asked.out.exists() and not asked.quick else {}
        results = merged(before, measure(asked, sys.argv[1:] if given is None else given))
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    results = tables.load() if usual else json.loads(asked.out.read_text(encoding="utf-8"))
    found = tables.all_tables(results)
    print(
        "\n\n".join(f"{name}\n\n{found[name]}" for name in ("machine", "overhead", "permodule", "compiled", "targets"))
    )
    if usual and not asked.quick:
        for path in tables.write(results):
            print(f"written: {path.relative_to(tables.ROOT)}")


if __name__ == "__main__":
    main()
