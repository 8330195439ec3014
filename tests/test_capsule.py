"""A fault as a folder: what is in it, that it replays, what it costs, and that it is written whole or not at all."""

from __future__ import annotations

import gc
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanhunt
from nanhunt import batches, cli
from nanhunt.capsule import bisecting, catch, rebuild, safe_tensors
from nanhunt.capsule.cargo import Cargo, Room, packed
from nanhunt.capsule.unpacked import Missing, Unpacked

from .hunted import bits

ROOT = pathlib.Path(__file__).resolve().parents[1]


class Normalize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)


def encoder() -> nn.Module:
    """The model of a factory: `tests.test_capsule:encoder`."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8, bias=False), Normalize(), nn.Linear(8, 2))


def half() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Softplus()).half()
    model[0].weight.data.mul_(8)
    return model


def batch(size: int = 64, bad: int = 37) -> Tensor:
    x = torch.randn(size, 5, 8)
    x[bad, 3] = 0
    return x


def caught(model: nn.Module, x: Any, folder: pathlib.Path, **options: Any) -> nanhunt.Finding:
    """The finding of one step under `hunt`, which has written a capsule."""

    def step(x: Any) -> None:
        out = model(x)
        out.float().sum().backward()

    finding = nanhunt.hunt(step, x, model=model, capsule=folder, **options)
    assert finding is not None
    return finding


def opened(finding: nanhunt.Finding) -> nanhunt.Capsule:
    return nanhunt.load_capsule(finding.context["capsule"])


def python(*args: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False, **options)


# --- what is in it --------------------------------------------------------------------------------------------


def test_a_capsule_holds_the_finding_the_numbers_and_a_program(tmp_path: pathlib.Path) -> None:
    finding = caught(encoder(), batch(), tmp_path / "faults")
    folder = pathlib.Path(finding.context["capsule"])
    assert folder == tmp_path / "faults" / "step0.1"
    assert sorted(one.name for one in folder.iterdir()) == [
        "finding.json",
        "manifest.json",
        "repro.py",
        "tensors.safetensors",
    ]
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest["parts"]) == {"op", "call", "batch 0"}
    assert manifest["missing"] == manifest["left_out"] == []
    assert manifest["versions"]["torch"] == torch.__version__
    saved = nanhunt.Finding.from_json((folder / "finding.json").read_text())
    assert (saved.module, saved.op, saved.kind) == ("1", "aten.div.Tensor", "nan")


def test_the_safetensors_library_reads_the_numbers(tmp_path: pathlib.Path) -> None:
    """The format is the one of that library, and no dialect of it."""
    library = pytest.importorskip("safetensors.torch")
    finding = caught(encoder(), batch(), tmp_path)
    path = pathlib.Path(finding.context["capsule"]) / "tensors.safetensors"
    ours, theirs = safe_tensors.read(path, most=1 << 30), library.load_file(path)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_inputs_are_those_of_the_call_to_the_bit(tmp_path: pathlib.Path) -> None:
    model, x = encoder(), batch()
    wanted = model[0](x).detach()
    capsule = opened(caught(model, x, tmp_path))
    (given,) = capsule.args
    assert bits(given) == bits(wanted) and capsule.kwargs == {}


def test_the_batch_and_the_hashes_of_both_batches_are_kept(tmp_path: pathlib.Path) -> None:
    """When the weights were bad already, the batch before is suspect too."""
    model = encoder()
    with pytest.raises(nanhunt.NonFiniteError) as stop, nanhunt.watch(model, capsule=tmp_path) as hunt:
        for x in (torch.ones(2, 8), torch.full((2, 8), 2.0), torch.zeros(2, 8)):
            model(x).sum().backward()
    capsule = opened(stop.value.finding)
    assert [row["step"] for row in capsule.hashes] == [1, 2]
    assert capsule.hashes[1]["hash"] == stop.value.finding.context["batch_hash"] != capsule.hashes[0]["hash"]
    assert bits(capsule._opened.batches[-1].call()[0][0]) == bits(torch.zeros(2, 8))
    assert hunt.errors == []


def test_weights_are_written_once_however_often_they_are_named(tmp_path: pathlib.Path) -> None:
    """Tied weights, an operand that is the weight, a batch that is the input: one block each."""
    model = half()
    x = torch.randn(64, 8).half()
    x[11] = 6e4
    folder = pathlib.Path(caught(model, x, tmp_path).context["capsule"])
    blocks = safe_tensors.read(folder / "tensors.safetensors", most=1 << 30)
    whole = [t for t in blocks.values() if t.dtype is torch.float16 and t.numel() == x.numel()]
    assert len(whole) == 1


def test_tensors_that_shared_memory_share_it_again() -> None:
    base = torch.arange(12.0).view(3, 4)
    cargo = Cargo(Room(1 << 20))
    cargo.add("x", {"whole": base, "turned": base.t(), "row": base[1], "same": base})
    rows, blocks = packed({"c": cargo})
    back = Unpacked(rows["c"], blocks, most=1 << 20).value(cargo.trees["x"])
    assert back["whole"] is back["same"] and torch.equal(back["turned"], base.t())
    assert back["turned"].stride() == base.t().stride()
    back["whole"][1, 2] = -1
    assert back["row"][2] == -1 and back["turned"][2, 1] == -1
    assert sum(block.numel() for block in blocks.values()) == 12


def test_a_small_view_of_a_large_tensor_does_not_bring_it_along() -> None:
    large = torch.randn(1000, 1000)
    cargo = Cargo(Room(1 << 30))
    cargo.add("x", (large[5], large[:, 7], large.t()[:2]))
    assert cargo.size < 100_000


ODD: dict[str, Any] = {
    "nothing": (),
    "numbers": (1, -2.5, True, None, "text", float("nan"), float("inf"), 1 + 2j),
    "nested": {"a": [1, (2, {"b": torch.ones(2)})], 3: slice(1, None, 2)},
    "dtypes": (torch.float16, torch.channels_last, torch.strided),
    "complex": torch.tensor([1 + 2j]),
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "float8": torch.ones(3).to(torch.float8_e5m2),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(2.5),
    "expanded": torch.tensor([1.0]).expand(5),
    "conjugate": torch.tensor([1 + 2j]).conj(),
}


@pytest.mark.parametrize("name", ODD)
def test_any_value_of_a_call_comes_back(name: str) -> None:
    cargo = Cargo(Room(1 << 20))
    cargo.add("x", ODD[name])
    rows, blocks = packed({"c": cargo})
    tree = json.loads(json.dumps(cargo.trees["x"], allow_nan=False))
    back = Unpacked(rows["c"], blocks, most=1 << 20).value(tree)
    assert cargo.left_out == []
    if isinstance(ODD[name], Tensor):
        assert back.dtype is ODD[name].dtype and torch.equal(back, ODD[name].resolve_conj())
    else:
        assert str(back) == str(ODD[name])


class _Handle:
    """Something that no capsule carries."""


def test_what_cannot_be_carried_is_named_and_never_pickled() -> None:
    cargo = Cargo(Room(1 << 20))
    cargo.add("x", {"cache": _Handle(), "sparse": torch.eye(3).to_sparse(), "x": torch.ones(2)})
    assert not cargo.complete("x")
    assert cargo.left_out[0].startswith("x['cache']: a tests.test_capsule._Handle is not carried")
    assert cargo.left_out[1] == "x['sparse']: torch.sparse_coo tensors are not carried"
    rows, blocks = packed({"c": cargo})
    with pytest.raises(Missing, match=r"the capsule does not hold it: a tests\.test_capsule\._Handle"):
        Unpacked(rows["c"], blocks, most=1 << 20).value(cargo.trees["x"])


def test_a_capsule_stays_below_max_mb_and_says_what_it_left_out(tmp_path: pathlib.Path) -> None:
    model = nn.Sequential(nn.Linear(1000, 400, bias=False), Normalize())
    x = torch.zeros(100, 1000)
    some, few = (caught(model, x, tmp_path, max_mb=mb) for mb in (0.5, 0.1))
    for finding, most in ((some, 550_000), (few, 150_000)):
        assert sum(one.stat().st_size for one in pathlib.Path(finding.context["capsule"]).iterdir()) < most
    assert opened(some).missing == ["the batch: with it, the rest would not fit into max_mb"]
    assert cli.main(["replay", some.context["capsule"]]) == 0  # batches have made room for the op
    assert "op.args[0]: float32[100, 400], 0.2 MB, over max_mb (0.1 MB)" in opened(few).left_out
    assert cli.main(["replay", few.context["capsule"]]) == 2


# --- again ------------------------------------------------------------------------------------------------------


def test_a_module_of_torch_nn_is_rebuilt_and_fails_again(tmp_path: pathlib.Path) -> None:
    x = torch.randn(64, 8).half()
    x[11] = 6e4
    capsule = opened(caught(half(), x, tmp_path))
    module, op = capsule.replay()
    assert (module.how, op.how) == ("module", "op") and module.same and op.same
    assert module.finding is not None
    fields = [(f.phase, f.module, f.op, f.kind) for f in (module.finding, capsule.finding)]
    assert fields[0] == fields[1] == ("forward", "0", "aten.addmm.default", "+inf")
    assert isinstance(capsule.module(), nn.Linear) and capsule.bad() == ("+inf", "-inf")


def test_another_precision_shows_whether_it_disappears(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = torch.randn(4, 8).half()
    x[1] = 6e4
    folder = caught(half(), x, tmp_path).context["capsule"]
    assert cli.main(["replay", folder]) == 0
    assert cli.main(["replay", folder, "--dtype", "float32"]) == 3
    said = capsys.readouterr().out
    assert "in float32: nothing bad (recorded: +inf)" in said and said.endswith("not reproduced\n")


def test_a_class_of_the_programs_own_needs_its_factory(tmp_path: pathlib.Path) -> None:
    capsule = opened(caught(encoder(), batch(), tmp_path))
    with pytest.raises(nanhunt.UsageError, match=r"Normalize is no module of torch.nn.*give the model that has it"):
        capsule.module()
    with_model = capsule.replay(encoder())
    assert [one.how for one in with_model] == ["module", "op"] and all(one.same for one in with_model)
    with pytest.raises(nanhunt.UsageError, match="the model has no module '1'"):
        capsule.run(nn.Linear(2, 2))


def test_a_mended_model_passes_its_test(tmp_path: pathlib.Path) -> None:
    """The recipe: the same inputs, once with the fault and once without."""

    class Mended(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / (x.norm(dim=-1, keepdim=True) + 1e-6)

    model = encoder()
    capsule = opened(caught(model, batch(), tmp_path))
    assert capsule.bad(model) == ("nan",)
    model[1] = Mended()
    assert capsule.bad(model) == ()


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().sum(-1).sqrt()


def roots() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4, bias=False), Root())


def test_a_fault_of_backward_replays_with_the_gradient_that_came_back(tmp_path: pathlib.Path) -> None:
    x = torch.randn(6, 4)
    x[2] = 0
    finding = caught(roots(), x, tmp_path)
    assert (finding.phase, finding.module, finding.op) == ("backward", "1", "aten.sqrt.default")
    capsule = opened(finding)
    assert capsule.missing == []
    for attempt in capsule.replay(roots()):
        assert attempt.same
    assert capsule.bad(roots()) == ("nan",)


def test_in_a_watch_a_fault_of_backward_says_what_is_missing(tmp_path: pathlib.Path) -> None:
    """Its inputs are gone by then, and no activation is kept alive for it; hunt gives them."""
    model = roots()
    with pytest.raises(nanhunt.NonFiniteError) as stop, nanhunt.watch(model, capsule=tmp_path, ring=1):
        model(torch.zeros(6, 4)).sum().backward()
    capsule = opened(stop.value.finding)
    assert any("the inputs of 1: they were gone when its backward ran; nanhunt.hunt" in one for one in capsule.missing)
    with pytest.raises(nanhunt.UsageError, match="cannot be run again"):
        capsule.replay(model)


def test_what_was_taken_after_the_call_is_said(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A batch norm has moved its buffers by then, and a dropout the random numbers; hunt takes both before."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
    model[0].weight.data.fill_(3e38)
    x = torch.randn(6, 3) * 9
    with nanhunt.watch(model, capsule=tmp_path, on_hit="record") as hunt, torch.no_grad():
        model(x)
    assert hunt.finding is not None
    late = "its buffers and the random numbers as they were before it ran: they were taken after it; nanhunt.hunt"
    assert any(late in one for one in opened(hunt.finding).missing)
    cli.main(["replay", hunt.finding.context["capsule"]])
    assert f"not in the capsule: {late}" in capsys.readouterr().out
    assert opened(caught(model, x, tmp_path)).missing == []
    with nanhunt.watch(model.eval(), capsule=tmp_path, on_hit="record") as hunt, torch.no_grad():
        model(x * 1e3)  # a batch norm that only reads its buffers
    assert hunt.finding is not None and opened(hunt.finding).missing == []


def test_inputs_that_the_module_wrote_to_are_named_and_hunt_takes_them_before(tmp_path: pathlib.Path) -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.mul_(2)
            return x / (x - x)

    model = nn.Sequential(InPlace())
    x = torch.ones(2, 3)
    with pytest.raises(nanhunt.NonFiniteError) as stop, nanhunt.watch(model, capsule=tmp_path):
        model(x.clone())
    assert any("as they were before it ran: it has written to" in one for one in opened(stop.value.finding).missing)
    finding = nanhunt.hunt(model, x.clone(), model=model, capsule=tmp_path)
    assert finding is not None
    capsule = opened(finding)
    assert capsule.missing == [] and bits(capsule.args[0]) == bits(x)


def test_random_numbers_are_drawn_as_they_were(tmp_path: pathlib.Path) -> None:
    class Drawn(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / (torch.rand(x.shape) > 0.5)

    model = nn.Sequential(Drawn())
    finding = nanhunt.hunt(model, torch.ones(50), model=model, capsule=tmp_path)
    assert finding is not None
    capsule = opened(finding)
    before = torch.get_rng_state()
    once, twice = capsule.run(model), capsule.run(model)
    assert bits(once) == bits(twice) and bits(before) == bits(torch.get_rng_state())
    count = next(row for row in finding.tensors if row.role == "output").pos_inf
    assert int(once.isinf().sum()) == count


def test_repro_runs_with_torch_alone_where_nanhunt_is_not_installed(tmp_path: pathlib.Path) -> None:
    """The op on its operands, and the module of torch.nn on its inputs: no import but torch."""
    x = torch.randn(4, 8).half()
    x[1] = 6e4
    folder = pathlib.Path(caught(half(), x, tmp_path).context["capsule"])
    block = "import sys; sys.modules['nanhunt'] = sys.modules['safetensors'] = None; "
    ran = python("-c", block + f"import runpy; runpy.run_path({str(folder / 'repro.py')!r}, run_name='__main__')")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("+inf (recorded: +inf)") + ran.stdout.count("+inf, -inf (recorded: +inf)") == 2


# --- the fewest samples -----------------------------------------------------------------------------------------


def test_bisect_names_the_one_bad_sample_of_64(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = caught(encoder(), batch(64, bad=37), tmp_path).context["capsule"]
    for model in (["--model", "tests.test_capsule:encoder"], []):
        assert cli.main(["replay", folder, "--bisect", *model]) == 0
        said = capsys.readouterr().out
        assert "still fails with sample 37 of 64" in said and "of dimension 1 it needs 3" in said


def test_samples_that_a_batch_norm_mixes_are_cut_to_those_that_fail_together(tmp_path: pathlib.Path) -> None:
    """A batch norm in training takes no single sample, so two are the fewest."""
    norm = nn.BatchNorm1d(3)
    nn.init.constant_(norm.weight, 3e38)
    x = torch.zeros(16, 3)
    x[5] = 1

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x)  # type: ignore[no-any-return]

    finding = nanhunt.hunt(model := Model(), x, model=model, capsule=tmp_path)
    assert finding is not None and finding.module == "norm"
    smallest = bisecting.bisect(opened(finding))
    assert smallest.of == 16 and len(smallest.samples) == 2


def test_bisect_names_the_sample_of_a_batch_that_came_bad(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No module is run for it; what cannot be taken apart is said, and the exit code is that of the replay."""
    x = {"ids": torch.randint(0, 9, (64, 5)), "scores": torch.randn(64, 5)}
    x["scores"][31, 2] = float("nan")

    class Net(nn.Module):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return batch["scores"] + batch["ids"]

    finding = nanhunt.hunt(model := Net(), x, model=model, capsule=tmp_path)
    assert finding is not None and finding.phase == "input"
    assert cli.main(["replay", "--bisect", finding.context["capsule"]]) == 0
    assert "still fails with sample 31 of 64" in capsys.readouterr().out


