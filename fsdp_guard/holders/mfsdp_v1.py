"""Megatron-FSDP V1: ``megatron_fsdp.fully_shard_model``, which wraps the model in a ``MegatronFSDP`` module.

It switches all parameters at once and addresses them by name: what the module shows is not looked at, so a replaced
parameter is dropped at the next forward.

Upstream: ``megatron_fsdp/megatron_fsdp.py`` and ``param_and_grad_buffer.py`` of https://github.com/NVIDIA/Megatron-LM,
the same in megatron-fsdp 0.4.0 to 0.6.1 as far as it is read here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_guard.holders.base import Group, Runtime, Weights, local_tensor, require, unsupported
from fsdp_guard.report import DivergenceKind


class MfsdpV1(Runtime):
    """Reads ``MegatronFSDP`` modules."""

    name = "mfsdp_v1"

    sources: ClassVar = {
        "megatron_fsdp": "megatron-fsdp",
        "megatron.core.distributed.fsdp.src.megatron_fsdp": "megatron-core",
    }

    remedies: ClassVar = {
        DivergenceKind.REPLACED_PARAMETER: (
            "Load with load_state_dict(..., assign=False), the default, or before fully_shard_model(); change a weight "
            "in place, under torch.no_grad(). A new parameter lacks the runtime's mark (_megatron_fsdp_model), which "
            'is what fully_shard_optimizer() means by "could not retrieve a reference to MegatronFSDP".'
        ),
        DivergenceKind.UNMANAGED_PARAMETER: (
            "Add the parameter before fully_shard_model(). If it was tied to another one, tie it again: let the module "
            "show the other one here too. The runtime stops at its next switch otherwise, with an AssertionError."
        ),
        DivergenceKind.STALE_COMPUTE_WEIGHT: (
            "After torch.distributed.checkpoint.load(), which runs none of the hooks that refresh them, call "
            "model.load_state_dict() with what was loaded, or fsdp_guard.refresh(model), on every rank."
        ),
    }

    def manages(self, cls: type[nn.Module]) -> bool:
        """Whether the class is ``MegatronFSDP``, under whichever of its import paths, or derived from it."""
        return any(_is_unit_class(base) for base in cls.__mro__)

    def groups(self, unit: nn.Module) -> Sequence[Group]:
        """Return one group: all parameters of the model."""
        return [_MfsdpV1Group(unit)]

    def wrap(self, source: Any, model: nn.Module) -> nn.Module:
        """Shard everything, with float32 main weights."""
        # It also asks for a dimension for tensor parallelism, and for at least one module to gather apart.
        mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
        wrapped: nn.Module = source.fully_shard_model(
            model,
            device_mesh=mesh,
            dp_shard_dim="dp",
            tp_dim="tp",
            fsdp_unit_modules=[type(child) for child in model.children()],
            device=torch.device("cpu"),
        )
        return wrapped


_PACKAGES = tuple(MfsdpV1.sources.values())


def _is_unit_class(cls: type) -> bool:
    return cls.__name__ == "MegatronFSDP" and cls.__module__.endswith("megatron_fsdp.megatron_fsdp")


class _Item(NamedTuple):
    """One parameter: its name in the wrapped module, its two objects, and its number in a buffer group."""

    name: str
    resting: nn.Parameter
    materialized: nn.Parameter
    raw_group: Any
    number: int


class _MfsdpV1Group(Group):
    runtime = MfsdpV1.name

    @cached_property
    def _items(self) -> list[_Item]:
        # MegatronFSDP.param_and_grad_buffer and .raw_param; ParamAndGradBuffer.optimizer_named_parameters, a list of
        # names and sharded parameters, and .parameter_groups, whose params are in the same order (0.4.0 to 0.6.1).
        buffers = require(self.raw, "param_and_grad_buffer", *_PACKAGES)
        raw_parameters = require(self.raw, "raw_param", *_PACKAGES)
        named = require(buffers, "optimizer_named_parameters", *_PACKAGES)
        places = [
            (raw_group, number)
            for raw_group in require(buffers, "parameter_groups", *_PACKAGES)
            for number in range(len(require(raw_group, "params", *_PACKAGES)))
        ]
        if len(places) != len(named):
            raise unsupported(buffers, "optimizer_named_parameters", *_PACKAGES)
        return [
            _Item(name, resting, raw_parameters[name], *place)
            for (name, resting), place in zip(named, places, strict=True)
        ]

    @cached_property
    def _names(self) -> list[list[str]]:
        """For each parameter the name that the runtime has, and the others under which the module shows it."""
        names = [[f"module.{item.name}"] for item in self._items]
        position = {id(item.resting): number for number, item in enumerate(self._items)}
        position |= {id(item.materialized): number for number, item in enumerate(self._items)}
        for name, parameter in self.raw.named_parameters(remove_duplicate=False):
            number = position.get(id(parameter))
            # The runtime finds a tied parameter's other names in the same way, at each switch.
            if number is not None and name not in names[number]:
                names[number].append(name)
        return names

    def __len__(self) -> int:
        return len(self._items)

    def names(self, position: int) -> Sequence[str]:
        return self._names[position]

    def resting(self, position: int) -> nn.Parameter:
        return self._items[position].resting

    def materialized(self, position: int) -> nn.Parameter:
        return self._items[position].materialized

    def resting_buffers(self, position: int) -> tuple[torch.Tensor, ...]:
        """The main weights, else the compute weights, else (nothing is sharded) the original parameter."""
        item = self._items[position]
        main, compute = _main(item), _compute(item)
        if main is None and compute is None:
            return (local_tensor(item.materialized),)
        return (_data(compute if main is None else main),)

    def materialized_buffers(self, position: int) -> tuple[torch.Tensor, ...] | None:
        item = self._items[position]
        main, compute = _main(item), _compute(item)
        if compute is None:
            return (local_tensor(item.resting),) if main is None else None
        # ParameterGroup.hfsdp_helper_wbuf (0.5 and newer). There, and where the compute weights are sharded, each
        # all-gather has a buffer of its own and points the parameters at it.
        helper = getattr(item.raw_group, "hfsdp_helper_wbuf", None)
        if helper is not None or not _is_plain(item) or require(compute, "is_data_distributed", *_PACKAGES):
            return None
        return (_data(compute),)

    def weights(self) -> Sequence[Weights]:
        """Pair what the runtime copies at a refresh."""
        return [
            Weights(*pair, {position: (0, pair[0].numel())})
            for position, item in enumerate(self._items)
            if (pair := _copied(item)) is not None
        ]

    def refresh(self) -> None:
        """Call the runtime's own refresh, which is for all parameters."""
        # MegatronFSDP.install_optimized_model_weights: a public method (0.4.0 to 0.6.1).
        require(self.raw, "install_optimized_model_weights", *_PACKAGES)()

    def refreshed_together(self) -> Sequence[Any]:
        """The refresh of one rank alone is right, but for FP8 weights, whose scales are agreed upon."""
        found = [main for item in self._items if (main := _main(item)) is not None]
        # DataParallelBuffer.data_parallel_group (0.4.0 to 0.6.1).
        groups = [require(main, "data_parallel_group", *_PACKAGES) for main in found]
        return list({id(group): group for group in groups}.values())


