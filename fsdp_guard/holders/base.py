"""What every runtime's reader gives: groups of holders, and the bindings that must show them.

Vocabulary, used by all files beside this one:

- A *runtime* shards the model. A *unit* is one module that it manages.
- A *group* is a set of parameters of one unit that the runtime switches together.
- A *holder* is the runtime's own reference to one parameter: two objects, *resting* (sharded) and *materialized*
  (unsharded), and the buffers that their storage must lie in. A runtime that does not shard has one object for both.
- A *binding* is one place in the module tree (owning module, attribute name, FQN) and the holder it must show.
"""

from __future__ import annotations

import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_guard.report import DivergenceKind, UnsupportedLayoutError


class Weights(NamedTuple):
    """The elements that this rank has both of the main and of the compute weights of one or more holders.

    Args:
        main: Flat view, shape ``(n,)``, in the dtype of the main weights.
        compute: Flat view of the same elements, shape ``(n,)``, in the dtype of the compute weights.
        spans: For each holder, by its position, the first of its elements in the two views and the one after its last.
    """

    main: torch.Tensor
    compute: torch.Tensor
    spans: Mapping[int, tuple[int, int]]


class Group(ABC):
    """One group of a unit, seen through its holders. Cheap to make; keeps the runtime's group alive while it lives.

    Args:
        raw: The runtime's own object for the group.
    """

    runtime: ClassVar[str]

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    @abstractmethod
    def __len__(self) -> int:
        """Number of holders."""

    @abstractmethod
    def names(self, position: int) -> Sequence[str]:
        """Names of the holder's parameter relative to the unit; several when the parameter is tied."""

    def owners(self, position: int) -> Sequence[nn.Module] | None:
        """The module for each name, where the runtime keeps modules and not names.

        The names are then needed only for modules that have left the model.
        """
        return None

    def spans(self) -> Sequence[nn.Module]:
        """The modules below which all owners are; of use where one group belongs to several units."""
        return ()

    @abstractmethod
    def resting(self, position: int) -> nn.Parameter:
        """The sharded parameter, which is also the one that the optimizer must step."""

    @abstractmethod
    def materialized(self, position: int) -> nn.Parameter | None:
        """The unsharded parameter, which the module shows while it computes; ``None`` while there is none."""

    def resting_buffers(self, position: int) -> tuple[torch.Tensor, ...] | None:
        """The flat tensors in which the resting parameter's local shard may lie; ``None`` where any place is right."""
        return None

    def materialized_buffers(self, position: int) -> tuple[torch.Tensor, ...] | None:
        """The flat tensors in which the materialized parameter may lie; ``None`` where any place is right."""
        return None

    def step_reaches_forward(self, position: int) -> bool:
        """Whether what an optimizer writes to the resting parameter gets to the weights that forward reads."""
        return True

    def weights(self) -> Sequence[Weights]:
        """What this rank has of the main weights and of the compute weights; nothing where the two are one."""
        return ()

    def refresh(self) -> None:
        """Let the runtime fill the compute weights from the main weights."""
        raise NotImplementedError(f"{self.runtime} keeps no compute weights of their own.")

    def refreshed_together(self) -> Sequence[Any]:
        """The process groups whose ranks must call ``refresh`` together; none where it does not communicate."""
        return ()


class Runtime(ABC):
    """Knows one sharding runtime: which modules are its units, and how to read their groups."""

    name: ClassVar[str]

    sources: ClassVar[Mapping[str, str]]
    """The modules that offer the runtime, each with the distribution that it comes in."""

    remedies: ClassVar[Mapping[DivergenceKind, str]] = {}
    """What to do about a divergence, where this runtime needs another sentence than others."""

    @abstractmethod
    def manages(self, cls: type[nn.Module]) -> bool:
        """Whether modules of class ``cls`` are units of this runtime; false for the class of a wrapper around one."""

    @abstractmethod
    def groups(self, unit: nn.Module) -> Sequence[Group]:
        """Return the groups of ``unit``.

        Raises:
            UnsupportedLayoutError: This version of the runtime keeps its holders in an unknown way.
        """

    @abstractmethod
    def wrap(self, source: Any, model: nn.Module) -> nn.Module:
        """Put ``model`` under the runtime, on the CPU and over all ranks, for ``fsdp-guard doctor`` to read.

        Args:
            source: One of the modules in ``sources``, imported.
            model: A bfloat16 model without units.
        """

    def leaves_alone(self, unit: nn.Module, name: str, parameter: nn.Parameter) -> bool:
        """Whether a parameter that no holder owns was left to others on purpose when the model was wrapped.

        Args:
            unit: The unit that the parameter is in.
            name: The parameter's name relative to the unit.
            parameter: The parameter.
        """
        return False


@dataclass(slots=True)
class Binding:
    """One place that must show one holder of ``group``, and what it shows now.

    ``position`` is the holder's number in its group. ``shown`` is ``None`` when the name leads nowhere; ``owner`` is
    then ``None`` too if the module is gone.
    """

    fqn: str
    owner: nn.Module | None
    attribute: str
    group: Group
    position: int
    shown: nn.Parameter | None
    resting: nn.Parameter
    materialized: nn.Parameter | None

    @property
    def runtime(self) -> str:
        """Name of the runtime."""
        return self.group.runtime


def shown_parameter(owner: nn.Module | None, attribute: str) -> nn.Parameter | None:
    """Return the parameter that ``owner`` shows under ``attribute``, or ``None``."""
    # torch.nn.Module._parameters (all versions): attribute access would fall through to what a wrapper wraps, while
    # runtimes read and write this dict.
    return None if owner is None else owner._parameters.get(attribute)


def direct_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that ``module`` itself shows, without those of its children."""
    # torch.nn.Module._parameters (all versions): wrappers override named_parameters() to rename what is below them.
    parameters = module._parameters
    return [(name, p) for name, p in parameters.items() if p is not None] if parameters else []


def direct_children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the children of ``module`` under all of their names."""
    # torch.nn.Module._modules (all versions): what named_children() reads, at a third of its cost.
    return [(name, child) for name, child in module._modules.items() if child is not None] if module._modules else []


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's tensor of ``parameter``, without entering autograd."""
    # torch.distributed.tensor.DTensor._local_tensor (torch 2.5 to 2.13): to_local() would make an autograd view.
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def address_range(buffer: torch.Tensor) -> tuple[int, int]:
    """Return the first address of ``buffer``'s elements and the one after the last, in bytes."""
    start = buffer.data_ptr()
    return start, start + buffer.numel() * buffer.element_size()


def require(owner: object, attribute: str, *packages: str) -> Any:
    """Return ``owner.attribute``, or say clearly that this layout is not one that fsdp_guard reads.

    Args:
        owner: An object of the runtime.
        attribute: The attribute to read.
        packages: Distributions that the runtime may have come from, for the version in the message.

    Raises:
        UnsupportedLayoutError: There is no such attribute.
    """
    try:
        return getattr(owner, attribute)
    except AttributeError:
        raise unsupported(owner, attribute, *packages) from None


def unsupported(owner: object, attribute: str, *packages: str) -> UnsupportedLayoutError:
    """Return the error that says that ``owner`` lacks ``attribute``; see ``require``."""
    cls = type(owner)
    return UnsupportedLayoutError(f"{cls.__module__}.{cls.__qualname__}", _versions(packages), attribute)


def _versions(packages: Sequence[str]) -> str:
    found = []
    for package in packages:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return " / ".join(found) or "an unknown version"
