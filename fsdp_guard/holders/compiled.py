"""Modules that ``torch.compile`` has compiled, and how to be called before one without being traced with it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn


def is_compiled(module: nn.Module) -> bool:
    """Whether a call of ``module`` runs what ``torch.compile(module)`` or ``module.compile()`` made of it."""
    # torch._dynamo.OptimizedModule._orig_mod (torch 2.1 to 2.13): the module that it wraps, and runs compiled.
    return _compiled_call(module) is not None or "_orig_mod" in module._modules


def hook_call(module: nn.Module, hook: Callable[..., None]) -> Callable[[], None]:
    """Call ``hook`` before each call of ``module``, ahead of its other hooks; return what takes it away again.

    Dynamo traces the hooks of a module that was compiled in place, so there the hook goes around the compiled call.
    """
    compiled = _compiled_call(module)
    if compiled is None:
        return module.register_forward_pre_hook(hook, prepend=True).remove

    ref = weakref.ref(module)

    def remove() -> None:
        hooked = ref()
        if hooked is not None:
            hooked._compiled_call_impl = _without(hook, _compiled_call(hooked))

    module._compiled_call_impl = _HookedCall(hook, compiled)
    return remove


class _HookedCall:
    def __init__(self, hook: Callable[..., None], compiled: Callable[..., Any]) -> None:
        self.hook = hook
        self.compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.hook()
        return self.compiled(*args, **kwargs)


def _without(hook: Callable[..., None], call: Any) -> Any:
    if not isinstance(call, _HookedCall):
        return call
    return call.compiled if call.hook is hook else _HookedCall(call.hook, _without(hook, call.compiled))


def _compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    # torch.nn.Module._compiled_call_impl (torch 2.1 to 2.13): what module.compile() puts in the place of a call.
    # Copies and pickles leave it out.
    compiled: Callable[..., Any] | None = module._compiled_call_impl
    return compiled
