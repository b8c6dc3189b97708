"""What else would have told: which cases each check catches, which healthy runs it stops, and what it costs.

Every case of tests/distributed/test_facts.py, and healthy runs beside them, are set up anew for each check. Checks:

- *fsdp_guard*: ``inspect(model, optimizer, values=True)``.
- *state dict*: every entry of ``model.state_dict()``, gathered, equals what the user believes is in the model.
- *loss probe*: the loss on a fixed batch moves with the load, and with the first step.
- *guardtower*: ``guardtower.audit`` finds an error (``pip install guardtower``; left out where it is not installed).

    python -m benchmarks.peers --layers 50 --width 1024
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron_fsdp import experimental
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import fsdp_guard
from benchmarks.sharded import join, shard
from fsdp_guard.holders import take_inventory


@dataclass
class Run:
    """A run up to its first step.

    Args:
        model: The sharded model.
        believed: What the user believes is in the model when it trains.
        load: What is done to the model after it was wrapped; ``None`` where that is nothing.
        optimizer: The optimizer, where it was built before ``load``.
    """

    model: nn.Module
    believed: dict[str, torch.Tensor]
    load: Callable[[], object] | None = None
    optimizer: torch.optim.Optimizer | None = None

    def begin(self) -> torch.optim.Optimizer:
        """Load, and return the optimizer."""
        if self.load is not None:
            self.load()
        return self.optimizer or sgd(self.model)

    def loss(self) -> torch.Tensor:
        """Return the loss of a fixed batch."""
        weight = take_inventory([("", self.model)]).groups[0].group.materialized(0)
        inputs = torch.eye(weight.shape[1], device=weight.device, dtype=weight.dtype)
        return (self.model(inputs).float() - 1).square().mean()


class Models:
    """Makes the models of one size.

    Args:
        layers: Number of linear layers, each a unit.
        width: Rows and columns of each.
        device: Where they are.
    """

    def __init__(self, layers: int, width: int, device: torch.device) -> None:
        self._layers, self._width, self.device = layers, width, device

    def plain(self, dtype: torch.dtype = torch.float32) -> nn.Sequential:
        layers = [nn.Linear(self._width, self._width, bias=False) for _ in range(self._layers)]
        return nn.Sequential(*layers).to(self.device, dtype)

    def sharded(self, dtype: torch.dtype = torch.float32) -> nn.Sequential:
        model = self.plain(dtype)
        shard(model, self.device)
        return model

    def checkpoint(self, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        return self.plain(dtype).float().state_dict()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
    experimental.fully_shard_optimizer(optimizer)
    return optimizer


def as_sharded(model: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return ``state`` as the model's own DTensors, as a distributed load hands it over."""
    return {
        name: distribute_tensor(state[name], shown.device_mesh, shown.placements)
        for name, shown in model.state_dict().items()
    }


def loaded(models: Models, assign: bool = False, dtype: torch.dtype = torch.float32) -> Run:
    model, checkpoint = models.sharded(dtype), models.checkpoint(dtype)
    state = as_sharded(model, checkpoint)
    return Run(model, checkpoint, lambda: model.load_state_dict(state, assign=assign))


def optimizer_before_load(models: Models) -> Run:
    run = loaded(models, assign=True)
    run.optimizer = sgd(run.model)
    return run


def new_parameter(models: Models) -> Run:
    run = loaded(models)
    state = as_sharded(run.model, run.believed)

    def load() -> None:
        for index, layer in enumerate(run.model.children()):
            layer.weight = nn.Parameter(state[f"{index}.weight"])

    run.load = load
    return run


def swapped_tensors(models: Models) -> Run:
    run = loaded(models)
    state = as_sharded(run.model, run.believed)

    def load() -> None:
        for name, weight in run.model.named_parameters():
            torch.utils.swap_tensors(weight, nn.Parameter(state[name]))

    run.load = load
    return run


def optimizer_before_wrap(models: Models) -> Run:
    model = models.plain()
    optimizer = sgd(model)
    believed = {name: weight.clone() for name, weight in model.state_dict().items()}
    shard(model, models.device)
    return Run(model, believed, optimizer=optimizer)


def tied(models: Models) -> Run:
    model = models.plain()
    model[-1].weight = model[0].weight
    believed = {name: weight.clone() for name, weight in model.state_dict().items()}
    shard([model], models.device)
    return Run(model, believed)


