"""The record survives JSON, pickle and copy unchanged, and refuses what it cannot read."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanhunt.errors import UsageError
from nanhunt.finding import PHASES, Call, Finding, TensorStats

KEYS = (
    "format phase step call rank module module_type op line source kind tensor cause why advice tensors trail "
    "context handled"
).split()

text = st.text(max_size=30)
number = st.floats() | st.just(math.nan)
count = st.integers(min_value=0, max_value=2**70)
maybe = st.none()
tensor_stats = st.builds(
    TensorStats,
    role=text,
    name=maybe | text,
    shape=maybe | st.lists(st.integers(-1, 2**40), max_size=5).map(tuple),
    dtype=maybe | text,
    device=maybe | text,
    numel=maybe | count,
    **dict.fromkeys(("min", "max", "absmax", "smallest_nonzero", "below_normal"), maybe | number),
    **dict.fromkeys(("nan", "pos_inf", "neg_inf", "zero", "subnormal"), maybe | count),
    headroom_bits=maybe | number,
    headroom=st.dictionaries(text, maybe | number, max_size=4),
    first_bad=maybe | st.lists(st.integers(0, 99), max_size=4).map(tuple),
    exponents=maybe | st.tuples(st.integers(-(2**70), 2**70), st.lists(count, max_size=4).map(tuple)),
)
calls = st.builds(
    Call,
    module=maybe | text,
    module_type=maybe | text,
    call=maybe | count,
    phase=maybe | text,
    absmax_in=maybe | number,
    absmax_out=maybe | number,
)
context = st.recursive(
    st.none() | st.booleans() | st.integers() | number | text,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
findings = st.builds(
    Finding,
    phase=st.sampled_from(PHASES) | text,
    **dict.fromkeys(("step", "call", "rank"), maybe | count),
    **dict.fromkeys(
        ("module", "module_type", "op", "line", "source", "kind", "tensor", "cause", "why", "handled"),
        maybe | text,
    ),
    advice=st.lists(text, max_size=4).map(tuple),
    tensors=st.lists(tensor_stats, max_size=3).map(tuple),
    trail=st.lists(calls, max_size=3).map(tuple),
    context=st.dictionaries(text, context, max_size=4),
)


@settings(deadline=None)
@given(findings)
def test_a_finding_survives_json(found):
    written = found.to_json()
    back = Finding.from_json(written)
    assert back == found
    assert back.to_json() == written
    assert hash(back) == hash(found)
    assert Finding.from_dict(found.to_dict()) == found
    assert json.loads(found.to_json(indent=2)) == json.loads(written) == found.to_dict()


@settings(deadline=None)
@given(findings)
def test_a_finding_can_be_pickled_and_copied(found):
    for other in (pickle.loads(pickle.dumps(found)), copy.copy(found), copy.deepcopy(found)):
        assert other.to_json() == found.to_json()  # a NaN that was pickled equals nothing


@settings(deadline=None)
@given(findings)
def test_every_key_is_there_in_the_order_of_the_contract(found):
    assert list(found.to_dict()) == KEYS


def test_unknown_is_none():
    data = Finding(phase="forward").to_dict()
    assert data["format"] == 1
    assert data["advice"] == data["tensors"] == data["trail"] == []
    assert data["context"] == {}
    filled = ("format", "phase", "advice", "tensors", "trail", "context")
    assert all(data[key] is None for key in KEYS if key not in filled)


def test_numbers_json_cannot_say_are_strings():
    row = TensorStats(role="output", min=-math.inf, max=math.nan, headroom={"float16": math.inf})
    found = Finding(phase="forward", kind="nan", tensors=(row,), context={"lr": math.nan, "lrs": (math.inf,)})
    data = json.loads(found.to_json())
    assert (data["tensors"][0]["min"], data["tensors"][0]["max"]) == ("-inf", "nan")
    assert data["tensors"][0]["headroom"] == {"float16": "inf"}
    assert data["context"] == {"lr": "nan", "lrs": ["inf"]}
    back = Finding.from_dict(data)
    assert back.tensors[0].min == -math.inf
    assert math.isnan(back.context["lr"])
    assert back.kind == "nan", "a text that looks like a number stays a text where a text belongs"


def test_what_json_does_not_know_becomes_text_when_the_record_is_made():
    class Odd:
        def __repr__(self):
            return "odd"

    found = Finding(phase="forward", context={"odd": Odd(), 1: [1, {"deep": Odd()}]})
    assert found.context == {"odd": "odd", "1": (1, {"deep": "odd"})}


def test_a_context_that_contains_itself_is_cut():
    loop: dict[str, object] = {}
    loop["self"] = loop
    found = Finding(phase="forward", context=loop)
    assert Finding.from_json(found.to_json()) == found


def test_lists_become_tuples():
    found = Finding(phase="forward", advice=["a"], tensors=[TensorStats(role="x", shape=[1, 2])], trail=[])  # type: ignore[arg-type]
    assert found.advice == ("a",)
    assert found.tensors[0].shape == (1, 2)


def test_a_torch_size_is_kept_as_plain_numbers():
    torch = pytest.importorskip("torch")
    row = TensorStats(role="x", shape=torch.ones(2, 3).shape, numel=6, max=torch.tensor(2.0))  # type: ignore[arg-type]
    assert type(row.shape) is tuple
    assert type(row.max) is float


def test_a_finding_is_a_value():
    found = Finding(phase="forward")
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.phase = "backward"  # type: ignore[misc]
    assert dataclasses.replace(found, handled="absorbed").handled == "absorbed"
    assert not hasattr(found, "__dict__")
    with pytest.raises(TypeError):
        Finding("forward")  # type: ignore[misc]


def test_unknown_keys_are_left_alone():
    data = Finding(phase="forward", trail=(Call(module="a"),)).to_dict()
    data["later"] = 1
    data["trail"][0]["later"] = 2
    assert Finding.from_dict(data) == Finding(phase="forward", trail=(Call(module="a"),))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a nanhunt finding: not JSON"),
        ("[]", "expected an object with the key 'format'"),
        ("{}", "expected an object with the key 'format'"),
        (
            '{"format": 2, "phase": "forward"}',
            "this finding has format 2, and this nanhunt reads format 1: show it with the version that wrote it, "
            "or upgrade nanhunt",
        ),
        ('{"format": 1}', "not a nanhunt Finding: the key 'phase' is missing"),
        ('{"format": 1, "phase": null}', "not a nanhunt Finding: 'phase' should be a text, got None"),
        ('{"format": 1, "phase": "x", "step": "no"}', "'step' should be a whole number, got no"),
        ('{"format": 1, "phase": "x", "step": 1.5}', "'step' should be a whole number, got 1.5"),
        ('{"format": 1, "phase": "x", "step": true}', "'step' should be a whole number, got True"),
        ('{"format": 1, "phase": "x", "advice": "one"}', "'advice' should be a list of texts, got one"),
        ('{"format": 1, "phase": "x", "tensors": 5}', "'tensors' should be a list of tensors, got 5"),
        ('{"format": 1, "phase": "x", "tensors": [5]}', "'tensors' should be a list of tensors, got [5]"),
        (
            '{"format": 1, "phase": "x", "tensors": [{}]}',
            "not a nanhunt TensorStats: the key 'role' is missing",
        ),
        ('{"format": 1, "phase": "x", "trail": [{"module": "a", "absmax_in": "big"}]}', "should be a number"),
        ('{"format": 1, "phase": "x", "context": 3}', "'context' should be an object, got 3"),
    ],
)
def test_what_is_no_finding_is_refused_with_the_reason(text, message):
    with pytest.raises(UsageError) as caught:
        Finding.from_json(text)
    assert message in str(caught.value)
