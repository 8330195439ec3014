"""How programs spell numbers, NaN and the infinities among them."""

from __future__ import annotations

import re

_WORDS = {
    "nan": "nan",
    "qnan": "nan",
    "snan": "nan",
    "ind": "nan",
    "inf": "inf",
    "infinity": "inf",
    "infty": "inf",
    "∞": "inf",
}
_NAN = re.compile(r"([-+]?)(?:1\.\#)?(nan|qnan|snan|ind|infinity|infty|inf|∞)(?:\((?:s?nan|ind|q?nan)\))?0*", re.I)
_WRAPPED = re.compile(
    r"(?:(?:np|numpy|torch|jnp|tf)\.)?[A-Za-z]\w*\(\s*\[*\s*([^\s,()\[\]]+)\s*\]*\s*(?:,.*)?\)\s*", re.S
)
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_SHORT = re.compile(r"([-+]?\d+(?:\.\d*)?)([KkMB%])")
_FACTORS = {"K": 1e3, "k": 1e3, "M": 1e6, "B": 1e9, "%": 1.0}

_WIDE = str.maketrans({"：": ":", "，": ", ", "；": "; ", "＝": "=", "（": "(", "）": ")", "｜": "|", "－": "-"})  # noqa: RUF001
_FOREIGN = re.compile("验证集?|驗證集?|検証|训练损失|训练|訓練|损失值?|損失|学习率|學習率|学習率|梯度范数|轮次|步数")
_IN_ENGLISH = {
    "验": "val ",
    "驗": "val ",
    "検": "val ",
    "训": "train ",
    "訓": "train ",
    "损": "loss",
    "損": "loss",
    "学": "lr",
    "學": "lr",
    "梯": "grad_norm",
    "轮": "epoch",
    "步": "step",
}


def plainly(text: str) -> str:
    """A line with wide signs, or Chinese or Japanese words for the few quantities, as it would be in English."""
    text = text.translate(_WIDE)
    return _FOREIGN.sub(lambda found: "train loss" if found[0] == "训练损失" else _IN_ENGLISH[found[0][0]], text)


def number(text: str) -> float | None:
    """The number that a piece of text spells, or None.

    Understood are `nan`, `-nan(ind)`, `1.#QNAN`, `-1.#IND`, `1.#INF`, `Infinity`, `tensor(nan, device='cuda:0')`,
    `array(nan)`, `1,234.5`, `2.3K`, `16.1%` (as 16.1) and all that `float` reads. None, null and blanks are no numbers.
    """
    try:
        return float(text)  # nearly always
    except ValueError:
        pass
    text = text.strip().strip("\"'").strip()
    if not text or len(text) > 400:
        return None
    try:
        return float(text)
    except ValueError:
        pass
    if found := _NAN.fullmatch(text):
        return float(found[1] + _WORDS[found[2].lower()])
    if _GROUPED.fullmatch(text):
        return float(text.replace(",", ""))
    if found := _SHORT.fullmatch(text):
        return float(found[1]) * _FACTORS[found[2]]
    if (found := _WRAPPED.fullmatch(text)) and not found[1].endswith(("'", '"')):
        return number(found[1])
    return None


def whole(value: float | None) -> int | None:
    """A number as the count that it is; None when it is none (a fraction, NaN, beyond 2^53)."""
    if value is None or not -9007199254740992.0 < value < 9007199254740992.0 or value != int(value):
        return None
    return int(value)
