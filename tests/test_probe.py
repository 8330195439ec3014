"""Statistics agree with a slow reference on every dtype and layout, and looking changes nothing."""

from __future__ import annotations

import collections
import dataclasses
import math
import random
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from nanhunt import probe
from nanhunt.numerics import COMPARED, format_of, headroom_bits

INF, NAN = math.inf, math.nan
INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PLAIN = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
if hasattr(torch, "float8_e8m0fnu"):
    FLOAT8.append(torch.float8_e8m0fnu)


def of_bits(codes, dtype):
    """A tensor with exactly these bit patterns: NaN payloads, negative zeros and subnormals included."""
    integer = INTEGER[dtype.itemsize]
    width = 8 * dtype.itemsize
    signed = [c - (1 << width) if integer is not torch.uint8 and c >> (width - 1) else c for c in codes]
    return torch.tensor(signed, dtype=integer).view(dtype)


def numbers_of(t):
    """Every number of `t` as a python float, which holds all of them exactly."""
    flat = t.detach().resolve_conj().resolve_neg().reshape(-1)
    if t.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.dtype in FLOAT8:
        flat = flat.to(torch.float32)
    return flat.tolist()


def reference(t):
    """The statistics by the plainest code there is, one number at a time."""
    dtype = str(t.dtype).removeprefix("torch.")
    form = format_of(dtype)
    values = numbers_of(t)
    finite = [x for x in values if math.isfinite(x)]
    nonzero = [abs(x) for x in finite if x != 0]
    small = [x for x in nonzero if x < form.smallest_normal]
    absmax = max(map(abs, finite), default=None)
    return {
        "numel": len(values),
        "min": min(finite, default=None),
        "max": max(finite, default=None),
        "absmax": absmax,
        "smallest_nonzero": min(nonzero, default=None),
        "nan": sum(x != x for x in values),
        "pos_inf": values.count(INF),
        "neg_inf": values.count(-INF),
        "zero": values.count(0.0),
        "subnormal": len(small),
        "below_normal": len(small) / len(nonzero) if nonzero else None,
        "headroom_bits": headroom_bits(absmax, dtype),
        "headroom": {name: headroom_bits(absmax, name) for name in COMPARED},
        "dtype": dtype,
    }


def first_bad(t):
    """The first index, in row-major order, that holds something not finite."""
    flat = torch.arange(t.numel()).reshape(t.shape)
    for place in range(t.numel()):
        index = tuple((flat == place).nonzero()[0].tolist())
        if not all(map(math.isfinite, numbers_of(t[index]))):
            return index
    return None


def check(t, **expected):
    got = dataclasses.asdict(probe.stats(t, "output", "y"))
    assert (got["role"], got["name"], got["device"]) == ("output", "y", str(t.device))
    for key, value in (reference(t) | expected).items():
        assert got[key] == value, key


@st.composite
def bit_patterns(draw, dtypes):
    dtype = draw(st.sampled_from(dtypes))
    width = 8 * dtype.itemsize
    form = format_of(dtype)
    layout = {8: 2, 16: 10, 32: 23, 64: 52}[width] if dtype is not torch.bfloat16 else 7
    top = ((1 << (width - 1)) - 1) >> layout << layout
    special = [0, 1, top, top + 1, top - 1, 1 << layout, (1 << layout) - 1]
    special += [code | 1 << (width - 1) for code in special]
    assert form is not None
    codes = st.integers(0, (1 << width) - 1) | st.sampled_from(special)
    return of_bits(draw(st.lists(codes, min_size=1, max_size=24)), dtype)


# --- statistics -------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=300)
@given(bit_patterns(PLAIN + FLOAT8))
def test_statistics_are_exact_whatever_the_bits(t):
    check(t, shape=tuple(t.shape), first_bad=first_bad(t))


