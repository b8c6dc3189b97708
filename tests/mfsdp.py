"""Shard small models with the Megatron-FSDP that is installed; V2 in whichever of its two layouts that has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import megatron_fsdp
import torch
import torch.distributed as dist
from megatron_fsdp import experimental
from megatron_fsdp.mixed_precision import MixedPrecisionPolicy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_guard import DivergenceKind, Report
from fsdp_guard.demo.case import CHECKPOINT, INITIAL, INITIAL_LOSS

MAIN_LAYOUT = hasattr(experimental, "fully_shard_context")
"""Whether the installed package has the layout of Megatron-LM's main since August 2026."""

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

STALE_LOSS = INITIAL_LOSS
"""Loss of the weights before the load: what a run shows at every step when the load did not arrive."""

LOADED_LOSSES = [0.44921875, 0.394821, 0.347011, 0.304990]
"""Loss before each of the first SGD steps (lr 0.5) when the load arrived."""


def mesh() -> DeviceMesh:
    return init_device_mesh(DEVICE, (dist.get_world_size(),), mesh_dim_names=("dp",))


def shard(
    *units: nn.Module,
    package: Any = experimental,
    main_grads_dtype: torch.dtype | None = None,
    over: DeviceMesh | None = None,
) -> None:
    """``fully_shard`` the modules in the given order (inner ones first), with everything sharded over ``over``.

    Default: over all ranks.
    """
    flat: Any = Shard(0) if MAIN_LAYOUT else package.Flat()
    placements = package.Placements(dp_axes=["dp"], parameter=[flat], gradient=[flat], optimizer=[flat])
    policy = MixedPrecisionPolicy(main_grads_dtype=main_grads_dtype)
    shard_as(placements, mesh() if over is None else over, *units, package=package, policy=policy)


def shard_as(
    placements: Any,
    shared_mesh: DeviceMesh,
    *units: nn.Module,
    package: Any = experimental,
    policy: MixedPrecisionPolicy | None = None,
) -> None:
    """``fully_shard`` the modules in the given order with the given placements."""
    with package.fully_shard_context() if MAIN_LAYOUT else contextlib.nullcontext():
        for unit in units:
            package.fully_shard(unit, shared_mesh, placements, mixed_precision_policy=policy)


def shard_v1(
    model: nn.Module,
    *units: type[nn.Module],
    strategy: str = "optim_grads_params",
    main_params_dtype: torch.dtype | None = torch.float32,
) -> Any:
    """Wrap ``model`` with Megatron-FSDP V1, gathering modules of the classes ``units`` apart."""
    return megatron_fsdp.fully_shard_model(
        model,
        device_mesh=init_device_mesh(DEVICE, (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp")),
        dp_shard_dim="dp",
        tp_dim="tp",
        fsdp_unit_modules=units,
        device=torch.device(DEVICE),
        zero_dp_strategy=strategy,
        calculate_per_token_loss=True,  # sums gradients; gloo cannot average them
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=main_params_dtype),
    )


def linear(dtype: torch.dtype = torch.float32) -> nn.Linear:
    """Issue 6087's model, not sharded yet."""
    model = nn.Linear(4, 4, bias=False, device=DEVICE, dtype=dtype)
    with torch.no_grad():
        model.weight.copy_(INITIAL)
    return model


def sharded_linear(dtype: torch.dtype = torch.float32) -> nn.Linear:
    model = linear(dtype)
    shard(model)
    return model


def found_in(report: Report) -> list[tuple[DivergenceKind, str]]:
    """Kind and FQN of each divergence."""
    return [(divergence.kind, divergence.fqn) for divergence in report.divergences]


def replace_parameter(module: nn.Module, name: str = "weight") -> None:
    """Put an equal parameter in the place of one, which no runtime holds then."""
    setattr(module, name, nn.Parameter(getattr(module, name).detach().clone()))


def checkpoint() -> dict[str, torch.Tensor]:
    """Issue 6087's checkpoint as DTensors, as a distributed load hands it over."""
    return {"weight": distribute_tensor(CHECKPOINT.to(DEVICE), mesh(), [Shard(0)])}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    experimental.fully_shard_optimizer(optimizer)
    return optimizer


def loss(model: nn.Module) -> torch.Tensor:
    groups = getattr(model, "parameter_groups", ())
    inputs = torch.eye(4, device=DEVICE, dtype=groups[0].dtype if groups else torch.float32)
    return nn.functional.mse_loss(model(inputs).float(), torch.zeros(4, 4, device=DEVICE))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    """Return the loss before each step."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


class Block(nn.Module):
    """A small residual block that calls back from inside its forward and its backward, so that a test can look."""

    def __init__(self, look: Callable[[str], object] | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        self.look = look

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(inputs))
        look = self.look
        if look is not None:
            look("inside a forward")
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: (look("inside the backward"), gradient)[1])
        return inputs + self.down(hidden)


class Tower(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def tower(depth: int = 2, look: Callable[[str], object] | None = None) -> Tower:
    """A tower, each block and the whole of it a unit."""
    torch.manual_seed(0)
    model = Tower([Block(look) for _ in range(depth)]).to(DEVICE)
    shard(*model.blocks, model)
    return model
