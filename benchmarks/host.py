"""What one look costs on the host, against the least that a look could cost, from 100 to 100,000 parameters.

The model is sharded by the real Megatron-FSDP V2 on one rank, ten parameters a unit. The floor is measured in the same
run, interleaved with the looks: one bare loop that compares each parameter with its holder by ``is`` and its storage
address with its buffer's, over a table that is at hand already, and one over the optimizer's parameters. A look has no
table: it must walk the module tree, which torch itself does in ``model.named_parameters()``.

    python -m benchmarks.host --parameters 100 1000 10000 100000
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

import fsdp_guard
from benchmarks.sharded import join, shard
from benchmarks.timing import expect_sound, medians
from fsdp_guard.holders import take_inventory

_PER_UNIT = 10


def sharded_model(parameters: int) -> nn.Module:
    """Return a model of that many parameters of shape (4, 4), ten a unit."""
    units = [
        nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(_PER_UNIT))) for _ in range(parameters // _PER_UNIT)
    ]
    shard(units)
    return nn.Sequential(*units)


def floor_of(model: nn.Module) -> Callable[[], None]:
    """Return the bare loop over what a look of ``model`` compares."""
    table = []
    for group, bindings in take_inventory([("", model)]).groups:
        buffer = group.resting_buffers(0)[0]
        start, end = buffer.data_ptr(), buffer.data_ptr() + buffer.numel() * buffer.element_size()
        table += [(b.owner._parameters, b.attribute, b.resting, start, end) for b in bindings if b.owner is not None]

    def loop() -> None:
        for shown, name, holder, start, end in table:
            if shown[name] is not holder or not start <= holder._local_tensor.data_ptr() < end:
                raise AssertionError(name)

    return loop


def optimizer_floor_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return the bare loop over the parameters of ``optimizer``."""
    held = {id(parameter) for parameter in model.parameters()}

    def loop() -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in held:
                    raise AssertionError

    return loop


def measure(parameters: int, repeats: int) -> dict[str, float]:
    """Return medians over interleaved repeats, in nanoseconds a parameter."""
    model = sharded_model(parameters)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    measured: dict[str, Callable[[], object]] = {
        "floor": floor_of(model),
        "walk": lambda: list(model.named_parameters()),
        "look": lambda: expect_sound(fsdp_guard.inspect(model), parameters),
        "optimizer floor": optimizer_floor_of(model, optimizer),
        "look with optimizer": lambda: expect_sound(fsdp_guard.inspect(model, optimizer), parameters),
    }
    gc.collect()
    return {name: seconds * 1e9 / parameters for name, seconds in medians(measured, repeats).items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a Markdown table, in nanoseconds a parameter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, nargs="+", default=[100, 1_000, 10_000, 100_000])
    parser.add_argument("--repeats", type=int, default=15)
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    join()
    print(
        "| parameters | named_parameters ns | floor ns | look ns | look / floor "
        "| floor with optimizer ns | look with optimizer ns | look / floor |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for parameters in parsed.parameters:
        ns = measure(parameters, parsed.repeats)
        floor, look = ns["floor"] + ns["optimizer floor"], ns["look with optimizer"]
        print(
            f"| {parameters:,} | {ns['walk']:.0f} | {ns['floor']:.0f} | {ns['look']:.0f} "
            f"| {ns['look'] / ns['floor']:.1f} | {floor:.0f} | {look:.0f} | {look / floor:.1f} |",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
