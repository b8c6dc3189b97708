"""Megatron-FSDP V2: ``megatron_fsdp.experimental.fully_shard``.

Two layouts of a parameter group are in use, under two import paths (``megatron_fsdp.experimental`` and
``megatron.core.distributed.fsdp.src.megatron_fsdp.experimental``), so both are recognised by what they carry:

- *released*: megatron-fsdp 0.6.0 and 0.6.1, megatron-core 0.19. Parallel tuples, one entry a name; a tied parameter
  has one entry for each of its names.
- *main*: Megatron-LM since August 2026. One object a physical parameter, with all of its names.

Upstream: ``megatron_fsdp/experimental/parameter_group.py`` and ``module.py`` of
https://github.com/NVIDIA/Megatron-LM.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fsdp_guard.holders.base import Group, Runtime, Weights, require, unsupported


class MfsdpV2(Runtime):
    """Reads the units of Megatron-FSDP V2: modules whose class ``fully_shard`` extended by ``FsdpModule``."""

    name = "mfsdp_v2"

    sources: ClassVar = {
        "megatron_fsdp.experimental": "megatron-fsdp",
        "megatron.core.distributed.fsdp.src.megatron_fsdp.experimental": "megatron-core",
    }

    def manages(self, cls: type[nn.Module]) -> bool:
        """Whether ``fully_shard`` gave a module this class."""
        # By class and never by hasattr: wrappers such as OptimizedModule answer for the module that they wrap.
        return any(_is_unit_class(base) for base in cls.__mro__)

    def groups(self, unit: nn.Module) -> Sequence[Group]:
        """Return the groups of ``unit``, read in whichever layout they have."""
        # FsdpModule.parameter_groups: a public property in both layouts.
        return [_read_group(raw) for raw in require(unit, "parameter_groups", *_PACKAGES)]

    def wrap(self, source: Any, model: nn.Module) -> nn.Module:
        """Shard everything, with float32 main weights."""
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        # The main layout has a context for several calls, and takes Shard(0) where the released one takes Flat().
        is_main = hasattr(source, "fully_shard_context")
        flat = Shard(0) if is_main else source.Flat()
        placements = source.Placements(dp_axes=["dp"], parameter=[flat], gradient=[flat], optimizer=[flat])
        with source.fully_shard_context() if is_main else contextlib.nullcontext():
            source.fully_shard(model, mesh, placements)
        return model


_PACKAGES = tuple(MfsdpV2.sources.values())


def _is_unit_class(cls: type) -> bool:
    if cls.__module__.endswith("megatron_fsdp.experimental.module"):
        return True
    return cls.__name__ == "FsdpModule" and hasattr(cls, "parameter_groups")


def _read_group(raw: Any) -> Group:
    # FsdpParameterGroup: the first attribute exists in the main layout alone, the second in the released one alone.
    if hasattr(raw, "fsdp_parameters"):
        return _MainGroup(raw)
    if hasattr(raw, "sharded_parameters"):
        return _ReleasedGroup(raw)
    raise unsupported(raw, "sharded_parameters", *_PACKAGES)


class _MfsdpV2Group(Group):
    runtime = MfsdpV2.name

    def __init__(self, raw: Any) -> None:
        super().__init__(raw)
        # FsdpParameterGroup.main_weight (both layouts): the DBuffer that resting parameters are views of.
        self._resting_buffers = (_flat(require(raw, "main_weight", *_PACKAGES)),)
        # FsdpParameterGroup._unsharded_model_weight (both layouts): the all-gather's destination. The main layout
        # shows model_weight itself where that is replicated already (ZeRO-1).
        unsharded = _flat(require(raw, "_unsharded_model_weight", *_PACKAGES))
        self._materialized_buffers = (unsharded, _flat(require(raw, "model_weight", *_PACKAGES)))

    def step_reaches_forward(self, position: int) -> bool:
        """Whether the step hook of ``fully_shard_optimizer`` would find this group from the parameter."""
        if self.raw.main_weight is self.raw.model_weight:
            return True
        # _mfsdp_parameter_group on each Parameter: the group itself (released layout) or a weak reference to it (main).
        # Module.to() rebuilds DTensor parameters without it, even where nothing moves (torch 2.11 to 2.13, _apply).
        mark = getattr(self.resting(position), "_mfsdp_parameter_group", None)
        return (mark() if isinstance(mark, weakref.ref) else mark) is self.raw

    def weights(self) -> Sequence[Weights]:
        """Cut both buffers to the part of the group that this rank has of each."""
        # FsdpParameterGroup.main_weight and model_weight (both layouts): one DBuffer where dtypes and placements
        # agree. They share one layout, so an element has the same global offset in both. Read again here, since a
        # refresh of the main layout puts a new DBuffer in model_weight's place.
        main, model = self.raw.main_weight, self.raw.model_weight
        if main is model:
            return ()
        _wait_for(main)
        _wait_for(model)
        main_flat, model_flat = _flat(main), _flat(model)
        main_start, model_start = _offset(main), _offset(model)
        start = max(main_start, model_start)
        end = max(start, min(main_start + main_flat.numel(), model_start + model_flat.numel()))
        spans = {
            position: (min(max(a, start), end) - start, min(max(b, start), end) - start)
            for position, (a, b) in enumerate(_spans(main))
        }
        main_part = main_flat[start - main_start : end - main_start]
        return [Weights(main_part, model_flat[start - model_start : end - model_start], spans)]

    def refresh(self) -> None:
        """Call the group's own refresh."""
        # FsdpParameterGroup.sync_model_weight_from_main_weight: a public method in both layouts.
        require(self.raw, "sync_model_weight_from_main_weight", *_PACKAGES)()

    def resting_buffers(self, position: int) -> tuple[torch.Tensor, ...]:
        return self._resting_buffers

    def materialized_buffers(self, position: int) -> tuple[torch.Tensor, ...]:
        return self._materialized_buffers


