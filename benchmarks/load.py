"""What the look after a load costs against the load itself, and what ``watch`` costs, in a model of many units.

Each unit is one linear layer without bias under the real Megatron-FSDP V2 on one rank. ``load_state_dict`` copies one
weight into all of them: a checkpoint of its own for each, or one that is read from a disk, only makes the load longer.

    python -m benchmarks.load --units 1000 --width 256 1024
"""

from __future__ import annotations

import argparse
import gc
import tracemalloc
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

import fsdp_guard
from benchmarks.sharded import join, shard
from benchmarks.timing import expect_sound, medians


def measure(units: int, width: int, repeats: int) -> tuple[float, float, float, int]:
    """Return seconds of a load, of the look after it and of ``watch``, and the bytes that ``watch`` keeps."""
    layers = [nn.Linear(width, width, bias=False) for _ in range(units)]
    shard(layers)
    model = nn.Sequential(*layers)
    state = dict.fromkeys(model.state_dict(), layers[0].weight.detach().clone())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    guard = fsdp_guard.Guard(reporters=[])
    seconds = medians(
        {
            "load": lambda: model.load_state_dict(state),
            "look": lambda: expect_sound(fsdp_guard.inspect(model, optimizer), units),
            "watch": lambda: guard.watch(model, optimizer),
            "unwatch": guard.unwatch,
        },
        repeats,
    )
    gc.collect()
    tracemalloc.start()
    guard.watch(model, optimizer)
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    guard.unwatch()
    return seconds["load"], seconds["look"], seconds["watch"], kept


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=1000)
    parser.add_argument("--width", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--repeats", type=int, default=9)
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    join()
    print("| units | weights MiB | load ms | look ms | look / load | watch ms | watch KiB |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for width in parsed.width:
        load, look, watch, kept = measure(parsed.units, width, parsed.repeats)
        mib = parsed.units * width * width * 4 / 1024 / 1024
        print(
            f"| {parsed.units:,} | {mib:,.0f} | {load * 1e3:.1f} | {look * 1e3:.2f} | {look / load:.1%} "
            f"| {watch * 1e3:.1f} | {kept / 1024:,.0f} |",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
