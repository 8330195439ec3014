"""Exceptions of all kinds on their way through forwards, backwards and watches."""

from typing import Any

from torch import Tensor, nn

from .calls import Calls
from .harness import Spans
from .models import batch, mlp, situation, squared, step


class _Stopped(Exception):
    pass


@situation()
def exception_in_forward(watch: Spans) -> object:
    """An exception leaves forward and the watch as it was raised; the next watch works."""

    def body(self: Any, x: Tensor, fail: bool) -> Tensor:
        y = self.a(x)
        if fail:
            raise _Stopped("user error 7")
        return self.b(y)

    model, errors = Calls(body, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), []
    for fail in (True, False, True):
        try:
            with watch(model):
                squared(nn.Sequential(model.a)(batch()) + model(batch(), fail)).backward()
        except _Stopped as error:
            errors.append(error)
    return {"model": model, "errors": errors}


@situation()
def exception_caught_inside(watch: Spans) -> object:
    """A forward that tries one path, catches the error of a child and takes another path."""

    def body(self: Any, x: Tensor) -> Tensor:
        for child in (self.bad, self.deep, self.good):
            try:
                x = x + child(x)
            except RuntimeError:
                continue
        return self.good(x)

    deep = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(3, 3)))
    return step(watch, Calls(body, bad=nn.Linear(5, 5), deep=deep, good=nn.Linear(4, 4)), batch())


@situation()
def keyboard_interrupt(watch: Spans) -> object:
    """KeyboardInterrupt, SystemExit and StopIteration pass through a forward and the watch."""
    seen: list[BaseException] = []

    def body(self: Any, x: Tensor, error: BaseException | None) -> Tensor:
        y = self.a(x)
        if error is not None:
            raise error
        return y

    model = nn.Sequential(Calls(body, a=nn.Linear(4, 4)))
    for error in (KeyboardInterrupt(), SystemExit(3), StopIteration(4), GeneratorExit(), MemoryError("m")):
        try:
            with watch(model):
                model[0](batch(), error)
        except BaseException as caught:
            seen.append(caught)
    return {"errors": seen, **step(watch, model[0], batch(), None)}


@situation()
def exception_in_backward(watch: Spans) -> object:
    """A user's tensor hook raises in backward; a later backward works."""
    model, errors = mlp(4, 4, 3), []

    def fail(grad: Tensor) -> None:
        raise _Stopped("in backward")

    with watch(model):
        out = model(batch())
        out.register_hook(fail)
        try:
            squared(out).backward()
        except _Stopped as error:
            errors.append(error)
        squared(model(batch())).backward()
    return {"model": model, "errors": errors}


@situation()
def generator_watched_partly(watch: Spans) -> object:
    """A training loop that is a generator: the watch opens in one next() and closes in another."""
    model = mlp(4, 4, 3)

    def loop() -> Any:
        with watch(model):
            for _ in range(3):
                loss = squared(model(batch()))
                loss.backward()
                yield loss

    running = loop()
    losses = [next(running), next(running)]
    model(batch())
    running.close()
    return {"model": model, "losses": losses}