@settings(deadline=None)
@given(bit_patterns(PLAIN), st.data())
def test_statistics_are_exact_in_any_layout(t, data):
    shape = data.draw(st.sampled_from([(2, 3, 4), (4, 1, 6), (24,), (2, 12), (1, 24)]))
    t = t.repeat(24)[:24].reshape(shape)
    t = t.permute(data.draw(st.permutations(range(t.dim()))))
    change = data.draw(st.sampled_from(["none", "step", "expand", "new"]))
    if change == "step":
        t = t[..., :: data.draw(st.integers(1, 2))]
    elif change == "expand":
        t = t[:1].expand(3, *t.shape[1:])
    elif change == "new":
        t = t.unsqueeze(0).expand(2, *t.shape)
    check(t, shape=tuple(t.shape), first_bad=first_bad(t))


@settings(deadline=None)
@given(bit_patterns([torch.float16, torch.float32, torch.float64]), st.booleans())
def test_statistics_of_complex_numbers_are_those_of_their_parts(parts, conjugate):
    t = torch.view_as_complex(parts.repeat(2).reshape(-1, 2))
    t = t.conj() if conjugate else t
    check(t, shape=tuple(t.shape), first_bad=first_bad(t))


@pytest.mark.parametrize("dtype", PLAIN + FLOAT8, ids=str)
def test_statistics_of_all_patterns_at_once(dtype):
    width = 8 * dtype.itemsize
    if width <= 16:
        check(of_bits(range(1 << width), dtype))
    else:
        codes = [(n * 0x9E3779B97F4A7C15) % (1 << width) for n in range(20_000)]
        check(of_bits(codes, dtype))


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_statistics_of_many_pieces_are_those_of_the_whole(monkeypatch, dtype):
    monkeypatch.setattr(probe, "_PIECE", 64)
    torch.manual_seed(1)
    t = (torch.randn(41, 25) * 3).to(dtype)
    check(t, first_bad=None)
    t[30, 7], t[39, 1], t[40, 24], t[2, :] = NAN, INF, -INF, 0.0
    check(t, first_bad=(30, 7))
    t[:, :] = NAN
    check(t, first_bad=(0, 0))


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -2.0, 1e-45, NAN, INF, -INF])
@pytest.mark.parametrize("shape", [(), (1,), (3, 1)])
def test_statistics_of_one_value(value, shape):
    check(torch.full(shape, value), first_bad=None if math.isfinite(value) else (0,) * len(shape))


def test_a_negative_view_is_read_with_its_sign():
    t = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert t.is_neg()
    check(t, min=-2.0, max=4.0)


@pytest.mark.parametrize("dtype", PLAIN + FLOAT8 + COMPLEX, ids=str)
def test_nothing_is_empty_not_unknown(dtype):
    row = probe.stats(torch.empty(0, 3, dtype=dtype), "input")
    assert (row.shape, row.numel, row.nan, row.pos_inf, row.zero) == ((0, 3), 0, 0, 0, 0)
    assert row.min is row.max is row.absmax is row.headroom_bits is row.first_bad is None


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.int8, torch.uint16], ids=str)
def test_whole_numbers_have_a_range_and_zeros(dtype):
    row = probe.stats(torch.tensor([[0, 1], [1, 0]]).to(dtype), "labels")
    assert (row.min, row.max, row.absmax, row.zero, row.nan, row.numel) == (0.0, 1.0, 1.0, 2, 0, 4)


# --- tensors of another kind ------------------------------------------------------------------------


def test_channels_last_counts_in_the_order_of_the_index():
    t = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    t[0, 2, 1, 1], t[0, 1, 3, 3] = NAN, INF
    check(t, first_bad=(0, 1, 3, 3))


