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
from fsdp_guard.holders.compiled import hook_call, is_compiled
from fsdp_guard.holders.mfsdp_v1 import MfsdpV1
from fsdp_guard.holders.mfsdp_v2 import MfsdpV2
from fsdp_guard.holders.torch_ddp import TorchDdp
from fsdp_guard.holders.torch_fsdp2 import TorchFsdp2
from fsdp_guard.report import DivergenceKind

__all__ = [
    "Binding",
    "BoundGroup",
    "Group",
    "Inventory",
    "Loose",
    "ModuleIndex",
    "UnitTree",
    "Weights",
    "address_range",
    "hook_call",
    "local_tensor",
    "outermost_units",
    "remedy_of",
    "take_inventory",
]

RUNTIMES: tuple[Runtime, ...] = (MfsdpV2(), MfsdpV1(), TorchFsdp2(), TorchDdp())

# Names that wrappers insert and torch's own state-dict helpers leave out: torch.compile's OptimizedModule._orig_mod
# and torch.distributed's CheckpointWrapper._checkpoint_wrapped_module (both torch 2.1 to 2.13).
_WRAPPER_NAMES = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


class BoundGroup(NamedTuple):
    """A group of holders and the bindings that must show them."""

    group: Group
    bindings: list[Binding]


class Loose(NamedTuple):
    """A parameter inside a unit, at a place that no holder is bound to; ``left_alone`` if that is on purpose."""

    fqn: str
    parameter: nn.Parameter
    runtime: str
    left_alone: bool


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


@dataclass(slots=True)
class _Place:
    """One module of the tree, the runtime whose unit it is, and the place of the unit that encloses it."""

    path: str
    fqn: str
    module: nn.Module
    runtime: Runtime | None
    enclosing: _Place | None


def take_inventory(roots: Iterable[tuple[str, nn.Module]]) -> Inventory:
    """Walk the module trees once and bind every holder that is found. Linear in modules and parameters.

    Args:
        roots: Modules to walk, each with the prefix that its FQNs get (empty, or with a final dot).

    Raises:
        UnsupportedLayoutError: A known runtime was found whose layout is unknown.
    """
    inventory = Inventory()
    for prefix, root in roots:
        tree = _Tree(root, prefix)
        bound: set[tuple[int, str]] = set()
        found: set[int] = set()
        for place in tree.places:
            if place.runtime is None:
                continue
            for group in place.runtime.groups(place.module):
                if id(group.raw) in found:
                    continue  # one group of several units
                found.add(id(group.raw))
                bindings = _bind(group, place, tree)
                inventory.groups.append(BoundGroup(group, bindings))
                bound.update((id(binding.owner), binding.attribute) for binding in bindings)
        _add_unbound(tree.places, bound, inventory)
    return inventory


def remedy_of(runtime: str, kind: DivergenceKind) -> str | None:
    """Return what to do about a divergence of this runtime, where that is not what one does for others."""
    return next((found.remedies.get(kind) for found in RUNTIMES if found.name == runtime), None)


class UnitTree(NamedTuple):
    """An outermost unit and the units inside it.

    Args:
        prefix: What the FQNs of its parameters begin with.
        units: The units, the outermost first.
        compiled: The compiled modules around it, whose calls trace its hooks.
    """

    prefix: str
    units: list[nn.Module]
    compiled: list[nn.Module]


def outermost_units(roots: Iterable[tuple[str, nn.Module]]) -> list[UnitTree]:
    """Return the trees of units that are in the module trees."""
    trees: list[UnitTree] = []
    for prefix, root in roots:
        path = None
        compiled: list[tuple[str, nn.Module]] = []
        for place in _walk(root, prefix):
            if place.runtime is None:
                if place.enclosing is None and is_compiled(place.module):
                    compiled.append((_dotted(place.path), place.module))
            elif path is not None and place.path.startswith(path):
                trees[-1].units.append(place.module)
            else:
                path = _dotted(place.path)
                around = [module for above, module in compiled if path.startswith(above)]
                trees.append(UnitTree(_dotted(place.fqn), [place.module], around))
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