def test_the_hint_names_no_half_written_capsule(tmp_path: pathlib.Path) -> None:
    """A process that was killed leaves a hidden draft."""
    caught(encoder(), batch(), tmp_path)
    (tmp_path / ".step1.0.123.abc.tmp").mkdir()
    (tmp_path / ".step1.0.123.abc.tmp" / "manifest.json").write_text("{}")
    with pytest.raises(nanhunt.UsageError, match=r"inside it there is step0\.1$"):
        nanhunt.load_capsule(tmp_path)


def test_samples_that_fail_only_together_are_found() -> None:
    runs = []

    def fails(some: Any) -> bool:
        runs.append(some)
        return {5, 41, 63} <= set(some)

    assert sorted(bisecting.fewest(range(64), fails)) == [5, 41, 63]
    assert len(runs) < 200


def test_slim_keeps_the_failing_rows_alone_and_still_fails(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024)).half()
    model[0].weight.data.mul_(8)
    x = torch.randn(64, 512).half()
    x[11] = 6e4
    whole, slim = (caught(model, x, tmp_path, slim=slim).context["capsule"] for slim in (False, True))
    sizes = [(pathlib.Path(one) / "tensors.safetensors").stat().st_size for one in (whole, slim)]
    assert sizes[1] < sizes[0] / 50
    capsule = nanhunt.load_capsule(slim)
    assert capsule.args[0].shape == (1, 512) and capsule.module().weight.shape[0] <= 4
    assert all(one.same for one in capsule.replay())
    assert python(pathlib.Path(slim) / "repro.py").returncode == 0


