"""A stand-in for Megatron-FSDP V2 in the layout of Megatron-LM's main since August 2026, which no package carries yet.

It keeps its holders as the real one does (same attribute names, weak back reference, one object a physical parameter
with all its names, refusal of assign=True), on one rank and on the CPU, where the real one cannot run.
``test_layouts.py`` compares it with the real one wherever that is installed.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn


class DBuffer:
    """A flat buffer and a view of it for each shape."""

    def __init__(self, shapes: list[torch.Size], dtype: torch.dtype) -> None:
        self.local_buffer = torch.zeros(sum(shape.numel() for shape in shapes), dtype=dtype)
        offsets = [sum(shape.numel() for shape in shapes[:index]) for index in range(len(shapes))]
        self.layout = SimpleNamespace(tensor_shapes=tuple(shapes), tensor_to_offset=tuple(offsets))
        self.offset = 0
        self.allocation_stream = None

    def get_local_tensor(self, index: int) -> torch.Tensor:
        start, shape = self.layout.tensor_to_offset[index], self.layout.tensor_shapes[index]
        return self.local_buffer[start : start + shape.numel()].view(shape)


@dataclass(frozen=True, eq=False)
class FsdpParameter:
    fqns: tuple[str, ...]
    sharded: nn.Parameter
    unsharded: nn.Parameter


class FsdpParameterGroup:
    def __init__(self, owning_module: nn.Module, named: dict[str, nn.Parameter]) -> None:
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in named.items():
            names.setdefault(parameter, []).append(name)
        shapes = [parameter.shape for parameter in names]
        first = next(iter(names))
        self._owning_module = weakref.ref(owning_module)
        self.requires_grad = first.requires_grad
        self.main_weight = DBuffer(shapes, torch.float32)
        same = first.dtype == torch.float32
        self.model_weight = self.main_weight if same else DBuffer(shapes, first.dtype)
        self._unsharded_model_weight = DBuffer(shapes, first.dtype)
        parameters = []
        for index, (parameter, fqns) in enumerate(names.items()):
            self.main_weight.get_local_tensor(index).copy_(parameter.detach())
            self.model_weight.get_local_tensor(index).copy_(parameter.detach())
            parameter.data = self._unsharded_model_weight.get_local_tensor(index)
            sharded = nn.Parameter(self.main_weight.get_local_tensor(index), requires_grad=parameter.requires_grad)
            sharded._mfsdp_parameter_group = weakref.ref(self)  # type: ignore[attr-defined]
            parameters.append(FsdpParameter(tuple(fqns), sharded, parameter))
        self.fsdp_parameters = tuple(parameters)
        self.reshard_parameters()

    def sync_model_weight_from_main_weight(self) -> None:
        # As upstream, a new buffer takes the place of the old one.
        self.model_weight = DBuffer(list(self.main_weight.layout.tensor_shapes), self.model_weight.local_buffer.dtype)
        self.model_weight.local_buffer.copy_(self.main_weight.local_buffer)

    def unshard_parameters(self) -> None:
        self._unsharded_model_weight.local_buffer.copy_(self.model_weight.local_buffer)
        for parameter in self.fsdp_parameters:
            self._show(parameter, parameter.unsharded)

    def reshard_parameters(self) -> None:
        for parameter in self.fsdp_parameters:
            self._show(parameter, parameter.sharded)

    def _show(self, parameter: FsdpParameter, shown: nn.Parameter) -> None:
        owning_module = self._owning_module()
        assert owning_module is not None
        for fqn in parameter.fqns:
            path, _, name = fqn.rpartition(".")
            owning_module.get_submodule(path)._parameters[name] = shown


class FsdpModule:
    _parameter_groups: tuple[FsdpParameterGroup, ...]

    @property
    def parameter_groups(self) -> tuple[FsdpParameterGroup, ...]:
        return self._parameter_groups


def fully_shard(module: nn.Module) -> nn.Module:
    """Turn ``module`` into a unit, in place, as the real one does; units inside it come first."""
    owned: dict[tuple[torch.dtype, bool], dict[str, nn.Parameter]] = {}
    for name, parameter in _owned(module, ""):
        owned.setdefault((parameter.dtype, parameter.requires_grad), {})[name] = parameter
    module.__class__ = type(f"ExperimentalFsdp{type(module).__name__}", (FsdpModule, type(module)), {})
    unit: Any = module
    unit._parameter_groups = tuple(FsdpParameterGroup(module, named) for named in owned.values())
    module.register_load_state_dict_pre_hook(_refuse_assign)
    module.register_forward_pre_hook(lambda unit, _: _switch(unit, "unshard_parameters"))
    module.register_forward_hook(lambda unit, _, __: _switch(unit, "reshard_parameters"))
    return module


def _owned(module: nn.Module, prefix: str) -> list[tuple[str, nn.Parameter]]:
    found = [(prefix + name, p) for name, p in module.named_parameters(recurse=False, remove_duplicate=False)]
    for name, child in module.named_children():
        if not isinstance(child, FsdpModule):
            found += _owned(child, f"{prefix}{name}.")
    return found


def _switch(unit: Any, method: str) -> None:
    for group in unit.parameter_groups:
        getattr(group, method)()


def _refuse_assign(module: nn.Module, state_dict: Any, prefix: str, metadata: dict[str, Any], *args: Any) -> None:
    if metadata.get("assign_to_params_buffers", False):
        raise RuntimeError("load_state_dict(assign=True) is not supported after fully_shard().")
