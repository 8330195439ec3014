"""The targets, with what was predicted and what was tried: the measured figures come from the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Results = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One line of the table. `limit` is what the figure may be at most; `measured` and `floor` read the results.

    `predicted` was written down before the measurement, `tried` after it.
    """

    what: str
    limit: float
    measured: Callable[[Results], float | None]
    floor: Callable[[Results], float | None] = lambda results: None
    unit: str = "x"
    predicted: str = ""
    tried: str = ""


def _ratio(model: str, tool: str) -> Callable[[Results], float | None]:
    def read(results: Results) -> float | None:
        for row in results.get("overhead", ()):
            if (row["model"], row["mode"], row["tool"]) == (model, "train", tool) and row["ratio"]:
                return float(row["ratio"]["median"])
        return None

    return read


def _whole(what: str, model: str, limit: float, *, predicted: str = "", tried: str = "") -> Target:
    return Target(
        what=f"{what}, training step",
        limit=limit,
        measured=_ratio(model, "nanhunt, auto"),
        floor=_ratio(model, "floor: one aminmax"),
        predicted=predicted,
        tried=tried,
    )


def _forward(what: str, model: str, limit: float, *, predicted: str = "", tried: str = "") -> Target:
    return Target(
        what=f"{what}, forward only",
        limit=limit,
        measured=_ratio(model, "nanhunt, forward only"),
        predicted=predicted,
        tried=tried,
    )


def _monitor(model: str) -> Callable[[Results], float | None]:
    def read(results: Results) -> float | None:
        found = [row for row in results.get("monitor", ()) if row["model"] == model]
        return float(found[0]["whole"]) if found else None

    return read


def _links(results: Results) -> Any:
    found = results.get("permodule", {}).get("modules", ())
    return found[0] if found else None


def _over_floor(results: Results) -> float | None:
    links = _links(results)
    return None if links is None else float(links["over_floor"]["nanhunt, auto"])


def _attach(results: Results) -> float | None:
    found = results.get("permodule", {}).get("attaching")
    return None if found is None else float(found["attach"])


def _compiled(results: Results) -> float | None:
    found = results.get("compiled", {})
    return float(found["ratio"]["median"]) if "ratio" in found else None


def _compiled_graphs(results: Results) -> float | None:
    found = results.get("compiled", {})
    return float(found["after_more_watches"]["graphs"] - found["bare"]["graphs"]) if "ratio" in found else None


def _unequal(results: Results) -> float | None:
    found = results.get("compiled", {})
    return float(not found["equal"]) if "equal" in found else None


def _kept(results: Results) -> float | None:
    found = [row["tensor_bytes_per_step"] for row in results.get("counts", ()) if "auto" in row["way"]]
    return float(max(found)) if found else None


def _gpu(*path: str) -> Callable[[Results], float | None]:
    def read(results: Results) -> float | None:
        found: Any = results.get("gpu", {}).get("sections", {})
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        return float(found) if isinstance(found, (int, float)) else None

    return read


_COLD = (
    "1.86 before. Hooks hang on a tensor without torch's handle (1.2 us saved a tensor), reductions write into results "
    "that are reused (0.35 us a look), gradients and weights of up to 8192 numbers are reduced together, optimizer "
    "state is read only when it can have gone bad without its weight. Tried and left: a norm of many tensors in one "
    "call is 10 times slower on a CPU; collecting garbage less often changes nothing. What is left is Python with "
    "cold caches: 8 us in the hook before a module and 9 us in the one after it here, 2 us each in a loop over one"
)
_BY_MEMORY = (
    "nothing hangs on gradients, but then a tensor is known by its memory alone, and to look that up costs as much as "
    "the hook that it saves"
)
_PIECES = (
    "21 us before, 12 now. Of them torch takes 1.3 for calling two hooks, the two reductions 3, hanging a hook 1.3; "
    "records of call and tensor, the stack of calls and the six checks that no mode, transform or tracing is on take "
    "the rest. The floor has no hook before the module, reads no number and keeps no record"
)
TARGETS = (
    _whole("GPT 6x256", "gpt", 1.03, predicted="1.03", tried="1.05 to 1.07 before"),
    _whole(
        "ResNet-18",
        "resnet",
        1.05,
        predicted="1.05",
        tried="11 million weights and their gradients are read once a step, which alone is 1.03; reading the optimizer "
        "state only when it can have gone bad saved as much",
    ),
    _whole(
        "Llama 6x256",
        "llama",
        1.04,
        predicted="1.04",
        tried="more modules, and more code between them, than the GPT has; weights and their gradients are 0.01 of it",
    ),
    _whole("tiny-op GPT-2", "tiny gpt2", 1.25, predicted="1.14", tried=_COLD),
    _forward("GPT 6x256", "gpt", 1.02, predicted="1.02", tried="within the noise of these runs (see `bare again`)"),
    _forward("ResNet-18", "resnet", 1.03, predicted="1.03"),
    _forward("Llama 6x256", "llama", 1.02, predicted="1.02", tried="within the noise of these runs"),
    _forward("tiny-op GPT-2", "tiny gpt2", 1.10, predicted="1.08", tried=_BY_MEMORY),
    Target(
        what="a module of tiny ops, over its floor",
        limit=1.25,
        measured=_over_floor,
        floor=lambda results: 1.0,
        predicted="1.3",
        tried=_PIECES,
    ),
    Target(
        what="Monitor, GPT 6x256, training step",
        limit=1.01,
        measured=_monitor("gpt"),
        predicted="1.003",
        tried="one norm for each gradient in one fused call, and no look at weights or entries but in one step of 50",
    ),
    Target(what="attaching, for one module", limit=20, unit="us", measured=_attach, predicted="16"),
    Target(
        what="compiled, training step",
        limit=1.03,
        measured=_compiled,
        predicted="1.02",
        tried="one slot for each tensor (largest magnitude with its sign) and not two: half as many further kernels",
    ),
    Target(what="compiled, further graphs", limit=0, unit="", measured=_compiled_graphs, predicted="0"),
    Target(what="compiled, results that differ (0 or 1)", limit=0, unit="", measured=_unequal, predicted="0"),
    Target(what="activations kept after a step", limit=0, unit="bytes", measured=_kept, predicted="0"),
    Target(what="GPU, GPT-2 bfloat16, eager", limit=1.03, measured=_gpu("gpt2", "eager", "nanhunt, auto", "median")),
    Target(what="GPU, GPT-2 bfloat16, compiled", limit=1.02, measured=_gpu("gpt2", "compiled", "ratio", "median")),
    Target(
        what="GPU, ResNet-50 float16, eager", limit=1.03, measured=_gpu("resnet", "eager", "nanhunt, auto", "median")
    ),
    Target(what="GPU, ResNet-50 float16, compiled", limit=1.02, measured=_gpu("resnet", "compiled", "ratio", "median")),
    Target(what="GPU, further kernels for one look", limit=1, unit="", measured=_gpu("kernels", "per_look")),
    Target(what="GPU, host reads outside the drain", limit=0, unit="", measured=_gpu("sync", "outside_the_drain")),
)
