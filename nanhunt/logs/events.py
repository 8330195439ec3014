"""Messages of scalers and trainers: a skipped step, a halved loss scale, the last words before the end."""

from __future__ import annotations

import re
from typing import NamedTuple

from .spellings import number

# Cheap literals first: nearly no line of a log holds one of them.
_HINT = re.compile(
    r"overflow|loss[ _]?scal|found[ _]inf|skipp?ing|FloatingPoint|explod|non-?finite|infinite|\bnan\b|\binf\b|diverg"
    r"|Invalid loss|hysteresis|NanLoss|AMP:",
    re.I,
)
_NUM = r"([-+]?(?:\d[\d_]*(?:\.\d*)?(?:e[-+]?\d+)?|nan|inf))"
_HYSTERESIS = re.compile(r"reducing hysteresis to\s*\d+", re.I)
_SKIPPED = re.compile(
    r"overflow\w*[^|]{0,80}?(?:skip|detect|occur|ignor|reduc|decreas|lower|adjust|on iteration|attempted|downscal)"
    r"|(?:detect|found|due to|because of|had|check)\w*\W{1,3}(?:\w+ ){0,3}overflow|overflow!|step (?:was|is) skipped"
    r"|skipp?(?:ing|ed)? (?:the |this |optimizer |current |parameter )*(?:step|update|iteration|batch|optimizer)"
    r"|found[ _]inf(?:[ _]or[ _]nan)?\b[^|]{0,60}scale|(?:reduc|decreas|lower)\w+ (?:dynamic |the |amp )*loss[ _]?scale"
    r"|AMP: (?:decreas|reduc)",
    re.I,
)
_SCALES = re.compile(r"overflow|scal(?:e|er|ing)\b|found[ _]inf", re.I)
# A count of skipped iterations stands in every line of Megatron.
_NO_MESSAGE = re.compile(
    r"number of skipped|\bno (?:grad(?:ient)? )?overflow|overflow(?:ing)? ?[:=] ?(?:false|0\b|no\b)", re.I
)
_GROWN = re.compile(
    r"(?:increas|rais|grow)\w* (?:dynamic |the |amp )*(?:loss[ _]?)?scale?\w*\D{0,40}?(?:from\s*"
    + _NUM
    + r"\D{0,12})?to:?\s*"
    + _NUM,
    re.I,
)
_AFTER = re.compile(
    r"\b(?:reduc\w*|set(?:ting)?|decreas\w*|lower\w*|adjust\w*|downscal\w*|updat\w*|new|halv\w*|drop\w*|backoff|chang\w*)\b"
    r"(?:(?!iteration|step\b|rank)[^0-9|]){0,60}?(?:" + _NUM + r"[^0-9|]{0,12}?)?(?:\bto\b|:|=|->|=>)+\s*:?\s*" + _NUM,
    re.I,
)
_BEFORE = re.compile(
    r"(?:attempted|current|old|previous|prev|was|at|with|using|dynamic|from|the|grad|loss)?\W{0,2}"
    r"(?:loss[ _]?scal\w*|scaler?|scaling(?: factor)?)\s*(?:is|was|of|at|=|:|to)?:?\s*" + _NUM,
    re.I,
)
_NAN_LOSS = re.compile(
    r"loss (?:is|was|became|becomes|has become|turned|went|value is|is now)\W{0,2}"
    r"(?:infinite or nan|nan or inf\w*|nan|-?inf\w*|non-?finite)"
    r"|non-?finite loss|(?<!oss: )(?<!orm: )(?<!oss=)(?<!oss )\bnan loss\b(?![ _]?scal)"
    r"|loss is not finite|invalid loss, terminat|diverged with loss = nan"
    r"|loss (?:=|:) ?nan\W+(?:stop|abort|exit)"
    r"|loss contains? (?:nan|inf)|nan (?:detected )?in (?:the )?loss|nan or inf found in (?:the )?loss",
    re.I,
)
_INF_LOSS = re.compile(r"loss (?:is|was|became|value is)\W{0,2}(-?inf\w*)\b(?! or nan)", re.I)
_LAST_WORDS = re.compile(
    r"FloatingPointError|OverflowError|minimum loss scale|already at minimum|loss is exploding"
    r"|(?:loss|training|model) (?:has )?diverged"
    r"|returned nan values in its|nan(?:s)? (?:or inf(?:s)? )?(?:detected|found|encountered|values? (?:detected|found))"
    r"|(?:detected|found|encountered|contains?|got)(?: an?)? (?:nan|inf(?:inite)?\b|non-?finite)"
    r"|non-?finite (?:grad|value|norm)"
    r"|grad\w*(?: norm)? (?:is|are|has|have|contains?|became) (?:nan|inf|non-?finite)"
    r"|(?:total )?norm of order \S+ for gradients from .{1,40} is non-finite|exploding gradient",
    re.I,
)
_ERROR = re.compile(
    r"\b\w*(?:Error|Exception)\b.{0,300}(?:\bnan\b|\binf\b|infinite|loss scale|overflow|non-?finite|explod)", re.I
)
_SAYS = re.compile(r"stop|abort|terminat|ending|error|became|exception|warn|detect|encounter|diverg|minimum", re.I)
_AT = re.compile(r"\b(?:iteration|iter|step|num_updates|update|global_step)s?\s*[=:#]?\s*(\d{1,15})\b", re.I)
_RANK = re.compile(r"\brank\s*[:=]?\s*(\d{1,6})\b", re.I)


