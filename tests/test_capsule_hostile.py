"""Capsules of strangers: damaged, hostile, in disguise. A clear error, no code run, no file outside, no more memory."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import random
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanhunt
from nanhunt import cli
from nanhunt.capsule import op_list, rebuild, rehearsal, running, safe_tensors

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A capsule as it should be: an overflow in a linear layer of float16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4)).half()
    model[0].weight.data.mul_(8)
    x = torch.randn(16, 8).half()
    x[3] = 6e4
    finding = nanhunt.hunt(model, x, model=model, capsule=tmp_path_factory.mktemp("healthy"))
    assert finding is not None
    return pathlib.Path(finding.context["capsule"])


@pytest.fixture
def folder(healthy: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy that a test may damage."""
    return pathlib.Path(shutil.copytree(healthy, tmp_path / "capsule"))


def _edit(folder: pathlib.Path, change: Callable[[Any], object]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def _everything(folder: pathlib.Path) -> None:
    """All that may be done with a stranger's capsule."""
    capsule = nanhunt.load_capsule(folder, max_mb=50)
    capsule.replay()
    capsule.replay(dtype="float32")
    capsule.bad()


def _tensors(folder: pathlib.Path, header: Any, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "tensors.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


# --- the files ------------------------------------------------------------------------------------------------------

GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
FILES: dict[str, tuple[Callable[[pathlib.Path], object], str]] = {
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "holds no manifest.json"),
    "no tensors": (lambda f: (f / "tensors.safetensors").unlink(), "cannot read"),
    "no finding": (lambda f: (f / "finding.json").unlink(), "cannot read"),
    "half a manifest": (lambda f: os.truncate(f / "manifest.json", 200), "manifest.json is not JSON"),
    "an empty manifest": (lambda f: os.truncate(f / "manifest.json", 0), "manifest.json is not JSON"),
    "a list": (lambda f: (f / "manifest.json").write_text("[]"), "manifest.json is not JSON"),
    "brackets": (lambda f: (f / "manifest.json").write_text("[" * 100_000), "manifest.json is not JSON"),
    "bytes": (lambda f: (f / "manifest.json").write_bytes(b"\xff\xfe\x00"), "manifest.json is not JSON"),
    "five megabytes": (lambda f: (f / "manifest.json").write_text(" " * (5 << 20)), "has more than 4 MB"),
    "a finding of another kind": (lambda f: (f / "finding.json").write_text("{}"), "not a nanhunt finding"),
    "another format": (lambda f: _edit(f, lambda m: m.update(format=9)), "has format 9, and this nanhunt reads 1"),
    "half the tensors": (lambda f: os.truncate(f / "tensors.safetensors", 900), "damaged"),
    "no byte": (lambda f: os.truncate(f / "tensors.safetensors", 0), "does not begin with a header"),
    "a byte too many": (lambda f: (f / "tensors.safetensors").open("ab").write(b"x"), "longer or shorter"),
    "a zip": (lambda f: _zip(f / "tensors.safetensors"), "does not begin with a header"),
    "a pickle": (lambda f: (f / "tensors.safetensors").write_bytes(_evil()), "does not begin with a header"),
    "a huge header": (
        lambda f: (f / "tensors.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}"),
        "does not begin with a header",
    ),
    "a header that is a list": (lambda f: _tensors(f, []), "its header is not JSON"),
    "no dtype": (lambda f: _tensors(f, {"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)), "is not understood"),
    "an odd dtype": (lambda f: _tensors(f, {"a": GOOD | {"dtype": "OBJ"}}, bytes(8)), "is not understood"),
    "a shape that is too large": (lambda f: _tensors(f, {"a": GOOD | {"shape": [1 << 40]}}, bytes(8)), "does not have"),
    "a negative shape": (lambda f: _tensors(f, {"a": GOOD | {"shape": [-2]}}, bytes(8)), "not whole numbers"),
    "a shape of true": (lambda f: _tensors(f, {"a": GOOD | {"shape": [True, 2]}}, bytes(8)), "not whole numbers"),
    "a shape that wraps": (
        lambda f: _tensors(f, {"a": {"dtype": "F32", "shape": [1 << 33, 1 << 31], "data_offsets": [0, 0]}}),
        "does not have the size",
    ),
    "a part beyond the end": (
        lambda f: _tensors(f, {"a": GOOD | {"data_offsets": [8, 16]}}, bytes(8)),
        "does not have",
    ),
    "a gap": (lambda f: _tensors(f, {"a": GOOD | {"data_offsets": [8, 16]}}, bytes(16)), "overlap, or leave a gap"),
    "an overlap": (
        lambda f: _tensors(f, {"a": GOOD, "b": GOOD | {"data_offsets": [4, 12]}}, bytes(12)),
        "overlap, or leave a gap",
    ),
    "a link to elsewhere": (lambda f: _link(f / "tensors.safetensors"), "tensors.safetensors is no plain file"),
    "a pipe": (lambda f: _pipe(f / "manifest.json"), "manifest.json is no plain file"),
    "a folder": (lambda f: _folder(f / "finding.json"), "finding.json is no plain file"),
}


def _zip(path: pathlib.Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("data.pkl", bytes(10_000_000))


def _link(path: pathlib.Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def _pipe(path: pathlib.Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: pathlib.Path) -> None:
    path.unlink()
    path.mkdir()


class _Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/nanhunt-was-here",)


def _evil() -> bytes:
    return pickle.dumps(_Evil())


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_a_clear_error(name: str, folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage, told = FILES[name]
    damage(folder)
    with pytest.raises(nanhunt.UsageError) as refused:
        nanhunt.load_capsule(folder)
    assert told in str(refused.value), refused.value
    assert cli.main(["replay", str(folder)]) == 2
    assert capsys.readouterr().err.startswith("nanhunt: error: ")


def test_a_pickle_in_disguise_is_not_run(folder: pathlib.Path) -> None:
    mark = folder.parent / "was-here"
    for name in ("manifest.json", "finding.json", "tensors.safetensors"):
        shutil.copy(folder / name, folder.parent / name)
        evil = pickle.dumps(_Evil()).replace(b"/tmp/nanhunt-was-here", str(mark).encode())
        (folder / name).write_bytes(evil)
        with pytest.raises(nanhunt.UsageError):
            _everything(folder)
        shutil.copy(folder.parent / name, folder / name)
    assert not mark.exists()
    _everything(folder)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_damaged_the_answer_is_an_error_or_a_replay(seed: int, folder: pathlib.Path) -> None:
    """Bytes turned over, cut out, put in, in any of the three files: UsageError, or it still reads."""
    rng = random.Random(seed)
    files = ("manifest.json", "finding.json", "tensors.safetensors")
    whole = {name: (folder / name).read_bytes() for name in files}
    for _ in range(60):
        name = rng.choice(files)
        data = bytearray(whole[name])
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(min(len(data), rng.choice((64, 2000, 1 << 30))))
            how = rng.randrange(4)
            if how == 0:
                data[at] = rng.randrange(256)
            elif how == 1:
                del data[at : at + rng.randint(1, 50)]
            elif how == 2:
                data[at:at] = rng.choice((b"9", b"-", b"[", b'"', b"null", b"1e999", bytes(3)))
            else:
                data[at] ^= 1 << rng.randrange(8)
            data = data or bytearray(b"{")
        (folder / name).write_bytes(bytes(data))
        try:
            _everything(folder)
        except nanhunt.UsageError:
            pass
        finally:
            (folder / name).write_bytes(whole[name])


# --- what the manifest says -------------------------------------------------------------------------------------------


def _rows(manifest: Any, **new: Any) -> None:
    for row in manifest["parts"]["call"]["rows"] + manifest["parts"]["op"]["rows"]:
        row.update(new)


def _build(manifest: Any, kind: str, **config: Any) -> None:
    spec = {"dict": [["type", kind], ["config", {"dict": [[k, v] for k, v in config.items()]}]]}
    manifest["parts"]["call"]["trees"]["build"] = spec


MANIFESTS: dict[str, tuple[Callable[[Any], object], str]] = {
    "no parts": (lambda m: m.pop("parts"), "its manifest has no parts"),
    "a part that is a list": (lambda m: m["parts"].update(call=[]), "a part of its manifest is none"),
    "rows that are none": (lambda m: m["parts"]["call"].update(rows={}), "its list of tensors is none"),
    "no block": (lambda m: _rows(m, block="nowhere"), "a tensor has no block"),
    "a path as block": (lambda m: _rows(m, block="../../etc/passwd"), "a tensor has no block"),
    "another dtype": (lambda m: _rows(m, dtype="float64"), "does not have the dtype of its block"),
    "an attribute as dtype": (lambda m: _rows(m, dtype="load"), "no dtype"),
    "a larger shape": (lambda m: _rows(m, shape=[1 << 30], strides=None), "does not fit into its block"),
    "strides beyond it": (lambda m: _rows(m, shape=[2, 2], strides=[1 << 40, 1], offset=0), "does not fit"),
    "a thousand dimensions": (lambda m: _rows(m, shape=[1] * 1000, strides=[0] * 1000, offset=0), "not whole numbers"),
    "a negative offset": (lambda m: _rows(m, offset=-8), "not whole numbers"),
    "one number, a billion times": (lambda m: _rows(m, shape=[1 << 30], strides=[0], offset=0), "its tensors claim"),
    "texts that are none": (lambda m: m.update(left_out=[1]), "is no list of texts"),
    "flags that are none": (lambda m: m["parts"]["call"]["facts"].update(training={"": "yes"}), "flags are none"),
    "an autocast of its own": (lambda m: m["parts"]["call"]["facts"].update(autocast={"cpu": "load"}), "autocast is"),
    "a default that is none": (lambda m: m["parts"]["call"]["facts"].update(default_dtype="x"), "'default_dtype' is"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_that_does_not_fit_is_a_clear_error(name: str, folder: pathlib.Path) -> None:
    change, told = MANIFESTS[name]
    _edit(folder, change)
    with pytest.raises(nanhunt.UsageError, match=told):
        capsule = nanhunt.load_capsule(folder)
        assert capsule.bad()


BUILDS: dict[str, tuple[Callable[[Any], object], str]] = {
    "a name to import": (lambda m: _build(m, "os.system"), "no module that is rebuilt from a capsule"),
    "a class of torch that is not listed": (lambda m: _build(m, "DataParallel"), "no module that is rebuilt"),
    "an attribute of torch.nn": (lambda m: _build(m, "Module"), "no module that is rebuilt"),
    "an argument that is none": (lambda m: _build(m, "Linear", in_features=8, out_features=4, code="x"), "takes no"),
    "another size": (lambda m: _build(m, "Linear", in_features=9, out_features=4), r"weight is \[4, 9\] in the model"),
    "a giant": (lambda m: _build(m, "Linear", in_features=1 << 39, out_features=1 << 39), "cannot be built"),
    "a million layers": (
        lambda m: _build(m, "LSTM", input_size=8, hidden_size=4, num_layers=1 << 20),
        "is not rebuilt",
    ),
    "a result of a terabyte": (lambda m: _build(m, "ConstantPad1d", padding=1 << 36, value=0.0), "more than 50 MB"),
}


@pytest.mark.parametrize("name", BUILDS)
def test_a_module_that_is_not_on_the_list_or_too_large_is_not_built(name: str, folder: pathlib.Path) -> None:
    change, told = BUILDS[name]
    _edit(folder, change)
    _edit(folder, lambda m: m["parts"].pop("op"))
    capsule = nanhunt.load_capsule(folder, max_mb=50)
    with pytest.raises(nanhunt.UsageError, match=told):
        capsule.replay()


def test_parameters_of_several_dtypes_are_refused() -> None:
    """The fast path of an encoder layer reads a bias of bfloat16 as if it were float32, and ends the process."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    state, spec = dict(layer.named_parameters()), rebuild.described(layer)
    assert rebuild.built(spec, state) is not None
    state["self_attn.in_proj_bias"] = nn.Parameter(state["self_attn.in_proj_bias"].to(torch.bfloat16))
    for inside in (False, True):
        around = nn.Sequential(layer)
        spec = rebuild.described(around) if inside else spec
        named = {f"0.{name}": t for name, t in state.items()} if inside else state
        with pytest.raises(nanhunt.UsageError, match="a MultiheadAttention are of several dtypes"):
            rebuild.built(spec, named)
    with pytest.raises(nanhunt.UsageError, match="of several dtypes"):  # nor are they put into a model of the user's
        rebuild.fit(layer, state)
    mixed = nn.Sequential(nn.Linear(2, 2).half(), nn.LayerNorm(2))  # each module has one
    assert rebuild.built(rebuild.described(mixed), dict(mixed.named_parameters())) is not None


@pytest.mark.parametrize(
    "op",
    [
        "aten.from_file.default", "aten.set_.source_Storage", "aten.as_strided.default", "aten.resize_.default",
        "aten.full.default", "aten.index_put_.default", "aten.embedding_dense_backward.default", "prims.div.default",
        "aten.div.__class__", "aten.__class__.x", "aten.add.out", "nanhunt", "os.system.x", "aten.exp.nothing", "a.b",
    ],
)  # fmt: skip
def test_an_op_that_is_not_on_the_list_is_not_run(op: str, folder: pathlib.Path) -> None:
    _edit(folder, lambda m: m["parts"]["op"]["facts"].update(name=op))
    _edit(folder, lambda m: m["parts"].pop("call"))
    with pytest.raises(nanhunt.UsageError, match=r"not among the operations|has no operation|does not run"):
        nanhunt.load_capsule(folder).replay()


OPERANDS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "more channels than weights": (
        "native_batch_norm.default",
        (torch.ones(2, 64), torch.ones(1), None, None, None, True, 0.1, 1e-5),
    ),
    "a norm without statistics": (
        "_native_batch_norm_legit.no_stats",
        (torch.ones(2, 3), None, None, False, 0.1, 1e-5),
    ),
    "a gradient of another shape": (
        "_log_softmax_backward_data.default",
        (torch.ones(4, 400), torch.ones(4, 2), 1, torch.float32),
    ),
    "fewer values than keys": (
        "_scaled_dot_product_flash_attention_for_cpu.default",
        (torch.ones(1, 1, 9, 4), torch.ones(1, 1, 9, 4), torch.ones(1, 1, 1, 4)),
    ),
    "a number as dtype": ("softmax.int", (torch.ones(4), 0, -1)),
    "a mask of fewer batches": (
        "_scaled_dot_product_flash_attention_for_cpu.default",
        (*[torch.ones(4, 1, 9, 4)] * 3, 0.0, False, {"attn_mask": torch.ones(2, 1, 9, 9)}),
    ),
}


@pytest.mark.parametrize("name", OPERANDS)
def test_operands_that_a_kernel_would_take_on_trust_are_refused(name: str) -> None:
    """It would read memory that is not theirs, or end the process."""
    op, args = OPERANDS[name]
    kwargs = args[-1] if isinstance(args[-1], dict) else {}
    with pytest.raises(nanhunt.UsageError, match=r"do not fit together|takes a dtype as dtype"):
        running.op_gives(op_list.op_of(f"aten.{op}"), args[: len(args) - bool(kwargs)], kwargs)


def test_operands_that_fit_run() -> None:
    """The test above would pass on a check that refuses everything."""
    x, one, zero, q = torch.randn(5, 3), torch.ones(3), torch.zeros(3), torch.randn(2, 3, 4, 8)
    for op, args, kwargs in (
        ("native_batch_norm.default", (x, one, zero, zero, one, True, 0.1, 1e-5), {}),
        ("native_batch_norm.default", (x, None, None, zero, one, False, 0.1, 1e-5), {}),
        ("_native_batch_norm_legit.no_stats", (x, one, zero, True, 0.1, 1e-5), {}),
        ("_log_softmax_backward_data.default", (x, x, 1, torch.float32), {}),
        ("_scaled_dot_product_flash_attention_for_cpu.default", (q, q, q), {"attn_mask": torch.zeros(1, 1, 4, 4)}),
        ("softmax.int", (x, 0, torch.float64), {}),
    ):
        assert running.op_gives(op_list.op_of(f"aten.{op}"), args, kwargs) is not None


def test_an_op_on_numbers_alone_is_not_run() -> None:
    """One of them divides by zero, which ends the process."""
    with pytest.raises(nanhunt.UsageError, match="works on no tensor"):
        op_list.op_of("aten.remainder.int")


def test_every_op_of_the_list_is_one_of_torch() -> None:
    """A misspelt name would be one that is never run."""
    known = [name for name in op_list._OPS if hasattr(torch.ops.aten, name) or hasattr(torch.ops.aten, name + "_")]
    assert len(known) > 0.97 * len(op_list._OPS), op_list._OPS - set(known)


@pytest.mark.parametrize("path", ["a." * 1_000_000 + "a", "..", "a..b", "forward", "a.training"])
def test_a_path_that_no_module_has_builds_no_tree(path: str, folder: pathlib.Path) -> None:
    finding = json.loads((folder / "finding.json").read_text())
    (folder / "finding.json").write_text(json.dumps(finding | {"module": path}))
    _edit(folder, lambda m: m["parts"].pop("op"))
    with pytest.raises(nanhunt.UsageError, match="is the path of no module"):
        nanhunt.load_capsule(folder).replay()


def test_parameters_that_are_no_tensors_are_refused(folder: pathlib.Path) -> None:
    for value in (None, 0, "x", {"tuple": []}, {"dtype": "float16"}):
        _edit(folder, lambda m, value=value: m["parts"]["call"]["trees"]["state"]["dict"].append(["0", value]))
        with pytest.raises(nanhunt.UsageError, match="its parameters are none"):
            nanhunt.load_capsule(folder).bad()


def test_a_value_of_a_strangers_file_is_plain(folder: pathlib.Path) -> None:
    """Names of fields are no code, and words that no value has are refused."""
    for tree in (
        {"call": 1},
        {"object": "os.system"},
        {"named": [["x=1)#", 1]]},
        {"tensor": 10**9},
        {"tensor": -1},
        {},
    ):
        _edit(folder, lambda m, tree=tree: m["parts"]["call"]["trees"].update(call=tree))
        with pytest.raises(nanhunt.UsageError, match="this capsule is damaged"):
            nanhunt.load_capsule(folder).bad()


def test_what_would_move_the_cursor_is_shown_instead(folder: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    _edit(folder, lambda m: m.update(missing=["\x1b[2Jgone\u202e"]))
    assert cli.main(["replay", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "\\x1b[2Jgone\\u202e" in said and "\x1b" not in said


# --- memory -----------------------------------------------------------------------------------------------------------

# VmHWM, and not ru_maxrss: that of a child begins at what its parent had, and shows nothing under a large one.
MEASURED = """
import sys
import nanhunt
from nanhunt import cli
from nanhunt.capsule import replaying, bisecting  # what a replay loads
import torch
torch.zeros(10)
most = lambda: int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) / 1024
for folder in sys.argv[2:]:
    before = most()
    code = cli.main(["replay", folder, "--max-mb", sys.argv[1]])
    print(f"{code} {most() - before:.0f}")
"""
needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads what Linux tells of memory")


def _measured(max_mb: float, *folders: pathlib.Path) -> list[tuple[int, int]]:
    """For each capsule the exit code, and by how many megabytes the process has grown at its highest."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEASURED, str(max_mb), *map(str, folders)]
    ran = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120, check=True)
    lines = [line.split() for line in ran.stdout.splitlines() if len(line.split()) == 2 and line[0].isdigit()]
    return [(int(code), int(grown)) for code, grown in lines]


@needs_proc
def test_no_capsule_takes_more_memory_than_the_cap(folder: pathlib.Path) -> None:
    """Beside some tens of MB for the libraries of a replay: a file over the cap is not read at all."""
    bombs: dict[str, Callable[[pathlib.Path], object]] = {
        "a large file": lambda f: os.truncate(f / "tensors.safetensors", 1 << 33),  # sparse: it costs no disk
        "one number, spread": lambda f: _edit(f, lambda m: _rows(m, shape=[1 << 33], strides=[0], offset=0)),
        "a wide result": lambda f: (
            _edit(f, lambda m: _build(m, "ConstantPad1d", padding=1 << 33, value=0.0)),
            _edit(f, lambda m: m["parts"].pop("op")),
        ),
        "brackets": lambda f: (f / "manifest.json").write_text("[" * (1 << 22)),
    }
    folders = []
    for name, bomb in bombs.items():
        folders.append(pathlib.Path(shutil.copytree(folder, folder.parent / name)))
        bomb(folders[-1])
    usual, *grown = _measured(100, folder, *folders)  # the healthy one first: it loads the libraries
    assert usual[0] == 0 and [code for code, _ in grown] == [2] * len(bombs)
    assert all(one < 100 for _, one in grown), grown


@needs_proc
def test_what_an_op_takes_for_its_own_work_is_bounded(tmp_path: pathlib.Path) -> None:
    """A convolution of float64 unfolds its input: 100 KB of a capsule become 7 GB, and no shape tells."""
    conv = nn.Conv2d(1, 1, 100, padding=50, dtype=torch.float64)
    nn.init.constant_(conv.weight, 1e5)
    x = torch.full((1, 1, 1, 1), 1e308, dtype=torch.float64)
    finding = nanhunt.hunt(conv, x, model=conv, capsule=tmp_path)
    assert finding is not None
    fine = pathlib.Path(finding.context["capsule"])
    bomb = pathlib.Path(shutil.copytree(fine, tmp_path / "bomb"))
    _edit(bomb, lambda m: m["parts"].pop("op"))
    wide = (bomb / "manifest.json").read_text().replace('["padding", {"tuple": [50, 50]}]', '["padding", 200]')
    (bomb / "manifest.json").write_text(wide)
    usual, grown = _measured(100, fine, bomb)
    assert '"padding", 200' in wide and usual[0] == 0 and grown[0] == 2 and grown[1] < 400, grown


def test_torch_load_would_take_what_this_format_does_not(tmp_path: pathlib.Path) -> None:
    """Why the tensors are not in a .pt file: with weights_only=True a few hundred bytes fill as much as they like."""
    code = b"\x80\x02cbuiltins\nbytearray\n\x8a\x04" + (50_000_000).to_bytes(4, "little") + b"\x85R."
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w") as made:
        for name, data in (("data.pkl", code), ("version", b"3"), ("byteorder", b"little")):
            made.writestr(f"a/{name}", data)
    assert (tmp_path / "bomb.pt").stat().st_size < 400
    assert len(torch.load(tmp_path / "bomb.pt", weights_only=True)) == 50_000_000


def test_a_rehearsal_refuses_what_is_too_large_before_it_is_there() -> None:
    ones = rehearsal.shadow(torch.ones(1 << 20))
    rehearsal.rehearse(lambda: ones + 1, most=1 << 23)
    for run in (lambda: ones.repeat(100), lambda: torch.cat([ones, ones + 1, ones + 1])):
        with pytest.raises(nanhunt.UsageError, match="would take more than 8 MB: see --max-mb"):
            rehearsal.rehearse(run, most=1 << 23)


def test_reading_gives_what_was_written(tmp_path: pathlib.Path) -> None:
    """The tests above would pass on a reader that refuses everything."""
    blocks: dict[str, Tensor] = {
        "a": torch.randn(3, 4),
        "b": torch.tensor(7, dtype=torch.uint8),
        "c": torch.empty(0, 5, dtype=torch.float64),
        "d": torch.randn(7).to(torch.bfloat16),
    }
    safe_tensors.write(tmp_path / "t", blocks)
    back = safe_tensors.read(tmp_path / "t", most=1 << 20)
    assert back.keys() == blocks.keys()
    assert all(
        torch.equal(back[n].reshape(-1), blocks[n].reshape(-1)) and back[n].dtype is blocks[n].dtype for n in back
    )
    assert rebuild.TYPES
