"""Find the units of every known runtime in a model, and bind their holders to what the module shows.

A new runtime is one new file beside this one and one entry in ``RUNTIMES``. Every private attribute of another
package that fsdp_guard reads is read in this folder.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from fsdp_guard.holders.base import (
    Binding,
    Group,
    Runtime,
    Weights,
    address_range,
    direct_children,
    direct_parameters,
    local_tensor,
    shown_parameter,
)
from fsdp_guard.holders.mfsdp_v2 import MfsdpV2

__all__ = [
    "Binding",
    "BoundGroup",
    "Group",
    "Inventory",
    "Loose",
    "ModuleIndex",
    "Weights",
    "address_range",
    "local_tensor",
    "outermost_units",
    "take_inventory",
]

RUNTIMES: tuple[Runtime, ...] = (MfsdpV2(),)

# Names that wrappers insert and torch's own state-dict helpers leave out: torch.compile's OptimizedModule._orig_mod
# and torch.distributed's CheckpointWrapper._checkpoint_wrapped_module (both torch 2.1 to 2.13).
_WRAPPER_NAMES = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


class BoundGroup(NamedTuple):
    """A group of holders and the bindings that must show them."""

    group: Group
    bindings: list[Binding]


class Loose(NamedTuple):
    """A parameter inside a unit, at a place that no holder is bound to."""

    fqn: str
    parameter: nn.Parameter
    runtime: str


@dataclass
class Inventory:
    """Everything that one look compares.

    Args:
        groups: The groups that were found, each with its bindings.
        loose: Parameters inside units that no holder is bound to.
        outside: Parameters outside all units, by FQN.
    """

    groups: list[BoundGroup] = field(default_factory=list)
    loose: list[Loose] = field(default_factory=list)
    outside: list[tuple[str, nn.Parameter]] = field(default_factory=list)

    @property
    def runtimes(self) -> tuple[str, ...]:
        """Names of the runtimes that were found, sorted."""
        return tuple(sorted({bound.group.runtime for bound in self.groups}))


class _Place(NamedTuple):
    """One module of the tree, and the runtime of the unit that encloses it (its own, if it is a unit itself)."""

    path: str
    fqn: str
    module: nn.Module
    runtime: Runtime | None
    is_unit: bool


def take_inventory(roots: Iterable[tuple[str, nn.Module]]) -> Inventory:
    """Walk the module trees once and bind every holder that is found. Linear in modules and parameters.

    Args:
        roots: Modules to walk, each with the prefix that its FQNs get (empty, or with a final dot).

    Raises:
        UnsupportedLayoutError: A known runtime was found whose layout is unknown.
    """
    inventory = Inventory()
    for prefix, root in roots:
        places = list(_walk(root, prefix))
        modules = {place.path: place.module for place in places}
        bound: set[tuple[int, str]] = set()
        for place in places:
            if not place.is_unit or place.runtime is None:
                continue
            for group in place.runtime.groups(place.module):
                bindings = _bind(group, place, modules)
                inventory.groups.append(BoundGroup(group, bindings))
                bound.update((id(binding.owner), binding.attribute) for binding in bindings)
        _add_unbound(places, bound, inventory)
    return inventory


def outermost_units(roots: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, list[nn.Module]]]:
    """Return the trees of units: for each the FQN prefix, and its units, the outermost first."""
    trees: list[tuple[str, list[nn.Module]]] = []
    for prefix, root in roots:
        path = None
        for place in _walk(root, prefix):
            if not place.is_unit:
                continue
            if path is not None and place.path.startswith(path):
                trees[-1][1].append(place.module)
            else:
                path = _dotted(place.path)
                trees.append((_dotted(place.fqn), [place.module]))
    return trees


class ModuleIndex:
    """Where the holders of each module are, so that a check of a part costs what the part costs.

    Holds neither modules nor parameters alive.

    Args:
        inventory: What was found in the whole model.
    """

    def __init__(self, inventory: Inventory) -> None:
        self._addresses: weakref.WeakKeyDictionary[nn.Module, list[_Address]] = weakref.WeakKeyDictionary()
        for group, bindings in inventory.groups:
            raw = weakref.ref(group.raw)
            for binding in bindings:
                if binding.owner is not None:
                    address = _Address(type(group), raw, binding.position, binding.fqn, binding.attribute)
                    self._addresses.setdefault(binding.owner, []).append(address)

    def below(self, module: nn.Module) -> Inventory:
        """Bind again the holders that ``module`` and the modules below it must show."""
        groups: dict[int, BoundGroup] = {}
        for owner in module.modules():
            for cls, ref, position, fqn, attribute in self._addresses.get(owner, ()):
                raw = ref()
                if raw is None:
                    continue
                if id(raw) not in groups:
                    groups[id(raw)] = BoundGroup(cls(raw), [])
                group, bindings = groups[id(raw)]
                bindings.append(_binding(group, position, fqn, owner, attribute))
        return Inventory(groups=list(groups.values()))


class _Address(NamedTuple):
    cls: type[Group]
    raw: weakref.ReferenceType[object]
    position: int
    fqn: str
    attribute: str


def _walk(root: nn.Module, prefix: str) -> Iterator[_Place]:
    """Yield every module of the tree once, under its first name, parents before children."""
    seen: set[int] = set()
    runtimes: dict[type, Runtime | None] = {}
    start = prefix.removesuffix(".")
    stack: list[tuple[str, str, nn.Module, Runtime | None]] = [(start, start, root, None)]
    while stack:
        path, fqn, module, enclosing = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        cls = type(module)
        if cls not in runtimes:
            runtimes[cls] = next((runtime for runtime in RUNTIMES if runtime.manages(cls)), None)
        own = runtimes[cls]
        runtime = own or enclosing
        yield _Place(path, fqn, module, runtime, own is not None)
        children = direct_children(module)
        if children:
            path, fqn, is_renamed = _dotted(path), _dotted(fqn), path != fqn
            for name, child in reversed(children):
                child_path = path + name
                child_fqn = child_path
                if name in _WRAPPER_NAMES:
                    child_fqn = fqn.removesuffix(".")
                elif is_renamed:
                    child_fqn = fqn + name
                stack.append((child_path, child_fqn, child, runtime))


def _bind(group: Group, unit: _Place, modules: dict[str, nn.Module]) -> list[Binding]:
    path, fqn = _dotted(unit.path), _dotted(unit.fqn)
    bindings = []
    for position in range(len(group)):
        for name in group.names(position):
            module_name, _, attribute = name.rpartition(".")
            owner = modules.get(path + module_name if module_name else unit.path)
            if owner is None:
                owner = _submodule(unit.module, module_name)
            bindings.append(_binding(group, position, fqn + _without_wrappers(name), owner, attribute))
    return bindings


def _binding(group: Group, position: int, fqn: str, owner: nn.Module | None, attribute: str) -> Binding:
    shown = shown_parameter(owner, attribute)
    return Binding(fqn, owner, attribute, position, shown, group.resting(position), group.materialized(position))


def _submodule(module: nn.Module, name: str) -> nn.Module | None:
    """Resolve ``name`` as runtimes do, which also finds a module under its second name or behind a wrapper."""
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None


def _add_unbound(places: Sequence[_Place], bound: set[tuple[int, str]], inventory: Inventory) -> None:
    for place in places:
        for name, parameter in direct_parameters(place.module):
            if (id(place.module), name) in bound:
                continue
            fqn = _dotted(place.fqn) + name
            if place.runtime is None:
                inventory.outside.append((fqn, parameter))
            else:
                inventory.loose.append(Loose(fqn, parameter, place.runtime.name))


def _dotted(name: str) -> str:
    return f"{name}." if name else ""


def _without_wrappers(name: str) -> str:
    if "._" not in name and not name.startswith("_"):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_NAMES)