def test_slim_is_unseen_by_the_watches_that_run(tmp_path: pathlib.Path) -> None:
    """Under the launcher, which watches whatever is called, the runs that cut a capsule down are nobody's calls."""
    program = "import torch; from tests.test_capsule import half; half()(torch.full((9, 8), 6e4).half())"
    ran = python("-m", "nanhunt", "--slim", "--capsule", tmp_path, "--stop", "first", "-c", program, cwd=ROOT)
    assert ran.returncode == 1 and "watched 1 model (Sequential), 1 call" in ran.stderr, ran.stderr
    (folder,) = tmp_path.iterdir()
    capsule = nanhunt.load_capsule(folder)
    assert capsule.args[0].shape == (1, 8) and capsule.replay()[0].same


# --- modules of torch.nn ------------------------------------------------------------------------------------------

MADE: dict[str, tuple[Any, ...]] = {
    "Linear": (3, 4), "Bilinear": (2, 3, 4), "Embedding": (5, 3, 0), "LayerNorm": ((3, 4),), "RMSNorm": ((3,),),
    "GroupNorm": (2, 4), "LocalResponseNorm": (2,), "Threshold": (0.1, 20.0), "RNN": (3, 4, 2), "LSTM": (3, 4, 2),
    "GRU": (3, 4), "RNNCell": (3, 4), "LSTMCell": (3, 4), "GRUCell": (3, 4), "MultiheadAttention": (4, 2),
    "TransformerEncoderLayer": (4, 2), "TransformerDecoderLayer": (4, 2), "Unflatten": (1, (2, 3)),
    "SyncBatchNorm": (3,), "PixelShuffle": (2,), "PixelUnshuffle": (2,), "Upsample": (4,),
}  # fmt: skip