def registered_after_wrap(models: Models) -> Run:
    run = loaded(models)
    layer = run.model.get_submodule("0")
    bias = torch.zeros(layer.out_features, device=run.believed["0.weight"].device)
    load_weights, run.believed["0.bias"] = run.load, bias.clone()

    def load() -> None:
        load_weights()
        layer.bias = nn.Parameter(bias)

    run.load = load
    return run


def converted_after_wrap(models: Models) -> Run:
    run = loaded(models)
    run.load = lambda: run.model.to(torch.bfloat16)
    run.believed = {name: weight.full_tensor().bfloat16() for name, weight in run.model.state_dict().items()}
    return run


def weights_it_has(models: Models) -> Run:
    """A job that was requeued loads once more what it has just loaded."""
    run = loaded(models)
    run.load()
    return run


def frozen(models: Models) -> Run:
    run = loaded(models)
    run.model.get_submodule("0").requires_grad_(False)
    return run


BROKEN: dict[str, Callable[[Models], Run]] = {
    "assign=True": lambda models: loaded(models, assign=True),
    "assign=True after the optimizer": optimizer_before_load,
    "bfloat16, assign=False": lambda models: loaded(models, dtype=torch.bfloat16),
    "module.weight = Parameter": new_parameter,
    "swap_tensors": swapped_tensors,
    "optimizer before wrap": optimizer_before_wrap,
    "tied weights": tied,
    "parameter after wrap": registered_after_wrap,
    "to(bfloat16) after wrap": converted_after_wrap,
}

HEALTHY: dict[str, Callable[[Models], Run]] = {
    "assign=False": loaded,
    "loads what it has": weights_it_has,
    "frozen layer": frozen,
}


def ask_fsdp_guard(run: Run) -> bool:
    """Return whether a look before the first step finds a divergence."""
    return not fsdp_guard.inspect(run.model, run.begin(), values=True).ok


def ask_state_dict(run: Run) -> bool:
    """Return whether the model shows anything but what the user believes."""
    run.begin()
    for name, shown in run.model.state_dict().items():
        value = shown.full_tensor() if isinstance(shown, DTensor) else shown
        if value.dtype != run.believed[name].dtype or not torch.equal(value, run.believed[name]):
            return True
    return False


def ask_loss_probe(run: Run) -> bool:
    """Return whether the loss stays where it is when weights are loaded, or over a step."""
    losses = [run.loss().item()] if run.load is not None else []
    optimizer = run.begin()
    loss = run.loss()
    loss.backward()
    optimizer.step()
    losses += [loss.item(), run.loss().item()]
    return any(before == after for before, after in itertools.pairwise(losses))


def ask_guardtower(run: Run) -> bool:
    """Return whether ``guardtower.audit`` finds an error."""
    import guardtower

    return not guardtower.audit(run.model, run.loss, optimizer=run.begin()).ok


CHECKS: dict[str, Callable[[Run], bool]] = {
    "fsdp_guard": ask_fsdp_guard,
    "state dict": ask_state_dict,
    "loss probe": ask_loss_probe,
}
if importlib.util.find_spec("guardtower") is not None:
    CHECKS["guardtower"] = ask_guardtower


def answer(check: Callable[[Run], bool], run: Run) -> str:
    """Return what the check says of a run, in a word."""
    try:
        return "alarm" if check(run) else "quiet"
    except Exception as error:
        return f"raises {type(error).__name__}"


def cost(check: Callable[[Run], bool], models: Models, repeats: int) -> float:
    """Return the median seconds of a check of a healthy run whose load has happened."""
    seconds = []
    for repeat in range(repeats + 1):
        run = loaded(models)
        run.optimizer = run.begin()
        run.load = None
        started = time.perf_counter()
        check(run)
        if repeat:  # the first warms up
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=50)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    device = join()
    small, large = Models(2, 16, device), Models(parsed.layers, parsed.width, device)
    print(f"| | {' | '.join(CHECKS)} |")
    print(f"| --- | {' | '.join('---' for _ in CHECKS)} |")
    for cases, kind in ((BROKEN, "broken"), (HEALTHY, "healthy")):
        for name, make in cases.items():
            answers = (answer(check, make(small)) for check in CHECKS.values())
            print(f"| {kind}: {name} | {' | '.join(answers)} |", flush=True)
    costs = (f"{cost(check, large, parsed.repeats) * 1e3:.1f}" for check in CHECKS.values())
    print(f"| ms, {parsed.layers} layers of {parsed.width}² | {' | '.join(costs)} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
