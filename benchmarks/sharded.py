"""What the benchmarks measure on: models under the real Megatron-FSDP V2, in a process group of one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron_fsdp import experimental
from megatron_fsdp.mixed_precision import MixedPrecisionPolicy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_guard.demo.cpu import install_cuda_stand_ins


def join() -> torch.device:
    """Start a process group of this process alone, on the GPU where there is one, and return the device."""
    store = f"file://{tempfile.mkdtemp()}/store"
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=0, world_size=1)
        return torch.device("cuda", 0)
    install_cuda_stand_ins()
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    return torch.device("cpu")


def shard(units: Iterable[nn.Module], device: torch.device | str = "cpu") -> None:
    """Shard each module, inner ones first. Weights below float32 get main weights in float32."""
    mesh = init_device_mesh(torch.device(device).type, (1,), mesh_dim_names=("dp",))
    flat: Any = experimental.Flat()
    placements = experimental.Placements(dp_axes=["dp"], parameter=[flat], gradient=[flat], optimizer=[flat])
    for unit in units:
        experimental.fully_shard(unit, mesh, placements, mixed_precision_policy=MixedPrecisionPolicy())
