"""The rules on their own, without torch: who made it, who carried it, who was fed."""

from __future__ import annotations

import math
import subprocess
import sys

from nanhunt.verdict import Call, Origin, Rec, blame, common, deepest, settle


def call(path: str, parent: Call | None = None) -> Call:
    return Call(path, "Module", 1, parent, id(path))


def origin(*kinds: str, literal: bool = False) -> Origin:
    return Origin("forward", None, kinds, "output", literal=literal)


def test_nothing_bad_had_reached_it_so_it_was_made_here() -> None:
    assert settle(("nan",), []) is None
    assert settle(("+inf",), []) is None


def test_a_nan_is_carried_from_the_nan_that_came_first() -> None:
    first, second = origin("nan"), origin("nan")
    assert settle(("nan",), [first, second]) is first


def test_a_nan_comes_from_a_nan_rather_than_from_an_earlier_infinity() -> None:
    overflow, nan = origin("+inf"), origin("nan")
    assert settle(("nan",), [overflow, nan]) is nan


def test_a_computed_infinity_explains_the_nan_it_turns_into_and_keeps_explaining_it() -> None:
    overflow = origin("+inf")
    assert settle(("nan",), [overflow]) is overflow
    assert settle(("nan",), [origin("nan"), overflow]) is not overflow
    assert "nan" in overflow.carried
    assert overflow.kind == "+inf"


def test_a_mask_never_explains_a_nan() -> None:
    assert settle(("nan",), [origin("-inf", literal=True)]) is None


def test_a_mask_explains_infinities_of_its_sign_only() -> None:
    mask = origin("-inf", literal=True)
    assert settle(("-inf",), [mask]) is mask
    assert settle(("+inf",), [mask]) is None


def test_a_computed_infinity_explains_the_other_sign() -> None:
    log = origin("-inf")
    assert settle(("+inf",), [log]) is log


def test_the_deepest_call_took_a_tensor_that_its_container_only_handed_on() -> None:
    root = call("")
    block = call("block", root)
    norm = call("block.norm", block)
    other = call("other", root)
    assert deepest([block, norm, other]) == [norm, other]


def test_the_culprit_of_a_bad_gradient_is_who_was_fed_the_tensor() -> None:
    root = call("")
    layer, loss = call("layer", root), call("loss", root)
    loss.grad = 1.0
    rec = Rec("output", "float32", root, layer)
    rec.takers.append(loss)
    assert blame(rec, ("nan",)) is loss


def test_a_tensor_that_no_module_took_was_used_by_the_code_around_it() -> None:
    root = call("")
    rec = Rec("output", "float32", root, call("layer", root))
    assert blame(rec, ("nan",)) is root


def test_a_tensor_that_left_the_model_was_used_by_the_loss_code() -> None:
    rec = Rec("output", "float32", None, call(""))
    rec.exits = True
    assert blame(rec, ("nan",)) is None


def test_of_several_users_a_linear_map_is_not_the_one_that_made_a_nan() -> None:
    root = call("")
    linear, root_fn = call("linear", root), call("sqrt", root)
    linear.steady, linear.grad, root_fn.grad = True, 100.0, 1.0
    linear.incoming = 1e35
    rec = Rec("output", "float32", root, call("layer", root))
    rec.takers += [linear, root_fn]
    assert blame(rec, ("nan",)) is root_fn
    assert blame(rec, ("+inf",)) is linear, "so much came in that it may have overflowed"
    linear.incoming = 1.0
    assert blame(rec, ("+inf",)) is root_fn


def test_a_branch_that_got_no_gradient_back_has_sent_none_on() -> None:
    root = call("")
    block = call("block", root)
    unused, block.grad = call("block.unused", block), 1.0
    rec = Rec("output", "float32", root, call("layer", root))
    rec.takers += [block, unused]
    assert blame(rec, ("nan",)) is block


def test_of_several_users_the_one_that_holds_a_bad_value_is_suspect() -> None:
    root = call("")
    left, right = call("left", root), call("right", root)
    left.grad = right.grad = 1.0
    rec = Rec("output", "float32", root, call("layer", root))
    rec.takers += [left, right]
    assert blame(rec, ("nan",), lambda c: c is right) is right


def test_a_call_whose_own_gradient_was_bad_already_was_handed_it() -> None:
    root = call("")
    victim, culprit = call("victim", root), call("culprit", root)
    victim.grad, culprit.grad = math.nan, 2.0
    rec = Rec("output", "float32", root, call("layer", root))
    rec.takers += [victim, culprit]
    assert blame(rec, ("nan",)) is culprit


def test_a_shared_module_bears_the_name_of_the_container_that_calls_it() -> None:
    assert common("decoder", ["encoder.embed", "decoder.embed"]) == "decoder.embed"
    assert common("", ["encoder.embed", "embed"]) == "embed"
    assert common("elsewhere", ["encoder.embed", "decoder.embed"]) == "encoder.embed"


def test_the_range_of_a_record_tells_bad_from_fine() -> None:
    rec = Rec("output", "float32", None, None)
    rec.measured(-3.0, 2.0)
    assert not rec.bad
    assert rec.absmax == 3.0
    rec.measured(math.nan, math.nan)
    assert rec.bad
    rec.measured(0.0, math.inf)
    assert rec.bad
    assert rec.absmax == math.inf


def test_the_rules_know_nothing_of_torch() -> None:
    code = "import sys, nanhunt.verdict, nanhunt.finding, nanhunt.report.text; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
