"""The program in a capsule that shows its fault with torch alone: the failing op, or its torch.nn module, as code."""

from __future__ import annotations

from typing import Any

from ..finding import Finding
from ..report.lines import clean
from .cargo import whole

_HEAD = '''\
"""{title}

Shows it again with torch alone, from the numbers that lie beside this file: python {file}
Exit code: 0 when it comes again, 3 when it does not, 4 when torch alone is not enough.
"""

import collections
import json
import math
import pathlib
import struct
import sys

import torch
from torch import nn

HERE = pathlib.Path(__file__).resolve().parent
KIND = {kind!r}
inf, nan = math.inf, math.nan


class Record(dict):
    __getattr__ = dict.__getitem__


def blocks():
    """The numbers in tensors.safetensors, by name."""
    data = bytearray((HERE / "tensors.safetensors").read_bytes())
    length = struct.unpack("<Q", data[:8])[0]
    codes = {{"F": "float", "I": "int", "U": "uint"}}
    found = {{}}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        code = entry["dtype"]
        known = {{"BF16": "bfloat16", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}}
        dtype = getattr(torch, known.get(code) or codes[code[0]] + code[1:])
        start, end = (8 + length + at for at in entry["data_offsets"])
        raw = torch.frombuffer(data, dtype=torch.uint8, count=end - start, offset=start) if end > start else None
        found[name] = torch.empty(entry["shape"], dtype=dtype) if raw is None else raw.clone().view(dtype)
    return found


BLOCKS = blocks()
ROWS = {{title: part["rows"] for title, part in json.loads((HERE / "manifest.json").read_bytes())["parts"].items()}}
MADE = {{}}


def tensor(title, number):
    """A tensor of the capsule; those that shared memory share it again."""
    if (title, number) not in MADE:
        row = ROWS[title][number]
        block = BLOCKS[row["block"]].view(getattr(torch, row["dtype"])).view(-1)
        strides = row["strides"]
        t = block.view(row["shape"]) if strides is None else block.as_strided(row["shape"], strides, row["offset"])
        if row["parameter"]:
            t = nn.Parameter(t, requires_grad=row["grad"])
        elif row["grad"]:
            t = t.detach().requires_grad_()
        MADE[title, number] = t
    return MADE[title, number]


def leaves(value):
    """The tensors in a value."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from leaves(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from leaves(part)


def bad(values):
    """Which of nan, +inf and -inf stand in some values."""
    kinds = set()
    for t in leaves(values):
        if t.is_floating_point() or t.is_complex():
            t = torch.view_as_real(t.detach().resolve_conj()) if t.is_complex() else t.detach().double()
            tests = {{"nan": t.isnan(), "+inf": t == inf, "-inf": t == -inf}}
            kinds |= {{kind for kind, test in tests.items() if test.any()}}
    return kinds

'''
_OP = '''
def op():
    """The operation alone: {name} on its own operands."""
    args = {args}
    kwargs = {kwargs}
    with torch.no_grad():
        out = torch.ops.{name}(*args, **kwargs)
    return {result}

'''
_MODULE = '''
def module():
    """{type}, {path}, on its own inputs{also}."""
    with torch.device("meta"):
        made = {build}
    state = {state}
    for name, value in state.items():
        where, _, short = name.rpartition(".")
        owner = made.get_submodule(where)
        if short in owner._parameters:
            setattr(owner, short, value)
        else:
            owner._buffers[short] = value
    for name, training in {training}.items():
        made.get_submodule(name).training = training
    args = {args}
    kwargs = {kwargs}
    {seed}with {switches}:
        out = made(*args, **kwargs)
{backward}    return found

'''
_BACKWARD = """\
    grads = {grads}
    outs = [t for t in leaves(out)]
    pairs = [(outs[at], grad) for at, grad in grads.items() if outs[at].requires_grad]
    if pairs:
        torch.autograd.backward(*map(list, zip(*pairs)))
    found = [out, [t.grad for t in leaves((args, kwargs, state)) if t.grad is not None]]
"""
_END = """
{order}

if __name__ == "__main__":
    reproduced = False
    for attempt in ATTEMPTS:
        kinds = bad(attempt())
        reproduced = reproduced or KIND in kinds
        print(f"{{attempt.__doc__}} {{', '.join(sorted(kinds)) or 'nothing bad'}} (recorded: {{KIND}})")
    if not ATTEMPTS:
        print({advice!a})
        sys.exit(4)
    print("reproduced" if reproduced else "not reproduced")
    sys.exit(0 if reproduced else 3)
"""


def program(finding: Finding, manifest: dict[str, Any]) -> str:
    """The text of `repro.py` for what a manifest holds."""
    text = _HEAD.format(title=_said(finding.title()), file="repro.py", kind=finding.kind)
    attempts = []
    call, op = manifest["parts"].get("call"), manifest["parts"].get("op")
    if op is not None and _whole(op, op["trees"]) and op["facts"]["name"].count(".") == 2:
        text += _of_op(op, finding)
        attempts.append("op")
    if (
        call is not None
        and call["trees"].get("build")
        and "call" in call["trees"]
        and _whole(call, {name: call["trees"][name] for name in ("call", "state")})
    ):
        text += _of_module(call, finding)
        attempts.append("module")
    where = f"{finding.module_type} is a class of the program's own" if finding.module_type else "it is no module"
    advice = (
        f"torch alone is not enough: {where}, and the operands of the op are not in this capsule. "
        "nanhunt replay . --model module:factory runs it"
    )
    return text + _END.format(order=f"ATTEMPTS = [{', '.join(attempts)}]", advice=advice)