def _copied(item: _Item) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return this rank's main and compute weights, flat; ``None`` where the two are one, or are quantized."""
    main, compute = _main(item), _compute(item)
    if main is None or not _is_plain(item):
        return None
    # DataParallelBuffer.get_item, a public method, and .is_data_distributed (0.4.0 to 0.6.1).
    get_main = require(main, "get_item", *_PACKAGES)
    if compute is None:
        return get_main(item.number), local_tensor(item.materialized).detach().reshape(-1)
    shard = compute.is_data_distributed or main.is_data_distributed
    return get_main(item.number, only_shard=shard), compute.get_item(item.number, only_shard=shard)


def _main(item: _Item) -> Any:
    # ParameterGroup.main_weight_buffer (0.4.0 to 0.6.1): a DataParallelBuffer; None without main_params_dtype and, by
    # default, for frozen parameters.
    return require(item.raw_group, "main_weight_buffer", *_PACKAGES)


def _compute(item: _Item) -> Any:
    # ParameterGroup.model_weight_buffer (0.4.0 to 0.6.1): a DataParallelBuffer; None without sharding.
    return require(item.raw_group, "model_weight_buffer", *_PACKAGES)


def _data(buffer: Any) -> torch.Tensor:
    # DataParallelBuffer.data (0.4.0 to 0.6.1): a flat tensor, shape (local elements of the group,).
    data: torch.Tensor = require(buffer, "data", *_PACKAGES)
    return data


def _is_plain(item: _Item) -> bool:
    return type(local_tensor(item.materialized)) in (torch.Tensor, nn.Parameter)
