"""Front door: `python -m nanhunt train.py`, which watches every model of a program that knows nothing of it."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from . import closing
from .errors import NonFiniteError, enabled
from .program import CannotRun, Program
from .word import Word

if TYPE_CHECKING:
    from .finding import Finding
    from .roots import Roots

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
NAME = "finding"  # of the files in a folder of reports


class Launch:
    """One program under watch: what it runs with, and what is told of it at its end.

    Args:
        options: those of `nanhunt.watch` that do not belong to one model.
        report: a folder (JSON and page), or a file that ends in .json or .html; None for no report.
        quiet: say nothing on stderr at the end.
        word: the file of `Word`, of a process that was started by one under watch.
    """

    def __init__(self, *, options: dict[str, Any], report: str | None, quiet: bool, word: str | None = None) -> None:
        self.roots: Roots | None = None
        self._options, self._quiet = options, quiet
        self._report = None if report is None else os.path.abspath(report)  # the program may change its folder
        self._process: int | None = os.getpid()
        self._fresh = False  # started afresh by a parent that is under watch
        self._tag = ""
        self._unwritten: set[str] = set()
        self._ended = self._shown = False
        self._failure: str | None = None
        self._word = Word(word)
        self._program = ""
        self._has_children = False

    # --- the program ------------------------------------------------------------------------------

    def run(self, program: Program) -> int:
        """Run it to its end; the exit code is 1 when a fault was found in a program that ends well.

        Raises:
            CannotRun: when there is no such program.
            BaseException: what the program ends with, SystemExit among it; python then prints it as it
                would have done without us.
        """
        if enabled():
            self.board()
        self._program = " ".join([*(["-m"] if program.how == "module" else []), program.what, *program.args])
        end: SystemExit | None = None
        try:
            try:
                program.run()
            except SystemExit as exit_:
                end = exit_
            self._end()
        except CannotRun:
            raise
        except BaseException as error:
            instead = self._stop(error)
            self._print_as_python_does(instead or error)
            if instead is not None:
                raise instead from error
            raise
        code = None if end is None else end.code
        if self._failed() and (code is None or code == 0):
            return 1
        if end is not None:
            raise end
        return 0

    def board(self) -> None:
        """Watch from the moment in which the program imports torch: what it sets before that must still count."""
        when = {"torch": self._torch_came, "multiprocessing.spawn": self._pass_on}
        for name in list(when):
            if name in sys.modules:
                when.pop(name)(sys.modules[name])
        if when:
            sys.meta_path.insert(0, _Import(when))
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_parent=self._begets)

    def _begets(self) -> None:
        self._has_children = True

    def _torch_came(self, torch: ModuleType) -> None:
        try:
            from .roots import Roots

            roots = Roots(**self._options)
            roots.noted = self._noted
            roots.start()
        except Exception as error:  # a torch that is too old, say: the program must run
            self._failure = f"nothing is watched: {type(error).__name__}: {error}"
        else:
            self.roots = roots

    def _pass_on(self, spawn: ModuleType) -> None:
        """Children that are not forked start afresh: let those that import torch watch their own models."""
        prepare: Callable[[str], dict[str, Any]] = vars(spawn)["get_preparation_data"]
        given = {"options": self._options, "report": self._report, "quiet": self._quiet, "word": self._word.path}

        @functools.wraps(prepare)
        def prepared(name: str) -> dict[str, Any]:
            self._begets()
            return {**prepare(name), "nanhunt": _Stowaway(given)}

        setattr(spawn, "get_preparation_data", prepared)  # noqa: B010  (a module, for mypy)

    # --- its end ----------------------------------------------------------------------------------

    def _end(self) -> None:
        """The main thread is through. Threads that python waits for may still train: then we wait, too."""
        others = [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
        if others:
            atexit.register(self._late_end)
            return
        self._stop(None)
        self._tell()

    def _late_end(self) -> None:
        try:
            self._stop(None)
        except NonFiniteError:
            pass  # it is told below
        self._tell()

    def _stop(self, error: BaseException | None) -> NonFiniteError | None:
        """Take the watches off. Of a rank that fails because another has stopped: what it should end with instead."""
        if self.roots is None or self._ended:
            return None
        self._ended = True
        if error is None:
            self.roots.stop()
            return None
        try:
            self.roots.stop(error)
        except NonFiniteError as stop:
            return stop
        return None

    def _of_children(self) -> list[str]:
        """What the child processes of this one have found until now, in words."""
        return self._word.heard() if os.getpid() == self._process else []

    def _failed(self) -> bool:
        return bool(self._of_children()) or (self.roots is not None and self.roots.finding is not None)

    def _print_as_python_does(self, error: BaseException) -> None:
        """Have python print the exception, without the frames that are ours, and speak after it."""
        hook, trace = sys.excepthook, _without_ours(error.__traceback__)
        noted = hasattr(error, "nanhunt_finding") and sys.version_info >= (3, 11)
        self._shown = isinstance(error, NonFiniteError) or noted  # the page is part of what is printed

        def shown(kind: type[BaseException], value: BaseException, _: TracebackType | None) -> None:
            sys.excepthook = hook
            try:
                # Of many ranks that stop for one fault, one prints it.
                if not isinstance(value, NonFiniteError) or self._speaks():
                    hook(kind, value.with_traceback(trace), trace)
            finally:
                self._tell()

        sys.excepthook = shown

    # --- what is told -----------------------------------------------------------------------------

    def _noted(self, finding: Finding) -> None:
        """At once, for a program that may be killed; not each time, for one that finds a hundred."""
        roots = self.roots
        if roots is None:
            return
        count = len(roots.findings)
        written = self._write() if finding is roots.finding or count & (count - 1) == 0 else []
        if finding.handled is None and os.getpid() != self._process:
            at = f": {written[0]}" if written else ""
            self._word.leave(f"a child process ({self._name()}) found: {finding.title()}{at}")
        if finding is roots.finding and os.getpid() != self._process and self._options["on_hit"] == "record":
            self._say(finding.title())  # a child process has no end that we see

    def _tell(self) -> None:
        """The last words: one for a run in which nothing was found."""
        if os.getpid() != self._process:  # a fork that ran on to the end
            return
        written = self._write()
        if not self._speaks():
            return
        for line in [*self._summary(), *(f"report: {path}" for path in written)]:
            self._say(line)

    def _speaks(self) -> bool:
        """Whether this process tells what there is to tell: among several ranks one does."""
        return self.roots is None or self.roots.speaks or bool(self._of_children())

    def _summary(self) -> list[str]:
        children = self._of_children()
        if self._failure is not None:
            return [self._failure, *children]
        roots = self.roots
        if roots is None:
            nothing = ["the program did not import torch, so there was nothing to watch"] if enabled() else []
            return children or nothing
        said = closing.watched(roots, alone=not children and not self._has_children)
        if roots.watched and roots.finding is None:
            said += f", {closing.nothing(roots)}" + (" in this process" if children else "")
        lines = [said, *children]
        if roots.finding is not None and not self._shown:
            lines.append(roots.finding.title() + closing.of_model(roots))
            if self._report is None:
                lines.append("for the page about it, run it again with -o report")
        faults = sum(finding.handled is None for finding in roots.findings)
        if faults > 1:
            lines.append(f"{faults} faults were recorded, the first is told here")
        return lines + [f"not watched: {what}" for what in closing.unwatched(roots)]

    def _say(self, line: str) -> None:
        if self._quiet or sys.stderr is None:
            return
        name = self._name()
        try:
            print(f"nanhunt{f' [{name}]' if name else ''}: {line}", file=sys.stderr, flush=True)
        except (OSError, ValueError):  # nobody listens any more: that must not become the program's end
            pass

    # --- the report -------------------------------------------------------------------------------

    def _write(self) -> list[str]:
        """Write what was found until now, whole or not at all; the paths that were written."""
        roots = self.roots
        if roots is None or self._report is None:
            return []
        from .report.files import write_whole

        written = []
        for path in self._paths(self._report):
            try:
                written.append(str(write_whole(path, closing.written(path, roots, self._program))))
            except Exception as error:
                if path not in self._unwritten and sys.stderr is not None:
                    print(f"nanhunt: error: cannot write the report {path!r}: {error}", file=sys.stderr)
                self._unwritten.add(path)
        return written

    def _paths(self, report: str) -> list[str]:
        stem, kind = os.path.splitext(report)
        name = self._name()
        stem, kinds = (stem, [kind]) if closing.is_file(report) else (os.path.join(report, NAME), [".json", ".html"])
        return [f"{stem}.{name}{kind}" if name else stem + kind for kind in kinds]

    def _name(self) -> str:
        """What tells this process from the others of its run, in lines and names of files; empty where it is alone."""
        rank, in_group = _rank()
        forked = os.getpid() != self._process and not self._fresh
        if in_group and not forked:
            self._tag = _tag(rank or 0)  # also after the group has been taken apart
        if self._tag and not forked:
            return self._tag
        parts = [_tag(rank)] if rank is not None else []
        if os.getpid() != self._process:
            parts.append(f"pid{os.getpid()}")
        return ".".join(parts)


def join(given: dict[str, Any]) -> None:
    """In a child process that was started afresh: watch as its parent does."""
    child = Launch(**given)
    child._process, child._fresh = None, True
    child.board()


class _Stowaway:
    """Travels among the data that a child is prepared with. One that cannot import nanhunt goes on without."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, dict[str, Any]]]:
        text = "try:\n from nanhunt.launcher import join\nexcept ImportError:\n pass\nelse:\n join(given)"
        return exec, (text, {"given": self._given})