class Message(NamedTuple):
    """What a message of the program says.

    Attributes:
        kind: "skipped", "grown" (a larger loss scale) or "words".
        before: the loss scale that overflowed, where it is told.
        after: what it was set to.
        loss: NaN or an infinity, where the message says that the loss was one.
        step: where the message itself names it.
        rank: likewise.
        strong: it is a message even where the line holds numbers of a record too.
    """

    kind: str
    before: float | None = None
    after: float | None = None
    loss: float | None = None
    step: int | None = None
    rank: int | None = None
    strong: bool = False


def message(text: str) -> Message | None:
    """What a line tells of a skipped step or of the end; None where it is no such message."""
    text = text[:2000]
    if not _HINT.search(text):
        return None
    at = _AT.search(text)
    rank = _RANK.search(text)
    step, who = int(at[1]) if at else None, int(rank[1]) if rank else None
    if _NAN_LOSS.search(text):
        infinite = _INF_LOSS.search(text)
        loss = float("nan") if not infinite else float("-inf" if infinite[1].startswith("-") else "inf")
        return Message("words", loss=loss, strong=_SAYS.search(text) is not None, step=step, rank=who)
    scales = bool(_SKIPPED.search(text) and _SCALES.search(text) and _AFTER.search(text))
    if not scales and (_LAST_WORDS.search(text) or _ERROR.search(text)):
        return Message("words", strong=_SAYS.search(text) is not None, step=step, rank=who)
    if _NO_MESSAGE.search(text):
        return None
    if found := _GROWN.search(text):
        return Message("grown", before=_value(found[1]), after=_value(found[2]), step=step, rank=who)
    if _SKIPPED.search(text) and (_SCALES.search(text) or re.search(r"\bnan\b|\binf\b|non-?finite|norm", text, re.I)):
        said = _HYSTERESIS.sub("", text)
        after = _AFTER.search(said)
        # What stands before the new scale may be the old one; a scaler's number ("loss scaler 0") is none.
        rest = said[: after.start()] + said[after.end() :] if after else said
        before = _BEFORE.search(re.sub(r"loss scaler \d+\b", "", rest))
        old = _value(after[1]) if after and after[1] else _value(before[1]) if before else None
        factor = re.match(r"\s*\*\s*" + _NUM, said[after.end() :]) if after else None
        new = _value(after[2]) if after else None
        if factor and new is not None:  # "decrease to: 1024.0*0.5"
            new *= _value(factor[1]) or 1.0
        return Message("skipped", before=old, after=new, step=step, rank=who)
    return None


def _value(text: str | None) -> float | None:
    return None if text is None else number(text)
