"""What stands before a program on the command line: the options of the launcher, and where the program begins."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Container

from . import __version__
from .program import Program
from .report.files import MAX_MB, MOST_RING
from .verdict import KINDS

_USAGE = """\
nanhunt [options] (SCRIPT | -m MODULE | -c CODE) [arguments of the program]
       nanhunt log [--json | --html] [-o OUT] [--ranks] FILE...
       nanhunt audit [options] MODULE:FACTORY
       nanhunt compare [--a SETTING] [--b SETTING] [options] MODULE:FACTORY
       nanhunt profile [--steps N] [--dtype DTYPE] [options] MODULE:FACTORY
       nanhunt show [--json | --html] [-o OUT] FILE...
       nanhunt replay [--model MODULE:FACTORY] [--dtype DTYPE] [--bisect] CAPSULE
       nanhunt demo [--dtype DTYPE] [--save FILE]"""
_ABOUT = """\
Finds where the first NaN or Inf of a PyTorch step was made: which module, which operation, with which
numbers, and what to do about it.

Runs a program as python would run it, and watches every model that it calls, forward and backward.
Results are not changed, bit for bit. Options of nanhunt come before the program, all that comes after
it belongs to the program. SCRIPT may be a folder or a zip file with a __main__.py, or - for standard
input.
"""
_EXAMPLES = """\
examples:
  python -m nanhunt train.py --epochs 3            stop at the first fault and print the page about it
  python -m nanhunt -o report train.py             and write report/finding.json and report/finding.html
  python -m nanhunt --steps 11900: train.py        a fault at step 12 000: pay nothing before it is near
  python -m nanhunt --detail op -m pkg.train       every operation is watched: the most that can be known
  python -m nanhunt --on-hit record -o a.json train.py      go on, and keep what was found
  torchrun --nproc-per-node 2 -m nanhunt train.py           each rank under its own watch
  accelerate launch -m nanhunt train.py

  python -m nanhunt log train.log                  what went wrong in a run, from its log alone
  python -m nanhunt log --html run1.csv run2.csv   two runs as a page for a browser, in run1.html
  python -m nanhunt audit train.py:build           what is wrong before the first step
  python -m nanhunt compare train.py:build         is it the precision, and in which module
  python -m nanhunt profile train.py:build         can this run move to float16, and what stands in the way
  python -m nanhunt show a.json b.json             read saved findings again
  python -m nanhunt show --html a.json             the same as a page for a browser, in a.html
  python -m nanhunt --capsule faults train.py      keep what the fault was made of, in a folder of its own
  python -m nanhunt replay faults/step12.norm      run it again, on any machine
  python -m nanhunt demo                           see a real float16 overflow found, in under a minute

in a program, around any number of steps:
  import nanhunt
  with nanhunt.watch(model):
      train(model)

