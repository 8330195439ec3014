"""Lines of text, read by their shape: what a line says is worked out once for all lines that differ in digits only."""

from __future__ import annotations

import re
from typing import NamedTuple

from . import dialects
from .entry import Entry, Fields
from .events import Message, message
from .names import Meaning
from .spellings import number
from .values import meanings, unit

# Splits a line into what stays and what changes. Signs and NaN words belong to what stays: a shape has them fixed.
_DIGITS = re.compile(r"(?<![A-Za-z_0-9.@])([0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?)")
# All values of a line, for working out a shape.
_VALUE = re.compile(
    r"(?<![A-Za-z_0-9.@])[-+]?(?:\d+\.\#(?:QNAN|SNAN|INF|IND)\d*|\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d|,\d)"
    r"|\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?"
    r"|(?:[nN][aA][nN]|[iI][nN][fF](?:inity|INITY)?)(?![A-Za-z_0-9]| iterations?\b))"
)
_BAR = re.compile(r"%\|[^|]*\|")
_RULE = re.compile(r"(?:[━╸╺─▏▎▍▌▋▊▉█░▒▓#>\u2588]|\x1b\[[0-9;]*m){2,}|\[[=>.\-# ]{4,}\]")
_HEAD_VALIDATION = re.compile(
    r"(?<![\w./\-])(?:valid(?:ation)?|val|eval(?:uation)?|test(?:ing)?|dev)(?: set)?(?![\w./\-])"
    r"|\((?:val|test)\)|^\s*\* ",
    re.I,
)
_HEAD_TRAINING = re.compile(r"(?<![\w./\-])train(?:ing|_inner)?(?![\w./\-])", re.I)
_SILENT = re.compile(r"loss scale: .*number of skipped iterations:\s*0\b")
_CODE = re.compile(r"\s*(?:File \"|raise |if |def |assert |return |import |from \S+ import|self\.|#|print\(|logger\.)")
_SUMMARY = re.compile(r"train_runtime|Averaged stats|\|\s*epoch \d+ \| (?:train )?loss")
_SETTINGS = re.compile(r"Namespace\(|Arguments?\(|Config\(|^\s*(?:usage|python|torchrun|accelerate|srun|deepspeed) ")
_TELLING = re.compile(r"loss|nan|grad|scale|norm|overflow", re.I)
_PREFIX = re.compile(  # date, level and place of a logger
    r"^(?:\s*(?:[\[(]?\d[\d\-/:,. TZ]{7,32}[\])]?|\[?(?:INFO|WARN(?:ING)?|ERROR|DEBUG)\]?"
    r"|\[[\w.]+\.py:[^\]]*\]|[|\-:]))+\s*"
)
_LIMIT = 8192
# A line without any of these says nothing of a step.
_WORDS = (
    "loss norm step iter epoch batch update val test eval train acc scal overflow nan nll cost entropy xent mse"
    " elbo objective metric bleu rouge wer cer auc auroc dice psnr ssim fid f1 miou map iou perplex ppl mem score"
    " lr learning error skip infinit non-finite explod diverg hella dev gnorm found_inf found grad top1 top5"
    " recall prec bpc bpb mae rmse kappa ndcg mrr it= it: itr bce rank ce= ce: ce_ em= em:"
).split()


class Shape(NamedTuple):
    """What all lines of one look say.

    Attributes:
        fields: which value goes where; None where no record is in it.
        places: of each value the number of its digits among those of the line, and a factor; or None and the value.
        fixed: the digits alone do not give the values: each line has to be worked out anew.
        dialect: name of the format.
        message: it is a message of the program.
        base: number of the first epoch, where the look of the line tells it.
        silent: the loss is left out, and that means it isn't above zero.
        numbers: it holds numbers, read or not.
        bar: it is a progress bar without a value, or code.
        strange: it has words as a record, or the header of a table, may have them.
    """

    fields: Fields | None = None
    places: tuple[tuple[int | None, float], ...] = ()
    fixed: bool = True
    dialect: str = ""
    message: Message | None = None
    base: int | None = None
    silent: bool = False
    numbers: bool = False
    bar: bool = False
    strange: bool = True


