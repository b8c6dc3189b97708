"""When to look: hooks on loads, on the first forward and on the first optimizer step.

The hooks on loads stay as long as the watch does; they cost nothing outside a load. The other two are *gates*: a gate
opens once, at the first call, and is gone; the next load puts it up again.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from fsdp_guard.holders import Inventory, ModuleIndex, UnitTree, hook_call, outermost_units, take_inventory
from fsdp_guard.inputs import named_roots
from fsdp_guard.report import Event, FsdpGuardError

Look = Callable[[Callable[[], Inventory], Sequence[Any], Event], object]
"""Called as ``look(take_inventory, optimizers, event)``; raises to stop what the caller was about to do."""


class Watch:
    """The hooks on one model and its optimizers. Keeps neither alive.

    Args:
        models: The model, or its chunks, sharded already.
        optimizers: All of its optimizers.
        look: What to do when it is time to look.

    Raises:
        UnsupportedLayoutError: A known runtime was found in a version whose holders fsdp_guard cannot read.
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[Any], look: Look) -> None:
        roots = named_roots(models)
        inventory = take_inventory(roots)
        self.found_holders = bool(inventory.groups)
        self._roots = [(prefix, weakref.ref(model)) for prefix, model in roots]
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._look = look
        self._index = ModuleIndex(inventory)
        self._loads: weakref.WeakKeyDictionary[nn.Module, _Load] = weakref.WeakKeyDictionary()
        self._handles = self._hook_loads(models)
        self._open_gates: list[_Gate] = []
        self._gates = [_Gate(self._open_gates, *self._forward_gate(tree)) for tree in outermost_units(roots)]
        self._gates.append(_Gate(self._open_gates, self._register_steps, self._look_before_step))
        for gate in self._gates:
            gate.close()

    @property
    def alive(self) -> bool:
        """Whether anything that is watched still exists."""
        return any(ref() is not None for _, ref in self._roots)

    @property
    def armed(self) -> bool:
        """Whether a first forward or a first step is still due."""
        return len(self._open_gates) < len(self._gates)

    def remove(self) -> None:
        """Take away every hook."""
        for gate in self._gates:
            gate.remove()
        for handle in self._handles:
            handle.remove()

    def _hook_loads(self, models: Sequence[nn.Module]) -> list[RemovableHandle]:
        before, after = _Hook(self._before_load), _Hook(self._after_load)
        handles = []
        for module in {module: None for model in models for module in model.modules()}:
            handles.append(module.register_load_state_dict_pre_hook(before))
            handles.append(module.register_load_state_dict_post_hook(after))
        return handles

    def _before_load(self, module: nn.Module, *args: Any) -> None:
        # One load_state_dict call passes the same list objects to the hooks of every module that it visits, parents
        # first. A list that is not known yet therefore marks the topmost watched module of a new call, also when that
        # call began at a wrapper that is not watched, inside another load, or after a load that raised.
        *_, missing_keys, _unexpected_keys, error_messages = args
        if any(load.missing_keys is missing_keys for load in self._loads.values()):
            return
        self._loads[module] = _Load(missing_keys, error_messages)
        for gate in self._open_gates:
            gate.close()
        self._open_gates.clear()

    def _after_load(self, module: nn.Module, incompatible_keys: Any) -> None:
        missing, unexpected = incompatible_keys
        load = self._loads.get(module)
        if load is None or load.missing_keys is not missing:
            return
        del self._loads[module]
        if load.error_messages:
            return  # torch raises these right after the hooks; the gates look if the caller goes on all the same
        root = [(prefix, module) for prefix, ref in self._roots if ref() is module]
        try:
            self._look(lambda: take_inventory(root) if root else self._index.below(module), (), Event.LOAD)
        except FsdpGuardError as error:
            if missing or unexpected:
                # A strict load would have raised about its keys after this hook: say both.
                raise error from RuntimeError(
                    f"load_state_dict also found missing keys {missing} and unexpected keys {unexpected}."
                )
            raise

    def _forward_gate(self, tree: UnitTree) -> tuple[Register, Callable[[], None]]:
        prefix, outermost = tree.prefix, weakref.ref(tree.units[0])
        # On every unit of the tree, since a script may call an inner one first, and ahead of the runtime's own hook,
        # which puts the holders back on the module and so erases the evidence. On compiled modules around them, since
        # there the hooks must be gone before Dynamo traces: they would cut its graph.
        entrances = [weakref.ref(module) for module in (*tree.compiled, *tree.units)]

        def register(hook: _Hook) -> list[Remove]:
            return [hook_call(module, hook) for ref in entrances if (module := ref()) is not None]

        def look() -> None:
            unit = outermost()
            if unit is not None:
                self._look(lambda: take_inventory([(prefix, unit)]), (), Event.FIRST_FORWARD)

        return register, look

    def _register_steps(self, hook: _Hook) -> list[Remove]:
        return [_hook_step(optimizer, hook).remove for ref in self._optimizers if (optimizer := ref()) is not None]

    def _look_before_step(self) -> None:
        roots = [(prefix, model) for prefix, ref in self._roots if (model := ref()) is not None]
        optimizers = [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]
        self._look(lambda: take_inventory(roots), optimizers, Event.FIRST_STEP)


class _Load(NamedTuple):
    """One call of ``load_state_dict``, known by the lists that it hands to its hooks."""

    missing_keys: list[str]
    error_messages: list[str]


class _Hook:
    """A hook whose copies do nothing, so that a deep copy or a pickle of a watched model is a plain model."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        # Used by copy and by pickle. What it gives takes anything, does nothing, and can be unpickled where fsdp_guard
        # is not installed.
        return getattr, (contextlib.nullcontext(), "__exit__")


Remove = Callable[[], None]

Register = Callable[[_Hook], list[Remove]]


class _Gate:
    """Looks before the first of several calls, and is gone before it looks.

    Args:
        opened: Where the gate notes that it has opened.
        register: Puts a hook on each of the calls and returns what takes them away.
        look: Called once.
    """

    def __init__(self, opened: list[_Gate], register: Register, look: Callable[[], None]) -> None:
        self._opened = opened
        self._register = register
        self._look = look
        self._removes: list[Remove] = []

    def close(self) -> None:
        """Put the hooks up."""
        self._removes = self._register(_Hook(self._on_call))

    def remove(self) -> None:
        """Take the hooks away."""
        for remove in self._removes:
            remove()
        self._removes = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _on_call(self, *args: Any) -> None:
        self.remove()
        self._opened.append(self)
        self._look()


def _hook_step(optimizer: Any, hook: _Hook) -> RemovableHandle:
    try:
        handle: RemovableHandle = optimizer.register_step_pre_hook(hook)
    except AttributeError:
        ref = weakref.ref(optimizer)

        # Not a torch optimizer but something around one (Megatron-LM's, Accelerate's): wait for the one inside.
        def on_any_step(stepping: torch.optim.Optimizer, *args: Any) -> None:
            around = ref()
            if around is not None and _share_a_parameter(stepping, around):
                hook(stepping, *args)

        handle = register_optimizer_step_pre_hook(on_any_step)
    return handle


def _share_a_parameter(one: Any, other: Any) -> bool:
    ids = {id(parameter) for group in one.param_groups for parameter in group["params"]}
    return any(id(parameter) in ids for group in other.param_groups for parameter in group["params"])
