"""What users hand in, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn


def as_modules(model: Any) -> tuple[nn.Module, ...]:
    """Return ``model`` as a tuple of modules, or say what is wrong with it."""
    modules = (model,) if isinstance(model, nn.Module) else model
    if not isinstance(modules, (list, tuple)):
        raise TypeError(f"model must be a torch.nn.Module or a list or tuple of them, got {type(model).__name__}.")
    if not modules:
        raise ValueError("model is an empty sequence: there is nothing to guard. Pass the model or its chunks.")
    for index, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise TypeError(f"model[{index}] must be a torch.nn.Module, got {type(module).__name__}.")
    return tuple(modules)


def as_optimizers(optimizers: Any) -> tuple[Any, ...]:
    """Return ``optimizers`` as a tuple, or say what is wrong with them."""
    if optimizers is None:
        return ()
    found = (optimizers,) if hasattr(optimizers, "param_groups") else optimizers
    if not isinstance(found, (list, tuple)):
        raise TypeError(
            "optimizers must be an optimizer (anything with param_groups), a list or tuple of them, or None, "
            f"got {type(optimizers).__name__}."
        )
    for index, optimizer in enumerate(found):
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(
                f"optimizers[{index}] must be an optimizer (anything with param_groups), "
                f"got {type(optimizer).__name__}."
            )
    return tuple(found)


def as_patterns(allow_unmanaged: Any) -> tuple[str, ...]:
    """Return ``allow_unmanaged`` as a tuple, or say what is wrong with it."""
    if isinstance(allow_unmanaged, str) or not all(isinstance(pattern, str) for pattern in allow_unmanaged):
        raise TypeError(
            "allow_unmanaged must be a list or tuple of parameter names or patterns, for example ['router.*'], "
            f"got {allow_unmanaged!r}."
        )
    return tuple(allow_unmanaged)


def named_roots(modules: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return the modules with the prefixes of their FQNs: none for one model, ``0.``, ``1.``, … for chunks."""
    return [(f"{index}." if len(modules) > 1 else "", module) for index, module in enumerate(modules)]
