"""Adapters to training frameworks, installed as ``fsdp_guard.callbacks``. Each is imported when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp_guard.callbacks.huggingface import HfFsdpGuard as HfFsdpGuard
    from fsdp_guard.callbacks.lightning import FsdpGuard as FsdpGuard

_HOMES = {"FsdpGuard": "fsdp_guard.callbacks.lightning", "HfFsdpGuard": "fsdp_guard.callbacks.huggingface"}

__all__ = ["FsdpGuard", "HfFsdpGuard"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