def _arguments(name: str) -> tuple[Any, ...]:
    if name in MADE:
        return MADE[name]
    if name.startswith("Conv"):
        return (2, 3, 3)
    if name.startswith("ConstantPad"):
        return (1, 2.0)
    if name.startswith("LPPool"):
        return (2, 2)
    if name.startswith(("BatchNorm", "InstanceNorm")):
        return (3,)
    return (2,) if "Pool" in name else (1,) if "Pad" in name else ()


@pytest.mark.parametrize("name", sorted(rebuild.TYPES))
def test_every_type_of_the_list_is_rebuilt_from_its_configuration(name: str) -> None:
    module = getattr(nn, name)(*_arguments(name))
    spec = rebuild.described(module)
    assert spec is not None
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    again = rebuild.built(json.loads(json.dumps(spec)), state)
    assert repr(again) == repr(module) or name in ("LayerNorm", "RMSNorm", "Unflatten")
    assert bits(again.state_dict()) == bits(module.state_dict())


def test_what_is_not_itself_any_more_is_not_rebuilt() -> None:
    """A hook, a forward of its own, a parametrization, a child that was exchanged, a subclass."""
    hooked, own, normed, exchanged = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2), nn.TransformerEncoderLayer(4, 2)
    hooked.register_forward_hook(lambda m, a, o: o * 2)
    own.forward = lambda x: x  # type: ignore[method-assign]
    torch.nn.utils.parametrizations.weight_norm(normed)
    exchanged.linear1 = encoder()[0]
    for module in (hooked, own, normed, exchanged, Normalize(), nn.Sequential(Normalize())):
        assert rebuild.described(module) is None