def test_sparse_tensors_are_read_by_their_stored_values():
    dense = torch.zeros(4, 5)
    dense[1, 2], dense[3, 4], dense[0, 0] = NAN, 2.0, -3.0
    for t in (dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()):
        row = probe.stats(t, "weight")
        assert (row.shape, row.numel, row.nan, row.min, row.max) == ((4, 5), 3, 1, -3.0, 2.0)
        assert row.first_bad == (1, 2)
        assert probe.kinds(t) == ("nan",)
    hybrid = torch.stack([dense, dense + 1]).to_sparse(1)
    assert probe.stats(hybrid, "weight").first_bad == (0, 1, 2)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors_are_read_row_by_row(layout):
    t = torch.nested.nested_tensor([torch.ones(2, 3), torch.tensor([[1.0, 2.0, -INF]])], layout=layout)
    row = probe.stats(t, "input")
    assert row.shape == (2, -1, 3)
    assert (row.numel, row.neg_inf, row.max, row.first_bad) == (9, 1, 2.0, (1, 0, 2))
    assert probe.kinds(t) == ("-inf",)


def test_the_holes_of_a_jagged_tensor_are_nobodys_numbers():
    base = torch.full((2, 4, 3), NAN)
    base[0, :2] = base[1, :3] = 1.0
    t = torch.nested.narrow(base, 1, torch.tensor([0, 0]), torch.tensor([2, 3]), layout=torch.jagged)
    assert probe.kinds(t) == ()
    assert probe.stats(t, "input").nan == 0


def test_a_distributed_tensor_is_its_local_shard():
    local = torch.tensor([1.0, NAN])
    shard = torch.ones(4)
    shard._local_tensor = local
    shard.requires_grad_()
    t = shard.as_subclass(type("Sharded", (torch.Tensor,), {}))
    t._local_tensor = local
    row = probe.stats(t, "weight")
    assert probe.payload(t) is local
    assert (row.shape, row.nan, row.first_bad) == ((4,), 1, None)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, 3, device="meta"),
        lambda: torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8),
        lambda: torch.nn.parameter.UninitializedParameter(),
        lambda: fake(),
    ],
    ids=["meta", "quantized", "lazy", "fake"],
)
def test_what_cannot_be_read_has_a_row_without_numbers(make):
    t = make()
    assert probe.payload(t) is None
    assert probe.kinds(t) == ()
    row = probe.stats(t, "input", "x")
    assert row.dtype
    assert row.min is row.max is row.nan is row.headroom_bits is None
    if not isinstance(t, torch.nn.parameter.UninitializedParameter):
        assert (row.shape, row.numel) == ((2, 3), 6)


def fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(2, 3)


def test_inside_a_transform_there_is_nothing_to_read():
    seen = []

    def f(x):
        seen.append((probe.payload(x), probe.stats(x, "input").max))
        return (x * x).sum()

    torch.func.vmap(torch.func.grad(f))(torch.ones(3, 2))
    assert seen == [(None, None)]


def test_a_subclass_does_not_see_our_calls():
    calls = []

    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            calls.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    t = torch.tensor([1.0, INF]).as_subclass(Loud)
    calls.clear()
    numbers = probe.payload(t)
    assert type(numbers) is torch.Tensor
    assert probe.limits(numbers) == (1.0, INF)
    assert not [f for f in calls if getattr(f, "__name__", "") not in ("__get__",)]


def test_a_payload_of_a_plain_tensor_is_the_tensor():
    for t in (torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True) * 2):
        assert probe.payload(t) is t
    assert probe.payload(torch.ones(0)) is None
    assert probe.payload(torch.ones(2, dtype=torch.long)) is None


# --- ranges -----------------------------------------------------------------------------------------


@settings(deadline=None)
@given(bit_patterns(PLAIN + FLOAT8))
def test_limits_and_kinds_say_what_is_there(t):
    numbers = probe.payload(t)
    assert numbers is not None
    lo, hi = probe.limits(numbers)
    values = numbers_of(t)
    expected = [("nan", any(x != x for x in values)), ("+inf", INF in values), ("-inf", -INF in values)]
    kinds = tuple(kind for kind, there in expected if there)
    assert probe.kinds(t) == kinds
    assert probe.bad(lo, hi) is bool(kinds)
    if not expected[0][1]:
        assert (lo, hi) == (min(values), max(values))
    else:
        assert lo != lo
        assert hi != hi


