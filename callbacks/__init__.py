"""Adapters to training frameworks, installed as ``fsdp_guard.callbacks``. Each is imported when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp_guard.callbacks.lightning import FsdpGuard as FsdpGuard

_HOMES = {"FsdpGuard": "fsdp_guard.callbacks.lightning"}

__all__ = ["FsdpGuard"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
