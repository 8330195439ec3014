"""A program run as python would run it: a script, a module, code, a folder or a zip file, standard input."""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import io
import linecache
import os
import pkgutil
import sys
import textwrap
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter, ModuleSpec, PathFinder, SourceFileLoader, SourcelessFileLoader
from types import CodeType, ModuleType
from typing import Any

from .errors import UsageError


class CannotRun(UsageError):
    """There is no such program; nothing of it has run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What stands after `python` on a command line: `script`, `-m module` or `-c code`, and the program's arguments."""

    how: str  # "script", "module" or "code"
    what: str
    args: tuple[str, ...] = ()

    def run(self) -> None:
        """Become this program: `__main__`, `sys.argv` and `sys.path[0]` are its own from here on.

        Raises:
            CannotRun: when there is no such file or module.
            BaseException: whatever the program ends with, SystemExit among it.
        """
        main = ModuleType("__main__")
        if sys.version_info < (3, 14):
            main.__annotations__ = {}
        main.__builtins__ = builtins  # type: ignore[attr-defined]
        find = {"script": self._script, "module": self._module, "code": self._code}[self.how]
        code = find(main)
        sys.modules["__main__"] = main
        exec(code, vars(main))

    # Each of these takes the name that sys.argv begins with and the place where imports look first from the
    # command line, as python does, and says of __main__ what python says.

    def _code(self, main: ModuleType) -> CodeType:
        self._begin("-c", "")
        text = self.what if sys.version_info < (3, 14) else textwrap.dedent(self.what)
        if sys.version_info >= (3, 13):  # from then on tracebacks show the lines of such code
            linecache.cache["<string>"] = (len(text), None, text.splitlines(keepends=True), "<string>")
        main.__loader__ = BuiltinImporter
        return _compiled(main, text, "<string>")

    def _script(self, main: ModuleType) -> CodeType:
        if self.what == "-":
            self._begin("-", "")
            vars(main).update(__file__="<stdin>", __loader__=BuiltinImporter, **_cached(None))
            return _compiled(main, sys.stdin.buffer.read(), "<stdin>")
        path = _absolute(self.what)
        if pkgutil.get_importer(path) is not None:
            self._begin(self.what, path)
            spec = PathFinder.find_spec("__main__", [path])
            if spec is None:
                raise CannotRun(f"can't find '__main__' module in {self.what!r}")
            return _of_spec(main, spec)
        try:
            with io.open_code(path) as file:
                source = file.read()
        except OSError as error:
            raise CannotRun(f"can't open file {path!r}: [Errno {error.errno}] {error.strerror}") from None
        self._begin(self.what, os.path.dirname(os.path.realpath(path)))
        vars(main).update(__file__=path, **_cached(None))
        if path.endswith(".pyc"):
            main.__loader__ = SourcelessFileLoader("__main__", path)
            code = main.__loader__.get_code("__main__")
            assert code is not None  # a file that is none raises ImportError
            return code
        main.__loader__ = SourceFileLoader("__main__", path)
        return _compiled(main, source, path)

    def _module(self, main: ModuleType) -> CodeType:
        self._begin("-m", os.getcwd())
        spec = _found(self.what)
        if spec is not None and spec.submodule_search_locations is not None:
            package, spec = spec.name, _found(f"{spec.name}.__main__")
            if spec is None:
                raise CannotRun(
                    f"No module named {package}.__main__; {package!r} is a package and cannot be directly executed"
                )
        if spec is None:
            raise CannotRun(f"No module named {self.what}")
        code = _of_spec(main, spec)
        sys.argv[0] = str(spec.origin)
        return code

    def _begin(self, name: str, place: str) -> None:
        sys.argv[:] = [name, *self.args]
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = place


def _absolute(path: str) -> str:
    """As python writes it: not normalised, links left alone."""
    return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)


def _cached(path: str | None) -> dict[str, Any]:
    return {"__cached__": path} if sys.version_info < (3, 15) else {}


def _compiled(main: ModuleType, source: str | bytes, filename: str) -> CodeType:
    sys.modules["__main__"] = main  # a program with a syntax error has a __main__, too
    return compile(source, filename, "exec", dont_inherit=True)


def _found(name: str) -> ModuleSpec | None:
    """The spec of a module; the packages it lies in are imported, and what goes wrong in them is theirs."""
    parent = name.rpartition(".")[0]
    if parent:
        try:
            importlib.import_module(parent)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{parent}.".startswith(f"{error.name}."):
                raise
    try:
        return importlib.util.find_spec(name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise CannotRun(f"No module named {name} ({type(error).__name__}: {error})") from None


def _of_spec(main: ModuleType, spec: ModuleSpec) -> CodeType:
    loader: Any = spec.loader
    if not hasattr(loader, "get_code"):
        raise CannotRun(f"No code object available for {spec.name}")
    vars(main).update(
        __file__=spec.origin, __loader__=loader, __package__=spec.parent, __spec__=spec, **_cached(spec.cached)
    )
    sys.modules["__main__"] = main
    code = loader.get_code(spec.name)
    if not isinstance(code, CodeType):
        raise CannotRun(f"No code object available for {spec.name}")
    return code