# --- what it costs, and what it must not do -------------------------------------------------------------------------


def _steps(model: nn.Module, **options: Any) -> tuple[Any, int]:
    """All that a few healthy steps leave, and how many tensors stay alive."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    with nanhunt.watch(model, optimizer, **options) as hunt:
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        gc.collect()
        alive = sum(issubclass(type(one), Tensor) for one in gc.get_objects())
    assert hunt.errors == []
    return (bits(losses), bits(model.state_dict()), bits(optimizer.state_dict()), bits(torch.get_rng_state())), alive


@pytest.mark.parametrize("detail", ["module", "auto", "op"])
def test_healthy_steps_are_the_same_to_the_bit_and_keep_nothing_alive(detail: str, tmp_path: pathlib.Path) -> None:
    _steps(encoder(), detail=detail)  # what the first step of a process leaves is nobody's fault
    plain, few = _steps(encoder(), detail=detail)
    ready, alive = _steps(encoder(), detail=detail, capsule=tmp_path)
    ringed, _ = _steps(encoder(), detail=detail, capsule=tmp_path, ring=2)
    assert plain == ready == ringed
    assert alive <= few + 1  # 64 numbers of the batch before, whose hash a capsule holds
    assert list(tmp_path.iterdir()) == []


def test_a_healthy_step_runs_no_op_more(tmp_path: pathlib.Path) -> None:
    """Nor does it read the device more often; a ring copies its batch, and that is told apart here."""

    def ops(**options: Any) -> list[str]:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        model = nn.Sequential(layer, nn.BatchNorm1d(5), nn.Dropout())
        optimizer = torch.optim.AdamW(model.parameters())
        with nanhunt.watch(model, optimizer, **options):
            for _ in range(3):
                optimizer.zero_grad()
                with torch.autograd.profiler.profile() as seen:  # a dispatch mode does not see what hooks run
                    model(torch.randn(4, 5, 8)).square().mean().backward()
                    optimizer.step()
        return sorted(event.name for event in seen.function_events if event.name.startswith("aten::"))

    plain = ops()
    assert len(plain) > 100 and ops(capsule=tmp_path) == plain
    assert len(ops(capsule=tmp_path, ring=1)) > len(plain)


def test_suspects_are_bounded_and_dropped_when_they_were_harmless(tmp_path: pathlib.Path) -> None:
    """A where-guarded division is born bad in every call: at most a few copies are held, and none after the step."""

    class Guarded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList(Normalize() for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            for one in self.inner:
                y = one(x)
                x = torch.where(y.isnan(), torch.zeros_like(y), y)
            return x

    model = Guarded()
    with nanhunt.watch(model, capsule=tmp_path, on_hit="record") as hunt, torch.no_grad():
        for _ in range(5):
            model(torch.zeros(2, 3))
            held = hunt._filing.catch
            assert held is not None and len(held._suspects) <= catch.SUSPECTS
    assert hunt.finding is None and hunt.findings and list(tmp_path.iterdir()) == []
    hunt.findings.clear()
    gc.collect()
    assert held.room.left == held.room.most


def test_only_the_first_places_are_written_and_no_folder_is_written_over(tmp_path: pathlib.Path) -> None:
    model = encoder()
    with nanhunt.watch(model, capsule=tmp_path, on_hit="record") as hunt:
        for _ in range(5):
            model(torch.zeros(2, 8)).sum().backward()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step0.1"]
    with nanhunt.watch(model, capsule=tmp_path, on_hit="record"):
        model(torch.zeros(2, 8))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step0.1", "step0.1-2"]
    assert "capsule" in hunt.findings[0].context and "capsule" not in hunt.findings[1].context


def test_after_the_last_capsule_nothing_is_copied_any_more(tmp_path: pathlib.Path) -> None:
    """Faults in ten places, a hundred times: three capsules, and then no step pays for a copy, not even of a ring."""

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList(Normalize() for _ in range(10))

        def forward(self, x: Tensor, at: int) -> Tensor:
            return self.inner[at](x)  # type: ignore[no-any-return]

    model = Many()
    with nanhunt.watch(model, capsule=tmp_path, on_hit="record", ring=2) as hunt, torch.no_grad():
        held = hunt._filing.catch
        assert held is not None
        model(torch.zeros(2, 3), 0)
        assert held.room.left < held.room.most  # the ring
        for step in range(100):
            model(torch.zeros(2, 3), step % 10)
        hunt.findings.clear()
        gc.collect()
        assert held.closed and held.room.left == held.room.most
    assert len(list(tmp_path.iterdir())) == 3


def test_a_fault_that_stays_is_copied_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same module fails in every step: there is a capsule of it, and later steps take nothing for another."""
    taken: list[Any] = []
    take = catch._take_module
    monkeypatch.setattr(catch, "_take_module", lambda part, module: (taken.append(module), take(part, module)))
    model = nn.Sequential(Normalize())
    with nanhunt.watch(model, capsule=tmp_path, on_hit="record"), torch.no_grad():
        for _ in range(5):
            model(torch.zeros(2, 3))
    assert len(taken) == 1


