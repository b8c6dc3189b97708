"""What the value check reaches of the bytes a second that a copy reaches on the same device, and its scratch.

A bfloat16 model with float32 main weights under Megatron-FSDP V2, on the GPU where there is one. The check reads
both; the copy reads and writes float32 weights of the same number. They take turns in one run.

    python -m benchmarks.values --mib 64 1024
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.sharded import join, shard
from fsdp_guard.holders import take_inventory
from fsdp_guard.values import find_stale

_WIDTH = 4096
_MIB = 1024 * 1024


def _scratch(function: Callable[[], object]) -> int:
    """Return the most bytes of GPU memory that ``function`` had beyond what was there."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return torch.cuda.max_memory_allocated() - before


def measure(mib: int, device: torch.device, repeats: int) -> tuple[float, float, int | None]:
    """Return medians of bytes a second, of the check and of the copy, and the check's scratch in bytes on a GPU."""
    layers = max(1, mib * _MIB // (_WIDTH * _WIDTH * 4))
    with device:
        model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(layers)))
        source, target = torch.ones(layers * _WIDTH * _WIDTH), torch.empty(layers * _WIDTH * _WIDTH)
    shard([*model, model], device)
    groups = take_inventory([("", model)]).groups
    compared = sum(weights.main.numel() for group, _ in groups for weights in group.weights())
    if compared != source.numel():
        raise AssertionError(f"{compared} of {source.numel()} weights would be compared")

    def check() -> None:
        if find_stale(groups):
            raise AssertionError("stale")

    def synchronise() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    runs: tuple[tuple[Callable[[], object], int], ...] = ((check, 4 + 2), (lambda: target.copy_(source), 4 + 4))
    rates: list[list[float]] = [[], []]
    for repeat in range(repeats + 1):
        for series, (function, bytes_a_weight) in zip(rates, runs, strict=True):
            synchronise()
            started = time.perf_counter()
            function()
            synchronise()
            if repeat:  # the first warms up
                series.append(compared * bytes_a_weight / (time.perf_counter() - started))
    return statistics.median(rates[0]), statistics.median(rates[1]), _scratch(check) if device.type == "cuda" else None


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 256, 1024], help="of float32 main weights")
    parser.add_argument("--repeats", type=int, default=9)
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    device = join()
    print("| main weights MiB | value check GB/s | copy GB/s | ratio | scratch MiB |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for mib in parsed.mib:
        check, copy, scratch = measure(mib, device, parsed.repeats)
        peak = "" if scratch is None else f"{scratch / _MIB:.0f}"
        print(f"| {mib:,} | {check / 1e9:.1f} | {copy / 1e9:.1f} | {check / copy:.2f} | {peak} |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
