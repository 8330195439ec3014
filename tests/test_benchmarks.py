"""The benchmarks run, and what they write is whole: tiny models, few rounds. The figures themselves are not tested."""

from __future__ import annotations

import ast
import json
import math
import random
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import nanhunt
from benchmarks import __main__ as command
from benchmarks import (
    apart,
    compiled,
    counts,
    faults,
    gpu,
    models,
    monitored,
    overhead,
    pairs,
    permodule,
    plot,
    scaling,
    tables,
    tools,
)
from benchmarks.targets import TARGETS

FEW = ["bare again", "floor: one aminmax", "nanhunt, module", "nanhunt, auto"]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the one command writes for one tiny model; the compiled part takes a compiler, and is left out."""
    out = tmp_path_factory.mktemp("results") / "cpu.json"
    parts = ["overhead", "permodule", "scaling", "counts"]
    command.main(
        ["--quick", "--models", "gpt", "--minutes", "0.01", "--out", str(out), "--tools", *FEW, "--parts", *parts]
    )
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_every_ratio_is_a_positive_number_and_every_tool_has_its_row(results: dict[str, Any]) -> None:
    rows = {(row["mode"], row["tool"]): row for row in results["overhead"]}
    assert rows.keys() == {(mode, tool) for mode in ("train", "infer") for tool in FEW}
    for row in rows.values():
        assert row["note"] == ""
        assert 0 < row["ratio"]["low"] <= row["ratio"]["median"] <= row["ratio"]["high"] < math.inf
        assert row["bare_ms"] > 0


def test_each_part_of_the_results_says_something(results: dict[str, Any]) -> None:
    assert {row["kind"] for row in results["permodule"]["modules"]} == permodule.KINDS.keys()
    assert all(row["over_floor"]["nanhunt, auto"] > 0 for row in results["permodule"]["modules"])
    assert {row["way"] for row in results["counts"]} == counts.WAYS.keys()
    assert len(results["scaling"]) == 2
    assert results["machine"]["torch"] == torch.__version__


def test_a_watch_dispatches_more_ops_and_keeps_no_activation(results: dict[str, Any]) -> None:
    ways = {row["way"]: row for row in results["counts"]}
    bare = ways["bare"]
    assert bare["looked_at"] == 0 and bare["ops"] > 0
    for way in ("nanhunt, module", "nanhunt, auto"):
        assert ways[way]["ops"] > bare["ops"] and ways[way]["looked_at"] > 0
        assert ways[way]["tensor_bytes_per_step"] == 0


def test_a_monitor_is_measured_in_its_stride() -> None:
    """Ordinary steps cost norms and one read; a sampled one dispatches more ops."""
    (row,) = monitored.measure(["gpt"], quick=True)
    assert row["whole"] > 0 and row["own"] > 0 and row["ordinary"]["count"] == 2
    ways = row["further"]
    assert 0 < ways["ordinary"]["ops"] < ways["sampled"]["ops"]
    assert ways["ordinary"]["reads"] <= 4
    assert "gpt" in tables.monitor({"monitor": [row]})


def test_the_counter_of_host_reads_sees_both_kinds() -> None:
    numbers = torch.arange(3.0)
    with counts.lists() as lists:
        found = counts.ops(lambda: (numbers.sum().item(), numbers.tolist()))
    assert found["aten::_local_scalar_dense"] == 1 and found["aten::sum"] == 1 and lists == [3]
    assert "lists" not in torch.Tensor.tolist.__qualname__


def test_a_leak_is_counted() -> None:
    """Guards the test that no activation is kept: it would pass with a count that sees nothing."""
    program = models.build("gpt", quick=True)
    leaked: list[torch.Tensor] = []
    handle = program.model.register_forward_hook(lambda module, args, out: leaked.append(out.detach()))
    with pairs.settled():
        found = counts.kept(program, None, steps=2)
    handle.remove()
    assert found["tensor_bytes_per_step"] == leaked[0].numel() * 4


def test_all_tables_are_there_and_filling_them_in_twice_changes_nothing(
    results: dict[str, Any], tmp_path: Path
) -> None:
    names = tables.all_tables(results)
    page, picture = tmp_path / "page.md", tmp_path / "docs" / "picture.svg"
    marks = [f"before {name}\n<!-- BENCHMARK {name} -->\n<!-- /BENCHMARK {name} -->\nafter\n" for name in names]
    page.write_text("\n".join(marks))
    assert set(tables.write(results, pages=(page,), picture=picture)) == {page, picture}
    once = page.read_text()
    assert tables.write(results, pages=(page,), picture=picture) == []
    assert page.read_text() == once
    for table in names.values():
        assert table and table in once
    for target in TARGETS:
        assert f"| {target.what} " in once
    assert "**nanhunt, auto**" in names["overhead"]


def test_a_marker_without_a_table_is_an_error() -> None:
    with pytest.raises(ValueError, match="no such table"):
        tables.fill("<!-- BENCHMARK speed -->\n<!-- /BENCHMARK speed -->", {"overhead": "x"})
    with pytest.raises(ValueError, match="is not closed"):
        tables.fill("<!-- BENCHMARK overhead -->", {"overhead": "x"})


def test_tables_can_be_made_of_no_results_at_all() -> None:
    assert "have not been measured yet" in tables.all_tables({})["gpu"]
    assert tables.all_tables({})["targets"].count("not measured") == len(TARGETS)


def test_the_pages_of_the_repository_can_be_filled_in() -> None:
    known = tables.all_tables(tables.load())
    for page in tables.PAGES:
        tables.fill(page.read_text(encoding="utf-8"), known)
    own = tables.PAGES[1].read_text(encoding="utf-8")
    assert all(f"<!-- BENCHMARK {name} -->" in own for name in known.keys() - {"overhead"})


def test_the_picture_is_xml_with_a_line_a_tool(results: dict[str, Any]) -> None:
    rows = [row for row in results["overhead"] if row["mode"] == "train"]
    drawn = ElementTree.fromstring(plot.svg([("a < b", rows), ("nothing measured", [])]))
    texts = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert "a < b" in texts and "nothing measured" not in texts and set(FEW) <= set(texts)
    assert len(list(drawn.iter("{http://www.w3.org/2000/svg}circle"))) == len(rows)


@pytest.mark.parametrize("name", list(models.MODELS))
def test_every_model_trains_and_infers(name: str) -> None:
    program = models.build(name, quick=True)
    for mode in ("train", "infer"):
        step = program.step(mode)
        step()
        assert program.model.training is (mode == "train")
    assert torch.isfinite(program.last)
    assert name in models.CAPTIONS


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_no_tool_leaves_a_hook_behind() -> None:
    program = models.build("gpt", quick=True)
    step = program.step("train")
    step()
    for tool in tools.tools():
        if tool.missing is not None or tool.apart or "train" not in tool.modes:
            continue
        with tool.around(program, step) as run:
            run()
        for module in program.model.modules():
            assert not module._forward_hooks and not module._backward_hooks, tool.name
        assert not torch.nn.modules.module._global_forward_hooks, tool.name
        assert not any(p._backward_hooks for p in program.model.parameters()), tool.name


def test_a_tool_that_raises_or_is_missing_gets_a_note_and_no_ratio() -> None:
    def broken(program: models.Program, step: pairs.Step) -> Any:
        raise ValueError("it is\nbroken")

    rows = [
        tools.Tool(name="broken", around=broken),
        tools.Tool(name="absent", around=tools.same, missing=tools.absent("no-such-distribution")),
        tools.Tool(name="training only", around=tools.same, modes=("train",)),
    ]
    found = overhead.measure("gpt", "infer", rows, seconds=0, quick=True)
    assert [(row.tool, row.ratio, row.note) for row in found] == [
        ("broken", None, "ValueError: it is"),
        ("absent", None, "no-such-distribution is not installed"),
    ]


def test_options_that_this_nanhunt_lacks_are_named() -> None:
    assert tools.lacking({"detail": "auto"}) is None
    assert tools.lacking({"detail": "auto", "speed": 3}) == "this nanhunt has no option speed"


def test_quartiles_stand_around_the_median() -> None:
    assert pairs.Spread.of([3, 1, 2, 4, 5]) == pairs.Spread(median=3, low=2, high=4, count=5)
    assert pairs.Spread.of([7]) == pairs.Spread(median=7, low=7, high=7, count=1)


def test_a_pair_tells_twice_the_work_from_once() -> None:
    ran: list[str] = []

    def timer(step: pairs.Step, times: int) -> float:
        step()
        return 2.0 if ran[-1] == "tool" else 1.0

    with pairs.settled():
        for seed in range(4):  # both orders
            found = pairs.pair(
                lambda: ran.append("bare"),
                lambda: nullcontext(lambda: ran.append("tool")),
                1,
                random.Random(seed),
                timer,
            )
            assert found.ratio == 2.0
    assert {tuple(ran[n : n + 4 : 2]) for n in range(0, len(ran), 4)} == {("bare", "tool"), ("tool", "bare")}


def test_a_process_apart_returns_raises_and_dies_in_words() -> None:
    assert apart.run(math.sqrt, 4.0, seconds=60) == 2.0
    with pytest.raises(apart.Failed, match="ValueError"):
        apart.run(math.sqrt, -1.0, seconds=60)


def test_scaling_rows_hold_what_was_asked() -> None:
    row = scaling.row(5, 1 << 10, rounds=1, seconds=1e-4)
    assert (row["modules"], row["bytes"]) == (5, 1024)
    assert row["microseconds"].keys() == {"bare", *scaling.COMPARED}


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name)
def test_the_faults_of_the_gpu_script_are_named_right_on_a_cpu(fault: faults.Fault) -> None:
    model, step = fault.make(torch.device("cpu"))
    with pytest.raises(nanhunt.NonFiniteError) as caught, nanhunt.watch(model):
        step()
    found = caught.value.finding
    assert (found.phase, found.module) == (fault.phase, fault.module)


def test_the_gpu_script_runs_as_a_file_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    wanted = ["correctness", "sync", "kernels", "memory", "resnet eager", "graph", "devices"]
    asked = ["--device", "cpu", "--quick", "--out", str(out), "--sections", *wanted]
    ran = subprocess.run(
        [sys.executable, gpu.__file__, *asked], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(out.read_text())["sections"]
    assert {"correctness", "sync", "kernels", "memory", "resnet", "graph", "devices"} == found.keys()
    assert not [name for name, section in found.items() if "error" in section], ran.stderr
    assert found["correctness"]["wrong"] == {} and found["correctness"]["asked"] == 17
    assert found["kernels"]["per_look"] > 0
    assert found["resnet"]["eager"]["nanhunt, auto"]["median"] > 0


def test_the_compiled_part_says_how_it_went(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an eager compiler: what is tested is the row, not the compiler."""
    monkeypatch.setattr(torch, "compile", lambda model: model)
    found = compiled.measure(quick=True)
    assert found["status"] == "measured" and found["equal"] is True and found["ratio"]["median"] > 0


def test_bad_arguments_are_refused_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    for given, said in ((["--minutes", "0"], "above 0"), (["--tools", "nosuch"], "no row has such a name")):
        with pytest.raises(SystemExit):
            command.arguments(given)
        assert said in capsys.readouterr().err


def test_the_map_of_files_is_the_folder() -> None:
    folder = Path(gpu.__file__).parent
    page = (folder / "README.md").read_text(encoding="utf-8")
    for path in folder.glob("*.py"):
        caption = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines()[0]
        assert path.name == "__init__.py" or f"| `{path.name}` | {caption} |" in page