def test_a_folder_takes_a_hundred_capsules(tmp_path: pathlib.Path) -> None:
    for number in range(100):
        (tmp_path / str(number)).mkdir()
    with pytest.warns(nanhunt.NonFiniteWarning, match="it holds 100 capsules already"):
        finding = caught(encoder(), batch(), tmp_path)
    assert finding.context["capsule"] == "not written: it holds 100 capsules already"
    assert len(list(tmp_path.iterdir())) == 100


@pytest.mark.parametrize("how", ["a file stands there", "the disk is full"])
def test_a_capsule_that_cannot_be_written_is_a_warning_and_the_finding_stands(
    how: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "faults"
    if how == "the disk is full":

        def full(*args: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(safe_tensors, "write", full)
    model = encoder()
    with (
        pytest.warns(nanhunt.NonFiniteWarning, match="could not write a capsule into"),
        pytest.raises(nanhunt.NonFiniteError) as stop,
        nanhunt.watch(model, capsule=folder) as hunt,
    ):
        if how == "a file stands there":
            folder.write_text("x")
        model(torch.zeros(2, 8))
    assert stop.value.finding.context["capsule"].startswith("not written: ")
    assert hunt.errors == [] and (how != "the disk is full" or list(folder.iterdir()) == [])


LIMITED = """
import resource, signal, sys, torch, nanhunt
from tests.test_capsule import encoder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))  # the system itself refuses to write more
model = encoder()
with nanhunt.watch(model, capsule=sys.argv[1], on_hit="record") as hunt:
    model(torch.zeros(64, 8)).sum().backward()
print(hunt.errors, hunt.finding.context["capsule"])
"""


def test_where_the_system_takes_no_more_bytes_nothing_is_left_and_the_step_runs_on(tmp_path: pathlib.Path) -> None:
    ran = python("-c", LIMITED, tmp_path / "faults", cwd=ROOT)
    assert ran.returncode == 0 and ran.stdout.startswith("[] not written: File too large"), ran.stderr
    assert "could not write a capsule into" in ran.stderr and list((tmp_path / "faults").iterdir()) == []


def _rank(rank: int, folder: str) -> None:
    store = torch.distributed.FileStore(f"{folder}/store", 2)  # type: ignore[no-untyped-call]
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(encoder())
    with nanhunt.watch(model, capsule=f"{folder}/faults", on_hit="record"):
        model(torch.zeros(2, 8) if rank else torch.ones(2, 8)).sum().backward()
        model(torch.zeros(2, 8)).sum().backward()
    torch.distributed.destroy_process_group()


def test_ranks_that_fail_write_side_by_side(tmp_path: pathlib.Path) -> None:
    context = torch.multiprocessing.get_context("spawn")
    workers = [context.Process(target=_rank, args=(rank, str(tmp_path))) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(180)
    assert [worker.exitcode for worker in workers] == [0, 0]
    names = sorted(one.name for one in (tmp_path / "faults").iterdir())
    assert {name.split(".")[1] for name in names} == {"rank0", "rank1"} and not any(n.startswith(".") for n in names)
    for name in names:
        assert nanhunt.load_capsule(tmp_path / "faults" / name).finding.rank == int(name.split(".")[1][-1])


def test_warnings_as_errors_do_not_let_it_out(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_tensors, "write", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left")))
    with warnings.catch_warnings(), nanhunt.watch(encoder(), capsule=tmp_path, on_hit="record") as hunt:
        warnings.simplefilter("error")
        assert hunt.model is not None
        hunt.model(torch.zeros(2, 8))
    assert hunt.errors == [] and hunt.finding is not None and "not written" in hunt.finding.context["capsule"]


WRITER = """
import sys, torch, nanhunt
from torch import nn
from nanhunt.capsule import safe_tensors
class Half(nn.Module):
    def forward(self, x): return x / 0
write = safe_tensors.write
def slow(path, blocks):
    write(path, blocks)
    print("written", flush=True)
    import time; time.sleep(60)
if sys.argv[2] == "killed":
    safe_tensors.write = slow
with nanhunt.watch(Half(), capsule=sys.argv[1], on_hit="record") as hunt:
    hunt.model(torch.ones(3)) if hunt.model is not None else None
"""


def test_a_process_that_is_killed_while_it_writes_leaves_nothing_that_opens(tmp_path: pathlib.Path) -> None:
    """The draft has another name, and its manifest, without which no folder opens, is written last."""
    script = tmp_path / "writer.py"
    script.write_text(
        WRITER.replace("nanhunt.watch(Half()", "nanhunt.watch(half").replace("with ", "half = Half()\nwith ")
    )
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(tmp_path / "faults"), "killed"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)
    left = list((tmp_path / "faults").iterdir())
    assert [one.name.startswith(".") for one in left] == [True]
    with pytest.raises(nanhunt.UsageError, match=r"holds no manifest.json"):
        nanhunt.load_capsule(left[0])


def test_two_processes_that_write_at_once_do_not_meet(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "writer.py"
    script.write_text(
        WRITER.replace("nanhunt.watch(Half()", "nanhunt.watch(half").replace("with ", "half = Half()\nwith ")
    )
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(tmp_path / "faults"), "whole"]
    running = [subprocess.Popen(command, env=env) for _ in range(2)]
    assert [process.wait(120) for process in running] == [0, 0]
    names = sorted(one.name for one in (tmp_path / "faults").iterdir())
    assert names == ["step0.forward", "step0.forward-2"]
    for name in names:
        assert nanhunt.load_capsule(tmp_path / "faults" / name).finding.kind == "+inf"


def test_ranks_write_under_their_own_names() -> None:
    from nanhunt.capsule.writing import _name

    assert _name(nanhunt.Finding(phase="backward", step=12, rank=3, module="a.b")) == "step12.rank3.a.b"
    assert _name(nanhunt.Finding(phase="optimizer", step=1)) == "step1.optimizer"
    assert _name(nanhunt.Finding(phase="forward", step=1, module="../../etc/x y")) == "step1..._.._etc_x_y"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"capsule": ""}, "name a folder"),
        ({"capsule": 3}, "name a folder"),
        ({"capsule": __file__}, "is a file: name a folder"),
        ({"capsule": "x", "max_mb": 0}, "give a number of megabytes, such as 256"),
        ({"capsule": "x", "max_mb": "1"}, "give a number of megabytes, such as 256"),
        ({"capsule": "x", "ring": -1}, "give a number of batches from 0 to 64"),
        ({"capsule": "x", "slim": 1}, "give True for the failing rows alone, or False"),
    ],
)
def test_bad_options_say_what_to_do(options: dict[str, Any], told: str) -> None:
    with pytest.raises(nanhunt.UsageError, match=told):
        nanhunt.watch(encoder(), **options)


