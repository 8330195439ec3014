"""What made a tensor: looked up when a zero wants an explanation, such as an eps that its dtype could not hold."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .evidence import Lost
from .internals import Storage
from .numerics import format_of
from .sites import Site

_MOST = 4096  # tensors whose makers are remembered
_MOST_VISITS = 32
# Ops that take a constant which stands for "a little": what a lost eps is lost in.
_TAKES_EPS = frozenset(
    "add sub rsub clamp clamp_min clamp_max maximum full full_like fill scalar_tensor new_full".split()
)
# A zero is looked for only through plain arithmetic: behind a matmul or a sum it is somebody else's.
_THROUGH = _TAKES_EPS | frozenset(
    "mul div sqrt rsqrt reciprocal pow neg abs minimum to_copy clone where copy lerp addcmul addcdiv relu sigmoid "
    "expand unsqueeze linalg_vector_norm".split()
)
_DIFFERENCES = frozenset(("sub", "rsub", "add"))


class Maker(NamedTuple):
    storage: Storage
    base: str
    scalars: tuple[float, ...]
    dtype: torch.dtype
    site: Site | None
    inputs: tuple[int | Maker, ...]  # keys of storages; in place: what had made the tensor before


class Makers:
    """The last few thousand results and what they were made from. Holds no tensor and no memory."""

    def __init__(self) -> None:
        self._of: dict[int, Maker] = {}
        self.cast_at: set[int] = set()  # depths of autocast at which it has cast something down

    def put(
        self, t: torch.Tensor, base: str, scalars: tuple[float, ...], inputs: list[torch.Tensor], site: Site | None
    ) -> None:
        storage = Storage(t.untyped_storage())
        keys: list[int | Maker] = []
        for one in inputs:
            if one.layout is torch.strided and not one.is_nested:
                key = one.untyped_storage()._cdata
                if key == storage.key:
                    before = self._of.get(key)
                    if before is not None:
                        short = tuple(i for i in before.inputs if isinstance(i, int))
                        keys.append(before._replace(inputs=short))
                else:
                    keys.append(key)
        self._of.pop(storage.key, None)
        self._of[storage.key] = Maker(storage, base, scalars, t.dtype, site, tuple(keys))
        if len(self._of) > _MOST:
            del self._of[next(iter(self._of))]

    def of(self, t: torch.Tensor) -> Maker | None:
        return self._of.get(t.untyped_storage()._cdata)

    def lost(self, t: torch.Tensor) -> Lost | None:
        """The nearest constant on the way to `t` that was rounded away, or None."""
        first = self.of(t)
        todo: list[tuple[Maker, bool]] = [(first, False)] if first is not None else []
        seen: set[int] = set()
        for _ in range(_MOST_VISITS):
            if not todo:
                break
            maker, differs = todo.pop(0)
            if id(maker) in seen:
                continue
            seen.add(id(maker))
            if maker.base in _TAKES_EPS:
                for value in maker.scalars:
                    found = _rounded(value, maker, differs)
                    if found is not None:
                        return found
            if maker.base not in _THROUGH:
                continue
            differs = maker.base in _DIFFERENCES
            for one in maker.inputs:
                before = self._of.get(one) if isinstance(one, int) else one
                if before is not None:
                    todo.append((before, differs))
        return None

    def narrowed(self, t: torch.Tensor) -> torch.dtype | None:
        """The dtype that `t` was cast from, when autocast cast it."""
        maker = self.of(t)
        if maker is None or maker.base != "to_copy":
            return None
        return next((_DTYPES[int(code)] for code in maker.scalars), None)


_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def code_of(dtype: torch.dtype) -> tuple[float, ...]:
    """A dtype as a number, for `Maker.scalars` of a cast."""
    return (float(_DTYPES.index(dtype)),) if dtype in _DTYPES else ()


def _rounded(value: float, maker: Maker, differs: bool) -> Lost | None:
    form = format_of(maker.dtype)
    if form is None or value == 0 or not abs(value) <= form.max:
        return None
    stored = float(torch.tensor(value, dtype=torch.float64).to(maker.dtype))
    name = str(maker.dtype).removeprefix("torch.")
    if stored == 0 or (stored != value and stored == round(stored) and value != round(value)):
        return Lost(op=maker.base, value=value, dtype=name, becomes=stored, site=maker.site)
    if differs and maker.base in _DIFFERENCES and abs(value) < form.eps / 2:
        return Lost(op=maker.base, value=value, dtype=name, becomes=stored, beside=1.0, site=maker.site)
    return None
