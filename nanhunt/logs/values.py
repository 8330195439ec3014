"""Which value of a line means what, told by the words, brackets and bars around it."""

from __future__ import annotations

import re

from .names import Meaning, meaning

_OPENING = re.compile(r"(?:\b[\w.]{0,40}(?:[tT]ensor|[aA]rray|float\d*)\(|[\[('\"\s<*])+$")
_SEPARATOR = re.compile(r"\s*(?::=|=>|->|[:=~])\s*$|\s+is\s*$")
_KEY = re.compile(r"(?:(?:[^|,;{}\[\]\"'\t:=<>!?*])(?! {2}| - | • ))*[^|,;{}\[\]\"'\t:=<>!?*]?$")
_QUOTED = re.compile(r"([\"'])([^\"']{1,120})\1$")
_CLOSED = re.compile(r"\([^()]*\)")
_BRIEF = re.compile(r"\s*\d+ (train|val|hella|eval|test) \S+\s*")
_BRIEF_NAMES = {"val": "val loss", "test": "test loss", "hella": "hellaswag accuracy", "eval": "eval"}
_TRAIN = re.compile(r"\bTrain(?:ing)?:\s*\[?$")  # of timm and swin, before the number of the epoch
_TRAIN_AFTER = re.compile(r"(?:/\d+\])?\s*\[")
_AVERAGE_LOSS = re.compile(r"\s*\d+: \S+, \S+ avg loss, \S+ rate,")
_CELLS = re.compile(r"\s*\|\s*([A-Za-z][\w/. ]{0,60}?)\s*\|\s*\S+\s*\|\s*")
_PRINTED = re.compile(r"\s*tensor\(\[?\s*\S+.{0,60}grad_fn=<\w*Loss")
_PAIR = re.compile(r"\d+,\s+\d+\]\s+loss", re.I)
_OF = re.compile(r"/\d+\]")
_SPOILING = set("time best max min warmup weight target initial worst num number".split())
_COUNTED = set("total optimization train training of per every save eval logging accumulation gradient in".split())
_PLACED = re.compile(r"\.py:\d+\] \[$")


def meanings(text: str, tokens: list[re.Match[str]]) -> tuple[list[Meaning | None], dict[int, re.Match[str]]]:
    """What each value of a line means, and for some the value in brackets behind it, which is its mean."""
    found: list[Meaning | None] = []
    average: dict[int, re.Match[str]] = {}
    if len(tokens) == 2 and (brief := _BRIEF.fullmatch(text)):  # 250 val 3.9
        word = brief[1]
        return [
            Meaning("step"),
            Meaning("loss") if word == "train" else Meaning("metric", 0, _BRIEF_NAMES.get(word, word)),
        ], {}
    if _AVERAGE_LOSS.match(text) and len(tokens) > 3:  # darknet: 100: 12.3, 15.4 avg loss, 0.001 rate
        return [Meaning("step"), Meaning("loss"), None, Meaning("lr"), *([None] * (len(tokens) - 4))], {}
    if len(tokens) == 1 and (cells := _CELLS.fullmatch(text)):  # | loss | 12.5 |
        return [meaning(cells[1])], {}
    if _PRINTED.match(text):  # tensor(0.5, grad_fn=<NllLossBackward0>)
        return [Meaning("loss"), *([None] * (len(tokens) - 1))], {}
    last = 0
    for at, token in enumerate(tokens):
        before = text[max(last, token.start() - 160) : token.start()]
        after = text[token.end() : token.end() + 12]
        previous = found[-1] if found else None
        bare = "".join(before.split())
        what: Meaning | None = None
        if at and bare in ("/", "of", "outof"):
            if previous is not None and previous.kind in ("epoch", "batch"):
                what = Meaning("epochs" if previous.kind == "epoch" else "batches")
        elif at and bare in ("][", "[", ",[") and previous is not None and previous.kind in ("epoch", "epochs"):
            what = Meaning("batch") if re.match(r"\s*[/\]]", after) else None
        elif bare == "[" and at == 0 and _PAIR.match(text, token.start()):
            what = Meaning("epoch")  # [2,  4000] loss: 1.9
        elif at and bare == "," and previous is not None and previous.kind == "epoch" and after.startswith("]"):
            what = Meaning("batch")
        elif at and bare == "[" and previous is not None and previous.kind == "loss" and _OF.match(text, token.end()):
            what = Meaning("batch")  # loss: 2.3  [ 6464/60000]
        elif at and bare == "," and previous is not None and previous.kind == "lr" and _in_list(text, token):
            what = Meaning("lr")
        elif at and bare == "(" and after.lstrip().startswith(")"):
            average[at - 1] = token
        elif at > 1 and bare == "(" and after.startswith("%") and text[tokens[at - 1].start() - 1] == "/":
            average[at - 2] = token  # Accuracy: 9830/10000 (98%)
        elif _clock(text, token):
            pass
        elif before.rstrip().endswith("%|#|"):
            what = Meaning("batch")
        elif at == 0 and not bare:
            what = _leading(text, token)
        elif _TRAIN.search(before) and _TRAIN_AFTER.match(text, token.end()):
            what = Meaning("epoch")
        elif at == 0 and bare == "[" and after.startswith("]\t"):
            what = Meaning("step", 9)  # [12]	train-logloss:0.31
        elif bare == "][" and _PLACED.search(text[: token.start()]) and after.startswith("] "):
            what = Meaning("step", 9)
        else:
            what = _named(before)
        if what is not None and after[:1].isalpha() and not unit(after, token[0]):
            what = None
        if (
            what is not None
            and what.kind in ("step", "batch", "epoch", "rank")
            and token[0].lower().strip("+-") in ("nan", "inf")
        ):
            what = None
        if what is not None and after.startswith("%") and what.kind in ("step", "epoch", "batch"):
            what = None
        found.append(what)
        last = token.end()
    for at in range(len(tokens) - 1):  # Train loss 12 2.345: the first is the step
        what, one, two = found[at], tokens[at], tokens[at + 1]
        if what is None or what.kind not in ("loss", "metric") or found[at + 1] is not None or not one[0].isdigit():
            continue
        if text[one.end() : two.start()] in (" ", ": ") and not two[0].isdigit():
            found[at], found[at + 1] = Meaning("step", 5), what
    return found, average