exit code: the program's own; 1 when a fault was found (in a child process, too) in a program that would
have ended with 0; 2 when the program could not be started, or the report could not be written. A script
that is called as a command (audit, compare, demo, log, profile, replay, show) is run as ./show.
NANHUNT=0 in the environment turns every watch off (the program runs alone), NANHUNT=1 is the default.
"""


def parser() -> argparse.ArgumentParser:
    """What `nanhunt` itself understands, apart from its commands."""
    made = argparse.ArgumentParser(
        prog="nanhunt",
        usage=_USAGE,
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--version", action="version", version=f"nanhunt {__version__}")
    watch = made.add_argument_group("what to watch")
    watch.add_argument(
        "--detail",
        choices=("auto", "module", "op"),
        default="auto",
        help="module: ranges and the module; op: every operation, slow; auto (default): module, and in forward "
        "the operation, by running the culprit again on its own inputs",
    )
    watch.add_argument(
        "--steps",
        metavar="A:B",
        type=_steps,
        help="only steps A <= step < B, counted from 0; A: and :B leave the other end open",
    )
    watch.add_argument("--every", metavar="N", type=_count, default=1, help="only every N-th step")
    watch.add_argument(
        "--forward-only",
        dest="backward",
        action="store_false",
        help="look at forward and the loss alone: cheaper, and faults of backward and of updates show later",
    )
    watch.add_argument(
        "--kinds",
        metavar="KIND,...",
        type=_kinds,
        default=KINDS,
        help=f"which values count: {', '.join(KINDS)} (default: all)",
    )
    watch.add_argument(
        "--allow",
        metavar="PATTERN",
        action="append",
        default=[],
        help="modules whose values never count, such as blocks.*.gate; may be given several times (to look at some "
        "modules only, use nanhunt.watch(model, only=..., skip=...) in the program: such patterns belong to one model)",
    )
    watch.add_argument(
        "--compiled",
        choices=("leave", "eager"),
        default="leave",
        help="models under torch.compile: leave (default) them compiled, with the checks inside the graph where that "
        "can be done, or run them eagerly",
    )
    hit = made.add_argument_group("what to do about a fault")
    hit.add_argument(
        "--on-hit",
        choices=("raise", "warn", "record"),
        default="raise",
        help="raise (default) an exception in the step, or warn, or only record it, and go on",
    )
    hit.add_argument(
        "--stop",
        choices=("confirmed", "first"),
        default="confirmed",
        help="confirmed (default): once it has reached an output, the loss, a gradient or a weight; first: where "
        "it is born",
    )
    hit.add_argument(
        "-o",
        "--report",
        metavar="PATH",
        help="write what is found to PATH: a file that ends in .json or .html, or a folder for both (a new one whose "
        "name has a suffix ends with /); of several ranks each writes its own, finding.rank3.json",
    )
    hit.add_argument(
        "--capsule",
        metavar="DIR",
        help="keep a capsule of the fault in a new folder inside DIR: the inputs and weights of its module, the "
        "operands of its operation, the batch ; nanhunt replay runs it again",
    )
    hit.add_argument(
        "--max-mb", metavar="MB", type=_megabytes, default=MAX_MB, help="how large a capsule may be (default: 256)"
    )
    hit.add_argument("--slim", action="store_true", help="of a capsule keep the failing samples and rows alone")
    hit.add_argument(
        "--ring",
        metavar="K",
        type=_batches,
        default=0,
        help="keep copies of the last K batches for a capsule; each step pays for one copy of its batch (default: 0)",
    )
    hit.add_argument("-q", "--quiet", action="store_true", help="no summary on stderr at the end")
    run = made.add_argument_group("what to run")
    run.add_argument("-m", metavar="MODULE", help="a module, as python -m does")  # split takes these two
    run.add_argument("-c", metavar="CODE", help="code, as python -c does")
    return made


def split(
    given: list[str], parser: argparse.ArgumentParser, *, words: Container[str] = ()
) -> tuple[list[str], Program | None]:
    """The options that are ours, and the program with all that belongs to it; None where none is named.

    A script that bears one of `words` is refused: the word means a command of ours, which stands first.
    """
    single = {word for action in parser._actions for word in action.option_strings if len(word) == 2}
    valued = {word for action in parser._actions if action.nargs is None for word in action.option_strings}
    ours: list[str] = []
    left = list(given)
    while left:
        word = left.pop(0)
        if word[:2] in ("-m", "-c"):
            if word in ("-m", "-c") and not left:
                parser.error(f"argument {word}: expected one argument")
            what = word[2:] or left.pop(0)
            return ours, Program(how="module" if word[1] == "m" else "code", what=what, args=tuple(left))
        if word == "--" and left:
            return ours, Program(how="script", what=left[0], args=tuple(left[1:]))
        if word in words:
            parser.error(f"options of {word} come after the word: nanhunt {word} --help")
        if word == "-" or not word.startswith("-"):
            return ours, Program(how="script", what=word, args=tuple(left))
        if word[:1] == "-" and word[1:2] != "-" and word not in single:  # -qo PATH
            flags = word[1:-1]
            if flags and f"-{word[-1]}" in valued and all(f"-{flag}" in single - valued for flag in flags):
                ours += [f"-{flag}" for flag in flags]
                word = f"-{word[-1]}"
        if word in valued and left:
            # As one word: a value may begin with a dash (-inf), and argparse takes such a one for an option.
            value = left.pop(0)
            word = f"{word}={value}" if word.startswith("--") else word + value
        ours.append(word)
    return ours, None


def _steps(text: str) -> tuple[int, int]:
    first, colon, end = text.partition(":")
    try:
        steps = int(first or 0), int(end or sys.maxsize)
    except ValueError:
        steps = 0, 0
    if not colon or not 0 <= steps[0] < steps[1]:
        raise argparse.ArgumentTypeError(f"{text!r}: give A:B with 0 <= A < B, such as 100:200, 100: or :200")
    return steps


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number of steps, 1 or more")
    return int(text)


def _megabytes(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1 << 40:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of megabytes above 0")
    return number


def _batches(text: str) -> int:
    if not text.isdecimal() or int(text) > MOST_RING:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number of batches from 0 to {MOST_RING}")
    return int(text)


def _kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(word.strip() for word in text.split(","))
    for kind in kinds:
        if kind not in KINDS:
            raise argparse.ArgumentTypeError(f"{kind!r} is not known: use one or more of {','.join(KINDS)}")
    return kinds
