"""Results as tables between the markers of a Markdown file, and as the picture of the README."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tabulate import tabulate

from . import models, plot
from .permodule import FLOOR
from .targets import TARGETS, Results

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
PICTURE = ROOT / "docs" / "overhead.svg"
PAGES = (ROOT / "README.md", HERE / "README.md")
PANELS = ("gpt", "resnet", "llama", "tiny gpt2")
NONE = "-"


def load(folder: Path = RESULTS) -> Results:
    """What was measured: `cpu.json`, and under `gpu` what `gpu.json` holds, when it is there."""
    cpu, gpu = folder / "cpu.json", folder / "gpu.json"
    results: Results = json.loads(cpu.read_text(encoding="utf-8")) if cpu.exists() else {}
    if gpu.exists():
        results["gpu"] = json.loads(gpu.read_text(encoding="utf-8"))
    return results


def fill(text: str, tables: dict[str, str]) -> str:
    """The text with each table between `<!-- BENCHMARK name -->` and `<!-- /BENCHMARK name -->`; others stay.

    Raises:
        ValueError: for a marker whose table does not exist, or that is not closed.
    """
    for name in re.findall(r"<!-- BENCHMARK ([\w-]+) -->", text):
        if name not in tables:
            raise ValueError(f"<!-- BENCHMARK {name} -->: no such table; there are {', '.join(sorted(tables))}")
        opening, closing = f"<!-- BENCHMARK {name} -->", f"<!-- /BENCHMARK {name} -->"
        head, _, rest = text.partition(opening)
        _, found, tail = rest.partition(closing)
        if not found:
            raise ValueError(f"{opening} is not closed: put {closing} behind the place of the table")
        text = f"{head}{opening}\n{tables[name]}\n{closing}{tail}"
    return text


def write(results: Results, *, pages: tuple[Path, ...] = PAGES, picture: Path = PICTURE) -> list[Path]:
    """Put the tables into the pages and draw the picture; the files that changed."""
    tables = all_tables(results)
    changed = []
    files = [(page, fill(page.read_text(encoding="utf-8"), tables)) for page in pages]
    files.append((picture, drawing(results)))
    for path, text in files:
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    return changed


def all_tables(results: Results) -> dict[str, str]:
    return {
        "overhead": overhead(results, "train"),
        "overhead-train": overhead(results, "train", spread=True),
        "overhead-infer": overhead(results, "infer", spread=True),
        "permodule": permodule(results),
        "scaling": scaling(results),
        "counts": counts(results),
        "memory": memory(results),
        "monitor": monitor(results),
        "compiled": compiled(results),
        "gpu": gpu(results),
        "targets": targets(results),
        "machine": machine(results),
    }


def drawing(results: Results) -> str:
    rows = [row for row in results.get("overhead", ()) if row["mode"] == "train"]
    return plot.svg((models.CAPTIONS[name], [row for row in rows if row["model"] == name]) for name in PANELS)


# --- one function a table --------------------------------------------------------------------------


def _markdown(rows: list[list[Any]], headers: list[str]) -> str:
    if not rows:
        return "Not measured yet."
    lines = tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True).splitlines()
    return "\n".join(lines)


def machine(results: Results) -> str:
    found = results.get("machine")
    if not found:
        return "Not measured yet."
    return (
        f"Measured {found['date']} with `{found['command']}`: {found['processor']}, one thread, "
        f"Python {found['python']}, torch {found['torch']}, nanhunt {found['nanhunt']}"
        + "".join(f", {name} {version}" for name, version in found["packages"].items())
        + "."
    )


def overhead(results: Results, mode: str, *, spread: bool = False) -> str:
    rows = [row for row in results.get("overhead", ()) if row["mode"] == mode]
    names = list(dict.fromkeys(row["model"] for row in rows))
    cells = {(row["tool"], row["model"]): row for row in rows}
    notes: list[str] = []
    lines: list[list[Any]] = []
    for tool in dict.fromkeys(row["tool"] for row in rows):
        if all(cells[tool, name]["ratio"] is None for name in names if (tool, name) in cells):
            reasons = dict.fromkeys(cells[tool, name]["note"] for name in names if (tool, name) in cells)
            notes.append(f"{tool}: {'; '.join(reasons)}.")
            continue
        shown = f"**{tool}**" if cells[tool, names[0]]["kind"] == "nanhunt" else tool
        lines.append([shown, *(_ratio(cells.get((tool, name)), spread) for name in names)])
        for name in names:
            note = cells[tool, name]["note"] if (tool, name) in cells else ""
            if note and spread:
                notes.append(f"{tool} on {name}: {note}.")
    if lines:
        lines.append(["bare step, ms", *(_bare(rows, name) for name in names)])
    table = _markdown(lines, ["tool", *names])
    if notes:
        table += "\n\nNot measured: " + " ".join(notes)
    return table


def _ratio(row: dict[str, Any] | None, spread: bool) -> str:
    if row is None:
        return NONE
    ratio = row["ratio"]
    if ratio is None:
        return "fails" if "not installed" not in row["note"] and "no option" not in row["note"] else NONE
    digits = 3 if ratio["median"] < 1.1 else 2
    text = f"{ratio['median']:.{digits}f}"
    return f"{text} ({ratio['low']:.{digits}f} .. {ratio['high']:.{digits}f}; {ratio['count']})" if spread else text


def _bare(rows: list[dict[str, Any]], name: str) -> str:
    found = [row["bare_ms"] for row in rows if row["model"] == name and row["bare_ms"] is not None]
    return f"{sorted(found)[len(found) // 2]:.1f}" if found else NONE


def permodule(results: Results) -> str:
    found = results.get("permodule")
    if not found:
        return "Not measured yet."
    names = list(found["modules"][0]["microseconds"])
    rows = [
        [
            f"**{name}**" if "nanhunt" in name else name,
            *(_spread(row["microseconds"][name]) for row in found["modules"]),
            *(
                f"{row['microseconds'][name]['median'] / row['microseconds'][FLOOR]['median']:.2f}"
                if name != "bare"
                else NONE
                for row in found["modules"]
            ),
        ]
        for name in names
    ]
    kinds = [row["kind"] for row in found["modules"]]
    table = _markdown(rows, ["us for one module", *kinds, *(f"over the floor, {kind}" for kind in kinds)])
    attaching = ", ".join(f"{name} {value:.1f} us" for name, value in found["attaching"].items())
    return f"{table}\n\nA watch of a large model, for one module: {attaching}."


def _spread(figures: dict[str, float]) -> str:
    return f"{figures['median']:.1f} ({figures['low']:.1f} .. {figures['high']:.1f})"


def scaling(results: Results) -> str:
    found = results.get("scaling", [])
    if not found:
        return "Not measured yet."
    names = list(found[0]["microseconds"])
    rows = [
        [
            row["modules"],
            _size(row["bytes"]),
            *(f"{row['microseconds'][name]['median']:.1f}" for name in names),
            NONE if row["over_floor"]["nanhunt, auto"] is None else f"{row['over_floor']['nanhunt, auto']:.2f}",
            f"{1e3 * row['microseconds']['nanhunt, auto']['median'] / row['bytes']:.3f}",
        ]
        for row in found
    ]
    headers = ["modules", "output", *(f"{name}, us" for name in names), "auto over one aminmax", "auto, ns a byte"]
    return _markdown(rows, headers)


def _size(number: float) -> str:
    for unit in ("B", "KB", "MB"):
        if number < 1024:
            return f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.1f} GB"


def counts(results: Results) -> str:
    found = results.get("counts", [])
    bare = {row["model"]: row for row in found if row["way"] == "bare"}
    rows = [
        [
            row["model"],
            row["way"],
            row["ops"] - (0 if row["way"] == "bare" else bare[row["model"]]["ops"]),
            row["looked_at"] or NONE,
            f"{(row['ops'] - bare[row['model']]['ops']) / row['looked_at']:.1f}" if row["looked_at"] else NONE,
            row["reads"] - (0 if row["way"] == "bare" else bare[row["model"]]["reads"]),
        ]
        for row in found
    ]
    headers = ["model", "way", "ops (further ops)", "tensors looked at", "ops for one look", "host reads (further)"]
    return _markdown(rows, headers)


def memory(results: Results) -> str:
    rows = [
        [
            row["model"],
            row["way"],
            _size(row["tensor_bytes"]),
            _size(row["python_bytes"]),
            row["tensor_bytes_per_step"],
            row["python_bytes_per_step"],
            NONE if row["heap_bytes_per_step"] is None else row["heap_bytes_per_step"],
        ]
        for row in results.get("counts", ())
    ]
    headers = ["model", "way", "tensors", "Python objects", "tensors: further bytes a step", "Python", "whole heap"]
    return _markdown(rows, headers)


def monitor(results: Results) -> str:
    rows = []
    for row in results.get("monitor", ()):
        further = row["further"]
        rows.append(
            [
                row["model"],
                _ratio({"ratio": row["ordinary"], "note": ""}, True),
                f"{1 + row['own']:.4f}",
                _ratio({"ratio": row["sampled"], "note": ""}, True),
                f"{row['whole']:.3f}",
                row["parameters"],
                *(f"{further[way]['ops']} / {further[way]['reads']}" for way in further),
            ]
        )
    headers = ["model", "ordinary step", "by its own time", "sampled step", "all, one of 50 sampled", "parameters"]
    headers += ["further ops / host reads", "the same, as on an accelerator", "the same, sampled"]
    return _markdown(rows, headers)


def compiled(results: Results) -> str:
    found = results.get("compiled")
    if not found:
        return "Not measured yet."
    if found["status"] != "measured":
        return f"{found['status'].capitalize()}: {found['note']}"
    bare, watched = found["bare"], found["watched"]
    rows = [
        ["graphs", bare["graphs"], watched["graphs"]],
        ["graph breaks", bare["graph_breaks"], watched["graph_breaks"]],
        ["kernels", bare["kernels"], watched["kernels"]],
        [f"graphs after {found['after_more_watches']['watches']} watches", NONE, found["after_more_watches"]["graphs"]],
        ["equal to unwatched bit for bit", NONE, "yes" if found["equal"] else "no"],
        ["step, over bare", "1", _ratio({"ratio": found["ratio"], "note": ""}, True)],
    ]
    return _markdown(rows, [found["model"], "compiled", "compiled and watched"])


def gpu(results: Results) -> str:
    found = results.get("gpu")
    if not found:
        return "GPU figures have not been measured yet: `python benchmarks/gpu.py --out benchmarks/results/gpu.json`."
    rows: list[list[Any]] = []
    for name, section in found["sections"].items():
        rows += [[f"{name}: {key}", text] for key, text in _flat(section)]
    head = f"Measured {found['date']} on {found['device']}, torch {found['torch']}."
    return f"{head}\n\n{_markdown(rows, ['what', 'found'])}"


def _flat(value: Any, path: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict) and {"median", "low", "high", "count"} <= value.keys():
        return [(path, _ratio({"ratio": value, "note": ""}, True))]
    if isinstance(value, dict):
        return [line for key, part in value.items() for line in _flat(part, f"{path}, {key}".lstrip(", "))]
    if isinstance(value, list):
        return [line for n, part in enumerate(value) for line in _flat(part, f"{path} {n}")]
    return [(path, str(value).replace("|", "\\|").replace("\n", " "))]


def targets(results: Results) -> str:
    rows = []
    for target in TARGETS:
        measured, floor = target.measured(results), target.floor(results)
        verdict = "not measured" if measured is None else ("met" if measured <= target.limit else "**not met**")
        rows.append(
            [
                target.what,
                f"<= {target.limit:g} {target.unit}".strip(),
                target.predicted or NONE,
                NONE if measured is None else f"{measured:.3g}" if measured >= 10 else f"{measured:.3f}",
                NONE if floor is None else f"{floor:.3f}",
                verdict,
                target.tried or NONE,
            ]
        )
    return _markdown(rows, ["what", "target", "predicted", "measured", "floor", "verdict", "what was tried"])