def _named(before: str) -> Meaning | None:
    """What the words before a value say that it is."""
    opened = _OPENING.sub("", before)
    if len(opened) == len(before) and before and not before.endswith((":", "=")):
        return None
    cut = _SEPARATOR.search(opened)
    sure = cut is not None
    rest = opened[: cut.start()] if cut else opened
    rest = rest.rstrip()
    if quoted := _QUOTED.search(rest):
        return meaning(quoted[2], True)
    if rest.endswith(("'", '"', "`")):
        rest = rest[:-1]
    rest = _CLOSED.sub("", rest).replace("'s ", " ").rstrip()
    key = _KEY.search(rest.rpartition("(")[2] if "(" in rest else rest)
    words = [word for word in key[0].split() if any(map(str.isalnum, word))] if key else []
    if sure and before.endswith(":") and key and rest[: key.start()].endswith(":") and not key[0].startswith(" "):
        return None  # module:function:line of a logger
    if len(words) > 1 and words[-2] == "at" and (step := meaning(words[-1])) is not None and step.kind == "step":
        return step
    for count in range(min(5, len(words)), 0, -1):
        what = meaning(" ".join(words[-count:]), sure)
        if what is None:
            continue
        before_it = words[-count - 1].lower() if count < len(words) else ""
        if before_it in _SPOILING or (what.kind in ("step", "epoch") and before_it in _COUNTED):
            return None
        if not sure and what.kind == "lr" and "of" in words[-count:]:
            continue
        return what
    return None


def _leading(text: str, token: re.Match[str]) -> Meaning | None:
    """A number that begins a line: 861/9500 of char-rnn, 100/100 of Keras, or the step of a list."""
    if not token[0].isdigit():
        return None
    behind = text[token.end() :]
    if total := re.match(r"\s*/\s*\d+(?![\d/:])", behind):
        rest = behind[total.end() :].lstrip()
        if re.match(r"\d{1,2}:\d\d", rest):  # 05/14 20:13:00
            return None
        return Meaning("batch" if rest.startswith(("━", "- ", "[")) else "step", 5)
    return (
        Meaning("step", 5)
        if re.match(r"(?:\s|:\s|\s*[|,;]\s)", behind) and not re.match(r"\s*\d+[:/\-]", behind)
        else None
    )


def _clock(text: str, token: re.Match[str]) -> bool:
    """The digits belong to a time of day, a date or an address."""
    start, end = token.span()
    follows = text[end : end + 2]
    precedes = text[max(0, start - 2) : start]
    return (follows[:1] == ":" and follows[1:].isdigit()) or (precedes[1:] == ":" and precedes[:1].isdigit())


def _in_list(text: str, token: re.Match[str]) -> bool:
    head = text[max(0, token.start() - 400) : token.start()]
    return head.rfind("[") > head.rfind("]")


def unit(after: str, digits: str) -> float | None:
    """The factor of a letter behind a number: 2.3K, 1.5M; None where the letters are another unit."""
    if len(after) > 1 and (after[1].isalnum() or after[1] == "/"):
        return None
    return {"K": 1e3, "k": 1e3, "M": 1e6, "B": 1e9}.get(after[0])
