"""PyTorch FSDP2: ``torch.distributed.fsdp.fully_shard``, and ``replicate``, which is built on it.

FSDP2 takes part of what others replace: at its first forward, after each load and in ``.to()`` and ``.to_empty()`` of
an FSDP module it reads its parameters from the module again. What it would read is then its holder.

Upstream: ``torch/distributed/fsdp/_fully_shard`` of https://github.com/pytorch/pytorch, the same in torch 2.11 to 2.13
but for the attributes named here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_guard.holders.base import Group, Runtime, local_tensor, require, shown_parameter, unsupported
from fsdp_guard.report import DivergenceKind


class TorchFsdp2(Runtime):
    """Reads the units of FSDP2: modules whose class ``fully_shard`` extended by ``FSDPModule``."""

    name = "torch_fsdp2"

    sources: ClassVar = {"torch.distributed.fsdp": "torch"}

    remedies: ClassVar = {
        DivergenceKind.REPLACED_PARAMETER: (
            "Change a weight in place, under torch.no_grad(), or load it with load_state_dict(); replace parameters, "
            "and convert modules that are no FSDP modules themselves, before the model is sharded."
        ),
        DivergenceKind.DETACHED_STORAGE: (
            "Call .to() on the FSDP module (or set the dtypes with MixedPrecisionPolicy), and do not call swap_tensors "
            "on its parameters."
        ),
        DivergenceKind.BROKEN_TIE: (
            "Tie parameters before fully_shard(), inside one fully_shard() call, and tie them again after to_empty() "
            "or load_state_dict(assign=True), before the optimizer is built: head.weight = embed.weight."
        ),
        DivergenceKind.UNMANAGED_PARAMETER: (
            "Add the parameter (LoRA, new head) before fully_shard(). If it was handed to ignored_params and you "
            "reduce its gradient yourself, tell the guard: allow_unmanaged=[its name, or a pattern]."
        ),
        DivergenceKind.OPTIMIZER_ORPHAN: (
            "Build the optimizer from model.parameters() after fully_shard(), and after to_empty(), .to() and "
            "load_state_dict(assign=True), each of which replaces parameters."
        ),
    }

    def manages(self, cls: type[nn.Module]) -> bool:
        """Whether ``fully_shard`` or ``replicate`` gave a module this class."""
        return issubclass(cls, FSDPModule)

    def groups(self, unit: nn.Module) -> Sequence[Group]:
        """Return the groups of ``unit``; none where all of its parameters are in units below it."""
        # FSDPModule._get_fsdp_state (torch 2.6 to 2.13): a copy made around FSDP2's ban on copies has no state.
        try:
            state = require(unit, "_get_fsdp_state", "torch")()
        except AssertionError:
            raise unsupported(unit, "FSDPState", "torch") from None
        # FSDPState._fsdp_param_groups (torch 2.12 and newer), ._fsdp_param_group (before).
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            group = require(state, "_fsdp_param_group", "torch")
            groups = [] if group is None else [group]
        return [_Fsdp2Group(group) for group in groups]

    def wrap(self, source: Any, model: nn.Module) -> nn.Module:
        """Shard everything."""
        source.fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        return model

    def leaves_alone(self, unit: nn.Module, name: str, parameter: nn.Parameter) -> bool:
        """Whether another parallelism has sharded the parameter; FSDP2 keeps no record of ``ignored_params``."""
        return isinstance(parameter, DTensor)


class _Fsdp2Group(Group):
    runtime = TorchFsdp2.name

    def __init__(self, raw: Any) -> None:
        super().__init__(raw)
        # FSDPParamGroup.fsdp_params, .is_sharded and ._reset_sharded_params (torch 2.6 to 2.13): FSDP2 reads the module
        # again at its first forward if the group is sharded and that has not happened yet (lazy_init).
        self._parameters: Sequence[Any] = require(raw, "fsdp_params", "torch")
        self._rereads: bool = not require(raw, "_reset_sharded_params", "torch") and require(raw, "is_sharded", "torch")

    def __len__(self) -> int:
        return len(self._parameters)

    def spans(self) -> Sequence[nn.Module]:
        """The modules that were handed to ``fully_shard`` together."""
        # FSDPParamGroup.modules (torch 2.6 to 2.13): a tuple.
        modules: Sequence[nn.Module] = require(self.raw, "modules", "torch")
        return modules

    def owners(self, position: int) -> Sequence[nn.Module]:
        """The module, and where the parameter is tied the others that share it."""
        info = self._info(position)
        return info.module, *info.shared_modules

    def names(self, position: int) -> Sequence[str]:
        """What is left to say of a module that is no longer in the model: its class."""
        info = self._info(position)
        attributes = (info.param_name, *info.shared_param_names)
        owners = self.owners(position)
        return [f"({type(owner).__name__}).{name}" for owner, name in zip(owners, attributes, strict=True)]

    def resting(self, position: int) -> nn.Parameter:
        if self._rereads:
            info = self._info(position)
            shown = shown_parameter(info.module, info.param_name)
            is_dtensor = isinstance(shown, DTensor)  # FSDP2 takes any of these, and fails on all else
            if shown is not None and is_dtensor:
                return shown
        # FSDPParam.sharded_param (torch 2.6 to 2.13).
        parameter: nn.Parameter = require(self._parameters[position], "sharded_param", "torch")
        return parameter

    def materialized(self, position: int) -> nn.Parameter | None:
        """The unsharded parameter, or the one sharded more coarsely for the time between forward and backward."""
        # FSDPParam (torch 2.6 to 2.13): ._unsharded_param from the first all-gather on, ._sharded_post_forward_param
        # while reshard_after_forward=<int> has it on the module.
        raw = self._parameters[position]
        parameter = getattr(raw, "_sharded_post_forward_param", None)
        return getattr(raw, "_unsharded_param", None) if parameter is None else parameter

    def resting_buffers(self, position: int) -> tuple[torch.Tensor, ...] | None:
        # FSDPParam._sharded_param_data (torch 2.6 to 2.13): the padded flat tensor that the next all-gather reads.
        data = require(self._parameters[position], "_sharded_param_data", "torch")
        return None if self._rereads else self._if_plain(data, self.resting(position))

    def materialized_buffers(self, position: int) -> tuple[torch.Tensor, ...] | None:
        # FSDPParam.all_gather_outputs (torch 2.6 to 2.13): emptied under compiled autograd, which copies them.
        raw = self._parameters[position]
        outputs = require(raw, "all_gather_outputs", "torch")
        parameter: nn.Parameter | None = getattr(raw, "_unsharded_param", None)
        if len(outputs) != 1 or parameter is None or parameter is not self.materialized(position):
            return None
        return self._if_plain(outputs[0], parameter)

    def _if_plain(self, data: torch.Tensor, parameter: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        """Return the buffer, unless it has no address: quantized tensors gather parts of their own, meta has none."""
        local = local_tensor(parameter)
        plain = type(data) is torch.Tensor and type(local) in (torch.Tensor, nn.Parameter)
        return (data,) if plain and not data.is_meta and not local.is_meta else None

    def _info(self, position: int) -> Any:
        # FSDPParam._module_info (torch 2.6 to 2.13): a ParamModuleInfo with module, param_name, shared_modules and
        # shared_param_names.
        return require(self._parameters[position], "_module_info", "torch")