def test_the_launcher_writes_capsules(tmp_path: pathlib.Path) -> None:
    program = "import torch; from tests.test_capsule import encoder; encoder()(torch.zeros(2, 8))"
    ran = python("-m", "nanhunt", "--capsule", tmp_path / "faults", "--ring", 1, "-c", program, cwd=ROOT)
    assert ran.returncode == 1 and "faults/step0.1" in ran.stderr
    (folder,) = (tmp_path / "faults").iterdir()
    assert python("-m", "nanhunt", "replay", folder).returncode == 0


NAMES = ('q"""\nraise SystemExit(9)\n"""', "esc\x1b[2J\\", "lone\ud800", "{nul\0}")
RUN_ALL = """
import runpy, sys
for program in sys.argv[1:]:
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        print("code", end.code)
"""


def test_a_name_of_any_characters_is_a_name_in_the_program(tmp_path: pathlib.Path) -> None:
    """It ends no text of repro.py, runs nothing, and moves no cursor."""

    class Named(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self._modules[name] = nn.Linear(2, 2)
            nn.init.constant_(self._modules[name].weight, 3e38)  # type: ignore[union-attr, arg-type]

        def forward(self, x: Tensor) -> Tensor:
            (inner,) = self._modules.values()
            return inner(x)  # type: ignore[misc, no-any-return]

    x = torch.full((1, 2), 9.0)
    programs = [caught(Named(name), x, tmp_path).context["capsule"] + "/repro.py" for name in NAMES]
    ran = python("-c", RUN_ALL, *programs)
    assert ran.stdout.count("code 0") == len(NAMES) and ran.stdout.count("recorded: +inf") == 2 * len(NAMES), ran
    assert "\x1b" not in ran.stdout


# --- the hash of a batch --------------------------------------------------------------------------------------------


def _hash(*args: Any, **kwargs: Any) -> str | None:
    return batches.digest(batches.pick(args, kwargs))


def test_the_hash_is_that_of_the_numbers() -> None:
    """Not of the integer dtype, the memory layout, the order of keys, the sign of a zero or the bits of a NaN."""
    ids, image = torch.randint(0, 50, (4, 100)), torch.randn(2, 3, 17, 17)
    told = _hash({"ids": ids, "image": image})
    assert told == _hash({"image": image, "ids": ids.to(torch.int32)})
    assert told == _hash({"ids": ids.to(torch.uint8), "image": image.to(memory_format=torch.channels_last)})
    assert told == _hash({"ids": ids.t().contiguous().t(), "image": image.clone()})
    assert _hash(torch.tensor([0.0, float("nan")])) == _hash(torch.tensor([-0.0, -float("nan")]))
    assert told != _hash({"ids": ids + 1, "image": image}) and told != _hash({"ids": ids.t(), "image": image})
    assert _hash(labels=ids, x=image) == _hash(x=image, labels=ids) and _hash() is None


def test_the_hash_is_the_same_in_another_process() -> None:
    code = "import torch; from nanhunt import batches as b; "
    code += "x = {'b': torch.arange(300).view(3, 100), 'a': torch.linspace(0, 1, 7)}; print(b.digest(b.pick((x,), {})))"
    told = {python("-c", code, cwd=ROOT).stdout for _ in range(2)}
    x = {"a": torch.linspace(0, 1, 7), "b": torch.arange(300, dtype=torch.int32).view(3, 100)}
    assert told == {f"{_hash(x)}\n"}


def test_sampling_does_not_read_a_large_batch() -> None:
    """64 numbers a tensor, spread over it: what it costs does not grow with the batch."""
    sample = batches.pick((torch.randn(1000, 1000), torch.randn(1000, 1000).t()), {})
    assert [len(numbers) for _, _, numbers in sample] == [64, 64]
    large = torch.randn(4000, 4000).t()
    began = time.perf_counter()
    for _ in range(100):
        batches.pick((large,), {})
    assert (time.perf_counter() - began) / 100 < 0.002


def test_only_the_gradients_of_the_backward_that_failed_are_kept(tmp_path: pathlib.Path) -> None:
    """Two healthy backwards over one forward, then the one that fails: its gradient alone is in the capsule."""
    model = roots()

    def step(x: Tensor) -> None:
        out = model(x)
        for scale in (0.0, 0.0, 3.0):
            model.zero_grad()
            (out[1:] * scale + 0 * out[1:]).sum().backward(retain_graph=True)
        model.zero_grad()
        (out * 7).sum().backward()

    x = torch.randn(4, 4)
    x[0] = 0
    finding = nanhunt.hunt(step, x, model=model, capsule=tmp_path)
    assert finding is not None and finding.phase == "backward"
    piece = opened(finding)._opened.call
    assert piece is not None and list(piece.gradients()) == [0]


def test_where_ranges_are_read_later_the_weights_and_the_batch_are_kept(tmp_path: pathlib.Path) -> None:
    """As on an accelerator: the inputs are gone when the device is read, and hunt gives them."""
    model = encoder()
    options: dict[str, Any] = {"capsule": tmp_path, "ring": 1, "_defer": True}
    with pytest.raises(nanhunt.NonFiniteError) as stop, nanhunt.watch(model, **options) as hunt:
        model(torch.zeros(2, 8)).sum().backward()
    assert hunt.errors == []
    capsule = opened(stop.value.finding)
    assert any("the inputs of 1: they were not in hand; nanhunt.hunt" in one for one in capsule.missing)
    assert [one.how for one in capsule.replay(encoder())] == ["model"] and capsule.replay(encoder())[0].same


def test_show_reads_the_finding_of_a_capsule(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = caught(encoder(), batch(), tmp_path).context["capsule"]
    assert cli.main(["show", folder]) == 1
    assert "made the first nan" in capsys.readouterr().out
    assert cli.main(["replay", str(tmp_path)]) == 2
    assert "name the folder of a capsule; inside it there is step0.1" in capsys.readouterr().err
