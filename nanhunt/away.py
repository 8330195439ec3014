"""A watch that lets its model go for a moment: is anybody else there to keep it?"""

from __future__ import annotations

import weakref

from torch import nn

from .watcher import Watch

_NOBODY = nn.Module()  # stands for a model that is let go


class Away:
    """Takes the model from the names of a watch, so that it dies where they alone have kept it.

    What else the watch knows of the model (identities, paths) stays, so that nothing is learnt anew by `back`.
    """

    __slots__ = ("buffers", "by_path", "model", "watch")

    def __init__(self, one: Watch) -> None:
        names = one._observer.names
        self.watch, self.model = one, weakref.ref(names.model)
        self.by_path = {path: weakref.ref(module) for path, module in names.by_path.items()}
        self.buffers = {name: (weakref.ref(module), key) for name, (module, key) in names.buffers.items()}
        names.model, names.by_path, names.buffers = _NOBODY, {}, {}

    def back(self) -> bool:
        """Give it back to the watch; False when it is no more."""
        model = self.model()
        if model is None:
            return False
        names = self.watch._observer.names
        names.model = model
        names.by_path = {path: there for path, ref in self.by_path.items() if (there := ref()) is not None}
        names.buffers = {
            name: (there, key) for name, (ref, key) in self.buffers.items() if (there := ref()) is not None
        }
        return True
