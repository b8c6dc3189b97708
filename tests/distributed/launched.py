"""A training script that tests start with torchrun: ``launched.py CASE FOLDER FAILING``; W&B runs on rank 0 alone."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import wandb
from torch.distributed.device_mesh import init_device_mesh

import fsdp_guard
from fsdp_guard.demo.cpu import install_cuda_stand_ins
from tests.distributed.ranks import BACKEND
from tests.mfsdp import DEVICE, checkpoint, linear, replace_parameter, sgd, shard, sharded_linear, train


def data_parallel(guard: fsdp_guard.Guard, is_failing: bool) -> list[float]:
    """One model over all ranks; one of them loads it wrongly. The others are in a collective by then."""
    model = sharded_linear()
    optimizer, state = sgd(model), checkpoint()
    guard.watch(model, optimizer)
    if is_failing:
        replace_parameter(model)
    model.load_state_dict(state)
    return train(model, optimizer)


def pipeline(guard: fsdp_guard.Guard, is_failing: bool) -> list[float]:
    """Two stages, each a model of its own; the second waits for what the first one's forward gives."""
    stage = dist.get_rank()
    model = linear()
    mesh = init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("pp", "dp"))["dp"]
    shard(model, over=mesh)
    optimizer = sgd(model)
    guard.watch(model, optimizer)
    if is_failing:
        replace_parameter(model)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        if stage == 0:
            output = model(torch.eye(4, device=DEVICE))
            dist.send(output.detach(), 1)
            gradient = torch.empty_like(output)
            dist.recv(gradient, 1)
            output.backward(gradient)
        else:
            received = torch.empty(4, 4, device=DEVICE).requires_grad_()
            dist.recv(received.detach(), 0)
            loss = model(received).square().mean()
            loss.backward()
            dist.send(received.grad, 0)
            losses.append(loss.item())
        optimizer.step()
    return losses


def main(case: str, folder: Path, failing: int) -> None:
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        install_cuda_stand_ins()
    dist.init_process_group(BACKEND)
    rank = dist.get_rank()
    if rank == 0:
        wandb.init(project="guard", mode="offline", dir=folder, settings=wandb.Settings(silent=True))
    try:
        losses = {"data_parallel": data_parallel, "pipeline": pipeline}[case](fsdp_guard.Guard(), rank == failing)
        (folder / f"rank{rank}").write_text(f"losses {losses}")
    except fsdp_guard.HolderDivergenceError as error:
        (folder / f"rank{rank}").write_text(str(error))
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
