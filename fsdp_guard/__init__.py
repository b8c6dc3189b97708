"""fsdp_guard: raises when a sharding runtime and the module it wraps no longer agree on the parameters.

The names below are imported when they are first used, so that ``import fsdp_guard`` costs nothing and Lightning is
needed only by those who use its callback.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp_guard.callbacks import FsdpGuard as FsdpGuard
    from fsdp_guard.guard import Guard as Guard
    from fsdp_guard.invariants import inspect as inspect
    from fsdp_guard.report import Divergence as Divergence
    from fsdp_guard.report import DivergenceKind as DivergenceKind
    from fsdp_guard.report import Event as Event
    from fsdp_guard.report import FsdpGuardError as FsdpGuardError
    from fsdp_guard.report import HolderDivergenceError as HolderDivergenceError
    from fsdp_guard.report import NoHoldersError as NoHoldersError
    from fsdp_guard.report import Report as Report
    from fsdp_guard.report import UnsupportedLayoutError as UnsupportedLayoutError
    from fsdp_guard.reporters.wandb import WandbReporter as WandbReporter
    from fsdp_guard.values import refresh as refresh

_HOMES = {
    "Divergence": "fsdp_guard.report",
    "DivergenceKind": "fsdp_guard.report",
    "Event": "fsdp_guard.report",
    "FsdpGuard": "fsdp_guard.callbacks",
    "FsdpGuardError": "fsdp_guard.report",
    "Guard": "fsdp_guard.guard",
    "HolderDivergenceError": "fsdp_guard.report",
    "NoHoldersError": "fsdp_guard.report",
    "Report": "fsdp_guard.report",
    "UnsupportedLayoutError": "fsdp_guard.report",
    "WandbReporter": "fsdp_guard.reporters.wandb",
    "inspect": "fsdp_guard.invariants",
    "refresh": "fsdp_guard.values",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
