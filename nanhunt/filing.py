"""Of which faults a watch writes a capsule: of the first in different places, and then it takes nothing more."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from .finding import Finding
from .options import Options
from .verdict import Origin

if TYPE_CHECKING:
    from .capsule.catch import Catch
    from .lineage import Keep
    from .observer import Observer
    from .scene import Scene

_MOST = 3


class Filing:
    """The capsules of one watch; without a folder for them, and without a hunt that writes its own, it does nothing.

    Attributes:
        catch: what takes copies of what suspected births were given; None where there is nothing to write.
        told: gives a finding as whoever runs the watch tells it: a trainer has steps of its own.
    """

    def __init__(self, options: Options, failed: Callable[[Exception], object]) -> None:
        self.catch: Catch | None = options.catch
        self.told: Callable[[Finding], Finding] = lambda finding: finding
        self._failed = failed
        self._folder, self._slim = options.capsule, options.slim
        self._places: set[tuple[str | None, ...]] = set()
        if self._folder is not None:
            from .capsule.catch import Catch  # which a watch without a capsule never needs

            self.catch = Catch(most=int(options.max_mb * 1e6), ring=options.ring)

    def join(self, scene: Scene, observer: Observer) -> None:
        """Be told of births and batches and, of a call that is known beforehand, stand before it."""
        scene.catch = self.catch
        if self.catch is not None and self.catch.target is not None:
            self.catch.listen(observer)

    @property
    def keep(self) -> Keep | None:
        """What the op level tells of each birth."""
        return self.catch.op if self.catch is not None else None

    def filed(self, finding: Finding, origin: Origin) -> Finding:
        """The finding of a fault; where its capsule lies, if there is to be one. A failure is told, and no more."""
        try:
            return self._filed(finding, origin)
        except Exception as failure:
            self._failed(failure)
        return finding

    def _filed(self, finding: Finding, origin: Origin) -> Finding:
        catch = self.catch
        place = (finding.phase, finding.module, finding.tensor if finding.module is None else None)
        if catch is None or finding.handled is not None:
            return finding
        if catch.closed or place in self._places:
            catch.forget(origin)
            return finding
        parts = catch.parts(finding, origin)
        if self._folder is None:
            catch.found = catch.found or parts
            return finding
        from .capsule.writing import kept

        self._places.add(place)
        if finding.module is not None:
            catch.written.add((finding.phase, finding.module))
        told = self.told(finding)
        for one in parts.hashes:
            one["step"] = self.told(dataclasses.replace(finding, step=one["step"])).step
        context = kept(told, parts, self._folder, slim=self._slim).context
        catch.forget(origin)  # what was copied of it is written
        if len(self._places) >= _MOST:
            catch.close()
        return dataclasses.replace(finding, context=context)

    def forget(self, origin: Origin) -> None:
        """It was harmless."""
        if self.catch is not None:
            self.catch.forget(origin)

    def end_step(self) -> None:
        """What nothing has confirmed by now was harmless."""
        if self.catch is not None:
            self.catch.end_step()
