"""PyTorch DDP: ``torch.nn.parallel.DistributedDataParallel``.

DDP shards nothing: its holder is the reducer's parameter, which the module must show. The reducer reduces the gradients
of the parameters that were trainable when the model was wrapped, and of no others.

Upstream: ``torch/nn/parallel/distributed.py`` and ``torch/csrc/distributed/c10d/reducer.cpp`` of
https://github.com/pytorch/pytorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_guard.holders.base import Group, Runtime, require
from fsdp_guard.report import DivergenceKind


class TorchDdp(Runtime):
    """Reads ``DistributedDataParallel`` modules."""

    name = "torch_ddp"

    sources: ClassVar = {"torch.nn.parallel": "torch"}

    remedies: ClassVar = {
        DivergenceKind.REPLACED_PARAMETER: (
            "Load with load_state_dict(..., assign=False), the default, or before the model is wrapped in "
            "DistributedDataParallel; change a weight in place, under torch.no_grad()."
        ),
        DivergenceKind.MISSING_PARAMETER: (
            "Replace, prune or parametrize submodules before the model is wrapped in DistributedDataParallel."
        ),
        DivergenceKind.UNMANAGED_PARAMETER: (
            "Add parameters (LoRA, new head), and unfreeze those that are to train, before the model is wrapped in "
            "DistributedDataParallel, or wrap it anew."
        ),
        DivergenceKind.OPTIMIZER_ORPHAN: (
            "Build the optimizer from model.parameters(), after the last load that replaces parameters."
        ),
    }

    def manages(self, cls: type[nn.Module]) -> bool:
        """Whether the class is ``DistributedDataParallel`` or derived from it."""
        return issubclass(cls, DistributedDataParallel)

    def groups(self, unit: nn.Module) -> Sequence[Group]:
        """Return one group: what the reducer has."""
        return [_DdpGroup(unit)]

    def wrap(self, source: Any, model: nn.Module) -> nn.Module:
        """Wrap the model."""
        wrapped: nn.Module = source.DistributedDataParallel(model)
        return wrapped

    def leaves_alone(self, unit: nn.Module, name: str, parameter: nn.Parameter) -> bool:
        """Whether DDP was told to ignore the parameter, or to reduce it apart."""
        return _is_ignored(unit, name)


class _DdpGroup(Group):
    runtime = TorchDdp.name

    @cached_property
    def _parameters(self) -> list[nn.Parameter]:
        """The reducer's parameters, in the order of the wrapped module."""
        # DistributedDataParallel._module_parameters (torch 1.11 to 2.13): all parameters but the ignored ones, as they
        # were when the model was wrapped, frozen ones too.
        parameters: list[nn.Parameter] = require(self.raw, "_module_parameters", "torch")
        reduced = {id(parameter) for parameter in _reduced(self.raw, parameters)}
        return list({id(p): p for p in parameters if id(p) in reduced}.values())

    @cached_property
    def _names(self) -> list[list[str]]:
        """For each parameter the names under which the module shows it, or shows what took its place."""
        position = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        names: list[list[str]] = [[] for _ in self._parameters]
        wrapped = {id(parameter) for parameter in self.raw._module_parameters}
        strangers: dict[torch.Size, list[str]] = {}
        for name, parameter in self.raw.named_parameters(remove_duplicate=False):
            number = position.get(id(parameter))
            if number is not None:
                names[number].append(name)
            elif id(parameter) not in wrapped and not _is_ignored(self.raw, name):
                strangers.setdefault(parameter.shape, []).append(name)
        for number, parameter in enumerate(self._parameters):
            if not names[number] and (candidates := strangers.get(parameter.shape)):
                # The reducer keeps no names that Python can read: the first of this shape in the order of the module.
                names[number].append(candidates.pop(0))
            elif not names[number]:
                names[number].append(f"(parameter {number} of the reducer)")
        return names

    def __len__(self) -> int:
        return len(self._parameters)

    def names(self, position: int) -> Sequence[str]:
        return self._names[position]

    def resting(self, position: int) -> nn.Parameter:
        return self._parameters[position]

    def materialized(self, position: int) -> nn.Parameter:
        """The same: DDP has one parameter for both."""
        return self._parameters[position]


def _is_ignored(ddp: nn.Module, name: str) -> bool:
    # DistributedDataParallel.parameters_to_ignore (torch 1.8 to 2.13): names relative to the wrapped module. Those of
    # delay_all_reduce_named_params are among them.
    return name.removeprefix("module.") in require(ddp, "parameters_to_ignore", "torch")


class _OnMeta(TorchDispatchMode):
    """Makes tensors without memory, on whatever device they were to be."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:
        return torch.empty_like(args[0], device="meta")


def _reduced(ddp: nn.Module, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    # Reducer._get_zeros_like_grad_buckets and GradBucket.parameters (torch 1.10 to 2.13): the only way to what the
    # reducer has. It makes a zero gradient for each bucket, and nothing else; those are made without memory here.
    reducer = require(ddp, "reducer", "torch")
    make_buckets = require(reducer, "_get_zeros_like_grad_buckets", "torch")
    try:
        with _OnMeta():  # type: ignore[no-untyped-call]
            buckets = make_buckets()
    except RuntimeError:
        # A sparse gradient has no buffer before the first backward.
        return [parameter for parameter in parameters if parameter.requires_grad]
    return [parameter for bucket in buckets for parameter in bucket.parameters()]