class _ReleasedGroup(_MfsdpV2Group):
    # FsdpParameterGroup of megatron-fsdp 0.6.0 and 0.6.1: parameter_names, sharded_parameters, unsharded_parameters.
    def __init__(self, raw: Any) -> None:
        super().__init__(raw)
        self._names: Sequence[str] = require(raw, "parameter_names", *_PACKAGES)
        self._resting: Sequence[nn.Parameter] = require(raw, "sharded_parameters", *_PACKAGES)
        self._materialized: Sequence[nn.Parameter] = require(raw, "unsharded_parameters", *_PACKAGES)

    def __len__(self) -> int:
        return len(self._names)

    def refreshed_together(self) -> Sequence[Any]:
        """Where the placements differ, this layout's refresh gathers; main's only casts."""
        main, model = self.raw.main_weight, self.raw.model_weight
        if require(main, "placements", *_PACKAGES) == require(model, "placements", *_PACKAGES):
            return ()
        # DBuffer.mesh (both layouts): a torch DeviceMesh over the ranks that share the buffer.
        groups: Sequence[Any] = require(main, "mesh", *_PACKAGES).get_all_groups()
        return groups

    def names(self, position: int) -> tuple[str, ...]:
        return (self._names[position],)

    def resting(self, position: int) -> nn.Parameter:
        return self._resting[position]

    def materialized(self, position: int) -> nn.Parameter:
        return self._materialized[position]


class _MainGroup(_MfsdpV2Group):
    # FsdpParameterGroup of Megatron-LM's main since August 2026: fsdp_parameters, a tuple of FsdpParameter, each with
    # fqns, sharded and unsharded.
    def __init__(self, raw: Any) -> None:
        super().__init__(raw)
        self._parameters: Sequence[Any] = raw.fsdp_parameters

    def __len__(self) -> int:
        return len(self._parameters)

    def names(self, position: int) -> tuple[str, ...]:
        names: tuple[str, ...] = require(self._parameters[position], "fqns", *_PACKAGES)
        return names

    def resting(self, position: int) -> nn.Parameter:
        parameter: nn.Parameter = require(self._parameters[position], "sharded", *_PACKAGES)
        return parameter

    def materialized(self, position: int) -> nn.Parameter:
        parameter: nn.Parameter = require(self._parameters[position], "unsharded", *_PACKAGES)
        return parameter


def _spans(dbuffer: Any) -> list[tuple[int, int]]:
    # DBuffer.layout (both layouts): a GlobalLayout with the global offset and the shape of each parameter.
    layout = require(dbuffer, "layout", *_PACKAGES)
    offsets, shapes = require(layout, "tensor_to_offset", *_PACKAGES), require(layout, "tensor_shapes", *_PACKAGES)
    return [(offset, offset + shape.numel()) for offset, shape in zip(offsets, shapes, strict=True)]


def _offset(dbuffer: Any) -> int:
    # DBuffer.offset (both layouts): global offset of local_buffer's first element.
    offset: int = require(dbuffer, "offset", *_PACKAGES)
    return offset


def _wait_for(dbuffer: Any) -> None:
    # DBuffer.allocation_stream (main layout): the stream that may still be writing the buffer; None on the CPU. The
    # released layout writes its buffers on the current stream.
    stream = getattr(dbuffer, "allocation_stream", None)
    if stream is not None:
        torch.cuda.current_stream(dbuffer.local_buffer.device).wait_stream(stream)


def _flat(dbuffer: Any) -> torch.Tensor:
    # DBuffer.local_buffer (both layouts): a flat tensor, shape (local elements of the group,).
    buffer: torch.Tensor = require(dbuffer, "local_buffer", *_PACKAGES)
    return buffer
