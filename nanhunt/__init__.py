"""nanhunt: where the first NaN or Inf of a PyTorch step was made, by what, and why."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .auditing.front import audit as audit
    from .capsule.replaying import Capsule as Capsule
    from .capsule.replaying import load_capsule as load_capsule
    from .errors import NanhuntError as NanhuntError
    from .errors import NonFiniteError as NonFiniteError
    from .errors import NonFiniteWarning as NonFiniteWarning
    from .errors import SymptomError as SymptomError
    from .errors import SymptomWarning as SymptomWarning
    from .errors import UsageError as UsageError
    from .finding import Finding as Finding
    from .finding import TensorStats as TensorStats
    from .hunter import hunt as hunt
    from .logs.reading import read_log as read_log
    from .monitor.front import Monitor as Monitor
    from .precision.control import compare as compare
    from .precision.likeness import Likeness as Likeness
    from .precision.profiles import Profile as Profile
    from .precision.profiling import profile as profile
    from .remarks import Remark as Remark
    from .remarks import Remarks as Remarks
    from .watcher import Watch as Watch
    from .watching import watch as watch

# Public name -> the file it lives in, loaded when it is first used: importing nanhunt does not import torch.
_WHERE = {
    "Capsule": "capsule.replaying",
    "Finding": "finding",
    "Likeness": "precision.likeness",
    "Monitor": "monitor.front",
    "NanhuntError": "errors",
    "NonFiniteError": "errors",
    "NonFiniteWarning": "errors",
    "Profile": "precision.profiles",
    "Remark": "remarks",
    "Remarks": "remarks",
    "SymptomError": "errors",
    "SymptomWarning": "errors",
    "TensorStats": "finding",
    "UsageError": "errors",
    "Watch": "watcher",
    "audit": "auditing.front",
    "compare": "precision.control",
    "hunt": "hunter",
    "load_capsule": "capsule.replaying",
    "profile": "precision.profiling",
    "read_log": "logs.reading",
    "watch": "watching",
}

__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'nanhunt' has no attribute {name!r}: it offers {', '.join(__all__)}")
    value = getattr(importlib.import_module("." + _WHERE[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