class _Tree:
    """The places of one module tree, by name and by module."""

    def __init__(self, root: nn.Module, prefix: str) -> None:
        self.places = list(_walk(root, prefix))
        self._by_path = {place.path: place.module for place in self.places}
        self._by_module: dict[int, _Place] | None = None

    def module(self, unit: _Place, name: str) -> nn.Module | None:
        """Return the module that ``name`` leads to from the unit."""
        module = self._by_path.get(_dotted(unit.path) + name if name else unit.path)
        if module is not None:
            return module
        try:
            # As runtimes do, which also finds a module under its second name or behind a wrapper.
            return unit.module.get_submodule(name)
        except AttributeError:
            return None

    def place(self, module: nn.Module) -> _Place | None:
        """Return where ``module`` is, or ``None`` if it is not in this tree."""
        if self._by_module is None:
            self._by_module = {id(place.module): place for place in self.places}
        return self._by_module.get(id(module))


def _walk(root: nn.Module, prefix: str) -> Iterator[_Place]:
    """Yield every module of the tree once, under its first name, parents before children."""
    seen: set[int] = set()
    runtimes: dict[type, Runtime | None] = {}
    start = prefix.removesuffix(".")
    stack: list[tuple[str, str, nn.Module, _Place | None]] = [(start, start, root, None)]
    while stack:
        path, fqn, module, enclosing = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        cls = type(module)
        if cls not in runtimes:
            runtimes[cls] = next((runtime for runtime in RUNTIMES if runtime.manages(cls)), None)
        place = _Place(path, fqn, module, runtimes[cls], enclosing)
        yield place
        children = direct_children(module)
        if children:
            unit = enclosing if place.runtime is None else place
            path, fqn, is_renamed = _dotted(path), _dotted(fqn), path != fqn
            for name, child in reversed(children):
                child_path = path + name
                child_fqn = child_path
                if name in _WRAPPER_NAMES:
                    child_fqn = fqn.removesuffix(".")
                elif is_renamed:
                    child_fqn = fqn + name
                stack.append((child_path, child_fqn, child, unit))


def _bind(group: Group, unit: _Place, tree: _Tree) -> list[Binding]:
    fqn = _dotted(unit.fqn)
    whole = all(tree.place(module) is not None for module in group.spans())
    bindings = []
    for position in range(len(group)):
        owners = group.owners(position)
        for number, name in enumerate(group.names(position)):
            module_name, _, attribute = name.rpartition(".")
            if owners is None:
                owner = tree.module(unit, module_name)
                bindings.append(_binding(group, position, fqn + _without_wrappers(name), owner, attribute))
            elif (place := tree.place(owners[number])) is not None:
                bindings.append(_binding(group, position, _dotted(place.fqn) + attribute, place.module, attribute))
            elif whole:
                bindings.append(_binding(group, position, fqn + name, None, attribute))
    return bindings


def _binding(group: Group, position: int, fqn: str, owner: nn.Module | None, attribute: str) -> Binding:
    shown = shown_parameter(owner, attribute)
    return Binding(fqn, owner, attribute, group, position, shown, group.resting(position), group.materialized(position))


def _add_unbound(places: Sequence[_Place], bound: set[tuple[int, str]], inventory: Inventory) -> None:
    for place in places:
        unit = place.enclosing if place.runtime is None else place
        for name, parameter in direct_parameters(place.module):
            if (id(place.module), name) in bound:
                continue
            fqn = _dotted(place.fqn) + name
            if unit is None or unit.runtime is None:
                inventory.outside.append((fqn, parameter))
            else:
                relative = (_dotted(place.path) + name).removeprefix(_dotted(unit.path))
                left_alone = unit.runtime.leaves_alone(unit.module, relative, parameter)
                inventory.loose.append(Loose(fqn, parameter, unit.runtime.name, left_alone))


def _dotted(name: str) -> str:
    return f"{name}." if name else ""


def _without_wrappers(name: str) -> str:
    if "._" not in name and not name.startswith("_"):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_NAMES)
