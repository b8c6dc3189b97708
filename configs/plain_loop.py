"""A training loop of your own, guarded: FSDP2 with W&B, on GPUs where there are any.

torchrun --nproc-per-node 2 configs/plain_loop.py --checkpoint model.pt
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import wandb
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

import fsdp_guard


def build_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, required=True, help="read if it is there, written at the end")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    dist.init_process_group()
    if device.type == "cuda":
        torch.accelerator.set_device_index(dist.get_node_local_rank())
    if dist.get_rank() == 0:
        wandb.init(project="plain-loop")  # the guard reports to the run that is active

    model = build_model().to(device)
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    guard = fsdp_guard.Guard()
    guard.watch(model, optimizers=optimizer)  # after sharding, and after the optimizer was built

    if arguments.checkpoint.exists():
        state = torch.load(arguments.checkpoint, weights_only=True)
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))  # looked at
    for step in range(arguments.steps):  # looked at before the first forward and before the first step
        batch = torch.randn(16, 32, device=device)
        loss = (model(batch) - batch.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            wandb.log({"loss": loss.item()}, step=step)

    guard.check(model, optimizers=optimizer, event="save")  # on every rank
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(state, arguments.checkpoint)
        wandb.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