@pytest.mark.parametrize("values", [[NAN, INF], [NAN, -INF, INF], [-INF, NAN], [NAN, NAN]])
def test_a_nan_hides_no_infinity(values):
    kinds = probe.kinds(torch.tensor(values))
    assert kinds[0] == "nan"
    assert ("+inf" in kinds, "-inf" in kinds) == (INF in values, -INF in values)


@pytest.mark.parametrize(
    ("make", "numel"),
    [
        (lambda x: x, 240),
        (lambda x: x.transpose(1, 3), 240),
        (lambda x: x.to(memory_format=torch.channels_last), 240),
        (lambda x: x.permute(3, 0, 2, 1), 240),
        (lambda x: x[:1].expand(64, -1, -1, -1), 120),
        (lambda x: x[:, :, :1].expand(-1, -1, 9, -1).transpose(0, 3), 60),
        (lambda x: x[0, 0, 0, 0].expand(5, 5), 1),
        (lambda x: x.unsqueeze(1).expand(2, 7, 3, 4, 10).permute(4, 3, 2, 1, 0), 240),
    ],
)
def test_numbers_are_put_in_the_order_of_memory_each_once(make, numel):
    t = make(torch.arange(240.0).reshape(2, 3, 4, 10))
    ordered = probe.in_order(t)
    assert ordered.numel() == numel
    assert list(ordered.stride()) == sorted(ordered.stride(), reverse=True)
    assert ordered.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()
    assert sorted(set(ordered.reshape(-1).tolist())) == sorted(set(t.reshape(-1).tolist()))
    assert probe.limits(t) == (t.min().item(), t.max().item())


# --- looking changes nothing ------------------------------------------------------------------------


def look(t):
    probe.stats(t, "output")
    probe.kinds(t)
    numbers = probe.payload(t)
    if numbers is not None:
        probe.limits(numbers)


@pytest.mark.parametrize("dtype", PLAIN + COMPLEX, ids=str)
def test_looking_changes_neither_the_tensor_nor_the_generators(dtype):
    t = torch.randn(5, 4).to(dtype)
    t[1, 2] = NAN
    leaf = t.clone().requires_grad_()
    made = leaf * 2
    before = torch.random.get_rng_state(), random.getstate(), made._version, made.grad_fn
    bits = numbers_of(made)
    for one in (leaf, made, made.t(), made[::2]):
        look(one)
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert made._version == before[2]
    assert made.grad_fn is before[3]
    assert repr(numbers_of(made)) == repr(bits)
    assert leaf.grad is None
    made.abs().float().sum().backward()
    assert leaf.grad is not None


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_every_grad_mode_gives_the_same_answer(context):
    outside = torch.tensor([[1.0, -INF], [2.0, 3e-40]], requires_grad=True)
    expected = probe.stats(outside, "x")
    with context():
        inside = outside * 1
        assert probe.stats(outside, "x") == probe.stats(inside, "x") == expected
    assert probe.stats(inside, "x") == expected
    look(inside)


def test_autocast_does_not_touch_the_numbers():
    t = torch.tensor([1e30, 1.0009765625, 3e-30, 1e-42])
    expected = probe.stats(t, "x")
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            assert probe.stats(t, "x") == expected
            assert probe.limits(t) == (t.min().item(), t.max().item())


def test_a_dispatch_mode_sees_ordinary_calls():
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    t = torch.tensor([1.0, NAN, 0.0])
    expected = probe.stats(t, "x")
    with Mode():
        assert probe.stats(t, "x") == expected
        assert probe.kinds(t) == ("nan",)