def _of_op(part: dict[str, Any], finding: Finding) -> str:
    args, kwargs = part["trees"]["args"], part["trees"]["kwargs"]
    garbage = part["facts"]["garbage"]
    result = "(out, args, kwargs)"
    if garbage:
        result = f"[one for at, one in enumerate(out) if at not in {garbage!r}]"
    elif not part["facts"].get("writes"):
        result = "out"
    name = part["facts"]["name"]
    return _OP.format(name=name, args=source(args, "op"), kwargs=source(kwargs, "op"), result=result)


def _of_module(part: dict[str, Any], finding: Finding) -> str:
    facts, trees = part["facts"], part["trees"]
    given = dict(trees["call"]["dict"])
    grads = {name: tree for name, tree in trees.items() if name.startswith("gradient ")}
    grads = {name: tree for name, tree in grads.items() if _whole(part, tree)}
    backward = "    found = out\n"
    if grads and finding.phase in ("backward", "forward"):
        texts = ", ".join(f"{int(name.split()[1])}: {source(tree, 'call')}" for name, tree in grads.items())
        backward = _BACKWARD.format(grads="{" + texts + "}")
    random = dict(trees["random"]["dict"]) if "random" in trees and _whole(part, trees["random"]) else {}
    seed = (
        f"torch.set_rng_state({source(random['torch'], 'call')})\n    " if facts["when"] == "before" and random else ""
    )
    return _MODULE.format(
        type=_said(facts["type"]),
        path=_said(facts["module"] or "the model"),
        also=", with the gradient that came back" if "grads" in backward else "",
        build=_built(trees["build"]),
        state=source(trees["state"], "call"),
        training=repr({str(k): bool(v) for k, v in facts["training"].items()}),
        args=source(given["args"], "call"),
        kwargs=source(given["kwargs"], "call"),
        seed=seed,
        switches=_switches(facts),
        backward=backward,
    )


def _switches(facts: dict[str, Any]) -> str:
    casts = [f'torch.autocast("{kind}", torch.{dtype})' for kind, dtype in facts["autocast"].items() if kind == "cpu"]
    casts += (
        ['torch.autocast("cuda", torch.{})'.format(facts["autocast"]["cuda"])] if "cuda" in facts["autocast"] else []
    )
    return ", ".join([f"torch.set_grad_enabled({facts['grad'] and not facts['inference']})", *casts])


def _built(tree: Any) -> str:
    spec = dict(tree["dict"])
    if spec["type"] == "Sequential":
        children = [(name["list"] if isinstance(name, dict) else name) for name in spec["children"]["list"]]
        pairs = ", ".join(f"({name!r}, {_built(child)})" for name, child in children)
        return f"nn.Sequential(collections.OrderedDict([{pairs}]))"
    config = ", ".join(f"{key}={source(value, '')}" for key, value in spec["config"]["dict"])
    return f"nn.{spec['type']}({config})"


def source(tree: Any, title: str) -> str:
    """A tree of a capsule as an expression of python."""
    if not isinstance(tree, dict):
        return repr(tree)
    ((word, inner),) = tree.items()
    if word in ("tensor", "array"):
        return f"tensor({title!r}, {inner})" + (".numpy()" if word == "array" else "")
    if word == "float":
        return str(inner)
    if word == "complex":
        return f"complex({source(inner[0], title)}, {source(inner[1], title)})"
    if word in ("dtype", "memory_format", "layout"):
        return f"torch.{inner}"
    if word == "device":
        return 'torch.device("cpu")'
    if word == "ellipsis":
        return "..."
    if word == "slice":
        return f"slice({', '.join(source(one, title) for one in inner)})"
    if word == "tuple":
        return f"({''.join(source(one, title) + ', ' for one in inner)})".replace(", )", ",)")
    if word == "list":
        return f"[{', '.join(source(one, title) for one in inner)}]"
    if word == "named":
        names = [key for key, _ in inner]
        values = ", ".join(source(one, title) for _, one in inner)
        return f"collections.namedtuple('Record', {names!r})({values})"
    pairs = "{" + ", ".join(f"{source(key, title)}: {source(one, title)}" for key, one in inner) + "}"
    return f"Record({pairs})" if word == "record" else pairs


def _said(text: str) -> str:
    """A name that may hold anything, as it stands in a docstring, and is printed from there on any terminal."""
    plain = clean(text).encode("ascii", errors="backslashreplace").decode()
    return plain.replace("\\", "\\\\").replace('"', "'")


def _whole(part: dict[str, Any], tree: Any) -> bool:
    return whole(part["rows"], tree)
