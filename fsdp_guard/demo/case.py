"""The case of Megatron-LM issue 6087, played by one of two ranks: unguarded, guarded, fixed.

Model, weights, learning rate and losses are those of the issue:
https://github.com/NVIDIA/Megatron-LM/issues/6087
"""

from __future__ import annotations

import datetime
import logging
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdp_guard.demo.cpu import install_cuda_stand_ins
from fsdp_guard.guard import Guard
from fsdp_guard.report import HolderDivergenceError

WORLD_SIZE = 2
STEPS = 20
LEARNING_RATE = 0.5

CHECKPOINT = torch.tensor(
    [[1, -0.5, 0.25, -0.75], [-0.25, 0.75, -1, 0.5], [0.5, 0.25, -0.5, 1], [-0.75, 1, 0.5, -0.25]]
)
"""The checkpoint's weights, shape (4, 4). Their loss is ``CHECKPOINT_LOSS``."""

INITIAL = torch.tensor([[0.25, -0.75, 0.5, -0.25], [0.5, 0.25, -0.75, 1], [-1, 0.5, 0.25, -0.5], [0.75, -0.25, 1, 0.5]])
"""The weights before the load, shape (4, 4). Their loss is ``INITIAL_LOSS``."""

CHECKPOINT_LOSS = 0.44921875
INITIAL_LOSS = 0.390625


@dataclass
class Played:
    """What happened on one rank.

    Args:
        where: Device and backend, in words.
        load_result: What the unguarded ``load_state_dict`` returned.
        unguarded: Loss before each step of the unguarded run.
        message: What the guarded run raised, or an empty string.
        event: The event at which it raised.
        wandb_dir: Folder of the guarded run's offline W&B run, on rank 0.
        fixed: Loss before each step of the run that loads in place.
    """

    where: str = ""
    load_result: str = ""
    unguarded: list[float] = field(default_factory=list)
    message: str = ""
    event: str = ""
    wandb_dir: str = ""
    fixed: list[float] = field(default_factory=list)


def play(rank: int, folder: Path) -> Played:
    """Join the process group, play all three acts on this rank, and leave the group.

    Args:
        rank: 0 or 1.
        folder: A folder that both ranks see, for the rendezvous and for the W&B run.
    """
    warnings.simplefilter("ignore")  # deprecations inside the runtime, which its users cannot act on
    logging.getLogger("fsdp_guard").addHandler(logging.NullHandler())  # the demo prints the message itself
    device, backend = _choose_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=datetime.timedelta(seconds=60),
    )
    try:
        mesh = init_device_mesh(device.type, (WORLD_SIZE,), mesh_dim_names=("dp",))
        played = Played(where=f"{backend} on {'CPU' if device.type == 'cpu' else torch.cuda.get_device_name()}")
        _play_unguarded(played, device, mesh)
        _play_guarded(played, device, mesh, folder if rank == 0 else None)
        _play_fixed(played, device, mesh)
        return played
    finally:
        dist.destroy_process_group()


def _choose_device(rank: int) -> tuple[torch.device, str]:
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        install_cuda_stand_ins()
        return torch.device("cpu"), "gloo"
    # NCCL refuses two ranks on one GPU.
    backend = "nccl" if torch.cuda.device_count() >= WORLD_SIZE else "gloo"
    device = torch.device("cuda", rank if backend == "nccl" else 0)
    torch.cuda.set_device(device)
    return device, backend


def _play_unguarded(played: Played, device: torch.device, mesh: DeviceMesh) -> None:
    model = _sharded_model(device, mesh)
    played.load_result = str(model.load_state_dict(_checkpoint(device, mesh), assign=True))
    played.unguarded = _train(model, _optimizer(model))


def _play_guarded(played: Played, device: torch.device, mesh: DeviceMesh, wandb_folder: Path | None) -> None:
    if wandb_folder is not None:
        import wandb

        os.environ["WANDB_SILENT"] = "true"
        run = wandb.init(project="fsdp-guard-demo", mode="offline", dir=wandb_folder)
        played.wandb_dir = str(Path(run.dir).parent)
    model = _sharded_model(device, mesh)
    with Guard().watch(model):
        try:
            model.load_state_dict(_checkpoint(device, mesh), assign=True)
        except HolderDivergenceError as error:
            played.message = str(error)
            played.event = error.report.event.value


def _play_fixed(played: Played, device: torch.device, mesh: DeviceMesh) -> None:
    model = _sharded_model(device, mesh)
    optimizer = _optimizer(model)
    with Guard().watch(model, optimizer):
        model.load_state_dict(_checkpoint(device, mesh), assign=False)
        played.fixed = _train(model, optimizer)


def _sharded_model(device: torch.device, mesh: DeviceMesh) -> nn.Module:
    from megatron_fsdp.experimental import Flat, Placements, fully_shard

    model = nn.Linear(4, 4, bias=False, device=device)
    with torch.no_grad():
        model.weight.copy_(INITIAL)
    placements = Placements(dp_axes=["dp"], parameter=[Flat()], gradient=[Flat()], optimizer=[Flat()])
    fully_shard(model, mesh, placements)
    return model


def _checkpoint(device: torch.device, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    return {"weight": distribute_tensor(CHECKPOINT.to(device), mesh, [Shard(0)])}


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    from megatron_fsdp.experimental import fully_shard_optimizer

    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, foreach=False)
    fully_shard_optimizer(optimizer)
    return optimizer


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    inputs = torch.eye(4, device=next(model.parameters()).device)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), torch.zeros_like(inputs))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