class Shapes:
    """Reads lines by their shapes, and remembers at most some thousands of these."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], Shape] = {}

    def read(self, text: str) -> tuple[Shape, Entry | None]:
        """The shape of a line, and what it says: None where it says nothing of a step."""
        if "%|" in text:
            text = _BAR.sub("%|#|", text)
        elif "━" in text or "[=" in text or "[." in text or "[>" in text:
            text = _RULE.sub("━", text)
        parts = _DIGITS.split(text)
        look = tuple(parts[::2])
        shape = self._known.get(look)
        if shape is None:
            shape = work_out(text)
            if len(text) <= 4000:
                if len(self._known) >= _LIMIT:
                    self._known.clear()
                self._known[look] = shape
        if shape.fields is None and shape.message is None:
            return shape, None
        if not shape.fixed:
            shape = work_out(text)
        if shape.message is not None:
            return shape, _event(text)
        fields = shape.fields
        if fields is None:
            return shape, None
        values = [factor if at is None else float(parts[2 * at + 1]) * factor for at, factor in shape.places]
        entry = fields.entry(values)  # type: ignore[arg-type]  # none of these is missing
        if shape.base is not None:
            entry.base = shape.base
        if shape.silent:
            entry.silent = True
        return shape, entry


def work_out(text: str) -> Shape:
    """The shape of a line that has a new look."""
    lower = text[:20000].lower()
    if not any(word in lower for word in _WORDS):  # most of what is no record of a training
        return Shape(numbers=_DIGITS.search(text, 0, 2000) is not None, bar=_is_bar(text), strange=False)
    told = message(text)
    tokens = list(_VALUE.finditer(text[:20000]))[:400]
    if _CODE.match(text):
        return Shape(bar=True)
    if not tokens or _SETTINGS.search(text):
        return Shape(message=told, dialect=dialects.of_message(text) if told else "", numbers=bool(tokens))
    found, average = meanings(text, tokens)
    kept = [at for at, what in enumerate(found) if what is not None and what.kind != "ignored"]
    kinds = {what.kind for at in kept if (what := found[at]) is not None}
    trains = kinds & {"loss", "losses", "grad_norm"}
    if told is not None and (told.strong or not trains):
        return Shape(message=told, dialect=dialects.of_message(text), numbers=True)
    bar = "%|#|" in text
    if bar and "{" in text[text.index("%|#|") :]:  # a dict printed behind the bar: its count is the bar's own
        kept = [at for at in kept if (what := found[at]) is not None and what.kind not in ("batch", "batches")]
    validation = _validates(text, tokens, found, kept, kinds)
    if validation:
        kept = [
            at for at in kept if (what := found[at]) is not None and what.kind not in ("batch", "batches", "epochs")
        ]
    kinds_of: list[Meaning | None] = []
    chosen: list[re.Match[str]] = []
    for at in kept:
        what = found[at]
        assert what is not None
        token = tokens[at]
        if validation and what.kind in ("loss", "losses", "score"):
            what = Meaning("metric", 0, f"val {what.name}".strip())
            token = average.get(at, token)
        kinds_of.append(what)
        chosen.append(token)
    if kinds & {"score"} and not validation and not trains and _HEAD_TRAINING.search(text):
        return Shape(numbers=True)  # an accuracy on the training set
    fields = Fields(kinds_of, validation=validation, summary=bool(_SUMMARY.search(text)))
    places, fixed = _places(text, chosen)
    silent = not kinds & {"loss", "losses"} and bool(_SILENT.search(text))
    base = None
    if "batch" in kinds:
        base = (
            0
            if re.search(r"Epoch: \[|Train(?:ing)?: \[?\d", text)
            else 1
            if re.search(r"Epoch(?:\(train\))?\s*\[", text)
            else None
        )
    if not fields.rich or (bar and not trains and "metric" not in kinds):
        return Shape(numbers=True, bar=bar or _is_bar(text))
    return Shape(fields, places, fixed, dialects.of_line(text), None, base, silent, True, bar)


def _event(text: str) -> Entry | None:
    told = message(text)
    if told is None:
        return None
    made = Entry()
    made.event = True
    made.step, made.rank, made.loss = told.step, told.rank, told.loss
    made.loss_scale, made.loss_scale_after = told.before, told.after
    made.skips = 1.0 if told.kind == "skipped" else None
    made.note = shortened(text)
    return made


def shortened(text: str) -> str:
    """A message as it fits into a report."""
    text = " ".join(text[:1000].split())
    text = _PREFIX.sub("", text)
    return text if len(text) <= 160 else text[:157] + "..."


def sample(line: int, text: str) -> str:
    """A line that was not understood, to be shown."""
    return f"{line}: {text.strip()[:120]}"


def _is_bar(text: str) -> bool:
    return "%|" in text or "━" in text or "it/s]" in text or "s/it]" in text


def telling(text: str) -> bool:
    """The line looks as if it held something that matters."""
    return bool(_TELLING.search(text[:2000]))


def _places(text: str, chosen: list[re.Match[str]]) -> tuple[tuple[tuple[int | None, float], ...], bool]:
    """Where among a line's digits each value stands; False with it where digits alone don't give the values."""
    digits = {found.end(): at for at, found in enumerate(_DIGITS.finditer(text))}
    spans = {found.end(): found.start() for found in _DIGITS.finditer(text)}
    places: list[tuple[int | None, float]] = []
    fixed = True
    for token in chosen:
        start, end = token.span()
        after = text[end : end + 2]
        factor = unit(after, token[0]) or 1.0 if after[:1].isalpha() else 1.0
        sign = -1.0 if token[0].startswith("-") else 1.0
        plain = spans.get(end) == start or (spans.get(end) == start + 1 and token[0][0] in "+-")
        if plain and "," not in token[0]:
            places.append((digits[end], sign * factor))
            continue
        value = number(token[0])
        places.append((None, float("nan") if value is None else value * factor))
        fixed = fixed and not any(c.isdigit() for c in token[0].replace("1.#", ""))
    return tuple(places), fixed


def _validates(
    text: str, tokens: list[re.Match[str]], found: list[Meaning | None], kept: list[int], kinds: set[str]
) -> bool:
    """The whole line speaks of a validation set: the words before its first measure say so."""
    if not kinds & {"loss", "losses", "score"} or kinds & {"grad_norm", "lr", "loss_scale"}:
        return False
    measured = [
        at for at in kept if (what := found[at]) is not None and what.kind in ("loss", "losses", "score", "metric")
    ]
    head = text[: tokens[measured[0]].start()] if measured else text
    return bool(_HEAD_VALIDATION.search(head)) and not _HEAD_TRAINING.search(head)