def test_default_dtype_and_deterministic_mode_do_not_matter():
    t = torch.tensor([1.0, NAN, 0.0])
    expected = probe.stats(t, "x")
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        assert probe.stats(t, "x") == expected
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


# --- leaves -----------------------------------------------------------------------------------------

A, B, C = torch.zeros(1), torch.ones(1), torch.full((1,), 2.0)
Pair = collections.namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Lazy(collections.UserDict):
    def __getitem__(self, key):
        raise RuntimeError("not now")


def paths(obj, **kwargs):
    return [(path, tensor.item()) for path, tensor in probe.leaves(obj, **kwargs)]


@pytest.mark.parametrize(
    ("obj", "expected"),
    [
        (A, [""]),
        ((A, B), ["[0]", "[1]"]),
        ([A, None, (B, 3)], ["[0]", "[2][0]"]),
        ({"x": A, 3: [B]}, ["['x']", "[3][0]"]),
        (collections.OrderedDict(x=A), ["['x']"]),
        (collections.UserDict(x=A), ["['x']"]),
        (collections.deque([A, B]), ["[0]", "[1]"]),
        (Pair(A, (B,)), [".left", ".right[0]"]),
        (Output(A), [".logits"]),
        ({"out": Output(A, B)}, ["['out'].logits", "['out'].loss"]),
        (None, []),
        ("text", []),
        (3.0, []),
        (Lazy(x=A), ["['x']"]),  # its data is read, not what it would compute
        (iter([A]), []),
        (torch.nn.Linear(1, 1), []),
        (types.SimpleNamespace(x=A), []),
        ((), []),
    ],
)
def test_leaves_are_named_as_their_user_would_reach_them(obj, expected):
    assert [path for path, _ in probe.leaves(obj)] == expected


def test_return_types_of_torch_have_names():
    assert [path for path, _ in probe.leaves(torch.max(torch.ones(2, 2), 0))] == [".values", ".indices"]


def test_a_packed_sequence_has_names():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    assert [path for path, _ in probe.leaves(packed)][:2] == [".data", ".batch_sizes"]


def test_deep_leaves_look_into_plain_objects():
    store = types.SimpleNamespace(_mapping={"x": A, "edge_index": B})
    graph = types.SimpleNamespace(_store=store, y=C)
    assert paths({"g": graph}, deep=True) == [("['g']['x']", 0), ("['g']['edge_index']", 1), ("['g'].y", 2)]
    chain = types.SimpleNamespace(t=A)
    for _ in range(5):
        chain = types.SimpleNamespace(next=chain)
    assert paths(chain, deep=True) == []
    assert paths(types.SimpleNamespace(model=torch.nn.Linear(1, 1), f=len, m=math), deep=True) == []


def test_an_iterator_is_not_consumed():
    iterator = iter([A, B])
    assert paths([iterator], deep=True) == []
    assert list(iterator) == [A, B]


def test_cycles_and_floods_are_cut():
    loop = [A]
    loop.append(loop)
    assert paths(loop) == [("[0]", 0)]
    assert paths([loop[0], loop[0]]) == [("[0]", 0), ("[1]", 0)]
    assert len(paths([A] * 5000)) == 1000
    assert paths([0] * 1_000_000) == []
    wide = [A]
    for _ in range(40):
        wide = [wide, wide]  # 2**40 paths
    assert len(paths(wide)) <= 1000
    deep = [A]
    for _ in range(5000):
        deep = [deep]
    assert paths(deep) == []


def test_objects_that_fight_back_are_left_alone():
    class Trap:
        def __getattribute__(self, name):
            raise RuntimeError(name)

    class BadMapping(collections.abc.Mapping):
        def __getitem__(self, key):
            raise KeyError(key)

        def __iter__(self):
            raise RuntimeError

        def __len__(self):
            return 1

    class BadKey:
        def __repr__(self):
            raise RuntimeError

    assert paths([Trap(), BadMapping(), {BadKey(): A}, B], deep=True) == [("[3]", 1)]