class _Import:
    """Stands first among the finders, and calls back when one of some modules has been imported."""

    def __init__(self, when: dict[str, Callable[[ModuleType], None]]) -> None:
        self._when = when

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self._when:
            return None
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next((spec for finder in finders if (spec := finder.find_spec(name, path, target)) is not None), None)
        loader: Any = None if spec is None else spec.loader
        if loader is None or isinstance(loader, type):
            return spec
        load = loader.exec_module

        def then(module: ModuleType) -> None:
            del loader.exec_module
            load(module)
            came = self._when.pop(name, None)
            if not self._when and self in sys.meta_path:
                sys.meta_path.remove(self)
            if came is not None:
                came(module)

        loader.exec_module = then  # on this one object: whoever asks the module for its loader gets the real one
        return spec


# How many processes there are and which this is, as torchrun and accelerate, srun, and mpirun tell it.
_TOLD = (
    ("WORLD_SIZE", "RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
)


def _rank() -> tuple[int | None, bool]:
    """The rank of this process among several, and whether it is in a group now (else its launcher has told it)."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return (int(distributed.get_rank()), True) if distributed.get_world_size() > 1 else (None, False)
    for told_world, told_rank in _TOLD:
        world, rank = os.environ.get(told_world, ""), os.environ.get(told_rank, "")
        if rank.isdigit() and world.isdigit() and int(world) > 1:
            return int(rank), False
    return None, False


def _tag(rank: int) -> str:
    """`rank3`; what an elastic launcher has started anew does not write over what was found before."""
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"rank{rank}.restart{restart}" if restart.isdigit() and int(restart) else f"rank{rank}"


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that python alone would have: where the program's own frames begin."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_HERE):
        trace = trace.tb_next
    return trace
