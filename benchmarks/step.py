"""What a guard adds to a training step on the GPU: nothing, counted and timed.

Three copies of one bfloat16 model with float32 main weights under Megatron-FSDP V2 take their steps in turn: one is
watched by a guard, two are not. The second of these shows what the machine's noise alone would make of the ratio.
Kernels, copies, synchronisations and allocations are counted by ``torch.profiler`` and by the allocator.

    python -m benchmarks.step --steps 300
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from megatron_fsdp import experimental
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import fsdp_guard
from benchmarks.sharded import join, shard

_NAMES = ("plain", "plain again", "guarded")
_STEP_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
)


class Trained:
    """A sharded model with its optimizer, its batch and, if it is guarded, its guard."""

    def __init__(self, name: str, device: torch.device, width: int, depth: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(depth))
        ).to(device, torch.bfloat16)
        shard([*self.model, self.model], device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        experimental.fully_shard_optimizer(self.optimizer)
        self.batch = torch.randn(64, width, device=device, dtype=torch.bfloat16)
        self.hooks_before = self.hooks()
        self.events: list[str] = []
        self.guard = fsdp_guard.Guard(reporters=[lambda report: self.events.append(report.event.value)])
        if name == "guarded":
            self.guard.watch(self.model, self.optimizer)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).float().square().mean().backward()
        self.optimizer.step()

    def hooks(self) -> int:
        """Return how many hooks a step runs."""
        owners = (*self.model.modules(), self.optimizer)
        return sum(len(getattr(owner, name, ())) for owner in owners for name in _STEP_HOOKS)

    def check(self) -> None:
        report = self.guard.check(self.model, self.optimizer, collective=False)
        if report.parameters_checked != len(list(self.model.parameters())):
            raise AssertionError(str(report))


def _profiled(function: Callable[[], object]) -> Counter[str]:
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        function()
        after = torch.cuda.memory_stats()
        torch.cuda.synchronize()
    counts: Counter[str] = Counter()
    for event in profiler.events():
        # Equal, never identical: each event makes an object of its own for its device type.
        is_on_gpu = event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
        if is_on_gpu or event.name.startswith(("aten::", "cuda", "cuMem", "cuLaunch")):
            counts[event.name] += 1
    for name in ("allocation.all.allocated", "segment.all.allocated"):
        counts[name] = after[name] - before[name]
    return counts


def counted(function: Callable[[], object]) -> Counter[str]:
    """Return what ``function`` asks of the GPU, by name: operators, kernels, copies, synchronisations, allocations."""
    counts = _profiled(function)
    counts.subtract(_profiled(lambda: None))  # what the profiler does itself
    return +counts


def summed(counts: Counter[str]) -> dict[str, int]:
    """Sum what ``counted`` found by kind."""
    kinds: Counter[str] = Counter(operators=0, kernels=0, copies=0, synchronisations=0, allocations=0)
    for name, count in counts.items():
        if name.startswith("aten::"):
            kinds["operators"] += count
        elif name.startswith(("Memcpy", "Memset")):
            kinds["copies"] += count
        elif "Synchronize" in name:
            kinds["synchronisations"] += count
        elif name == "allocation.all.allocated":
            kinds["allocations"] += count
        elif not name.startswith(("cuda", "cuMem", "cuLaunch", "segment")):
            kinds["kernels"] += count
    return dict(kinds)


def time_steps(trained: Sequence[Trained], steps: int) -> list[list[float]]:
    """Return the seconds of each step, synchronised, of each model; they take turns, and turns in going first."""
    times: list[list[float]] = [[] for _ in trained]
    for number in range(steps):
        for offset in range(len(trained)):
            index = (number + offset) % len(trained)
            torch.cuda.synchronize()
            started = time.perf_counter()
            trained[index].step()
            torch.cuda.synchronize()
            times[index].append(time.perf_counter() - started)
    return times


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return the median ratio of paired steps, with its quartiles."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
    return f"{middle:.4f} ({low:.4f} to {high:.4f})"


def without_synchronisation(function: Callable[[], object]) -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        function()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def capture(width: int, device: torch.device, guarded: bool) -> str:
    """Capture a forward and a backward as a CUDA graph after the first step, and replay it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)).to(device)
    shard([model], device)
    batch = torch.randn(64, width, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = fsdp_guard.Guard(reporters=[])
    with guard.watch(model, optimizer) if guarded else nullcontext():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                loss = model(batch).square().mean()
                loss.backward()
        except Exception as error:
            torch.cuda.synchronize()
            return f"not captured: {type(error).__name__}: {str(error).splitlines()[0][:100]}"
        graph.replay()
        torch.cuda.synchronize()
        return f"captured, loss {loss.item():.6f}"


def compiled(width: int, device: torch.device, guarded: bool, steps: int = 6) -> tuple[int, int, int]:
    """Train with a compiled body in each unit; return graph breaks, graphs, and graphs after the first step."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    units = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(2)]
    model = nn.Sequential(*units).to(device)
    for unit in units:
        unit[1] = torch.compile(unit[1], fullgraph=True)
    shard([*units, model], device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = fsdp_guard.Guard(reporters=[])
    first = 0
    with guard.watch(model, optimizer) if guarded else nullcontext():
        for number in range(steps):
            model(torch.randn(8, width, device=device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 0:
                first = counters["stats"]["unique_graphs"]
    return sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"], first


def _print_counts(trained: Sequence[Trained], steps: int) -> None:
    print(f"| counted over {steps} steps | operators | kernels | copies | synchronisations | allocations |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")

    def several(one: Trained) -> None:
        for _ in range(steps):
            one.step()

    counts = [counted(lambda one=one: several(one)) for one in trained]
    for name, count in zip(_NAMES, counts, strict=True):
        print(f"| {name} | " + " | ".join(f"{total:,}" for total in summed(count).values()) + " |")
    check = counted(trained[-1].check)
    print("| one `guard.check` | " + " | ".join(str(total) for total in summed(check).values()) + " |")
    print(f"\nThe same, name by name: {counts[0] == counts[-1]}.")
    if not summed(counts[0])["kernels"]:
        print("The driver shows the profiler no kernels and no copies here: compare the operators that launch them.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=8)
    parsed = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("benchmarks.step needs a GPU: skipped.")
        return
    device = join()
    trained = [Trained(name, device, parsed.width, parsed.depth) for name in _NAMES]
    time_steps(trained, 20)  # warm up
    _print_counts(trained, 20)
    times = time_steps(trained, parsed.steps)
    print(f"\n{parsed.steps} steps of each, in turn; median step {statistics.median(times[0]) * 1e3:.2f} ms.\n")
    print("| step time | ratio of paired steps, median (quartiles) |\n| --- | --- |")
    print(f"| guarded / plain | {ratio(times[2], times[0])} |\n| plain again / plain | {ratio(times[1], times[0])} |\n")
    guarded = trained[-1]
    without_synchronisation(guarded.check)
    print(f"Looks of the guarded run: {', '.join(guarded.events)}. No synchronisation in a check.")
    print(f"Hooks that a step runs: {guarded.hooks_before} before watch(), {guarded.hooks()} after the first step.\n")
    for is_guarded in (False, True):
        outcome = capture(parsed.width, device, is_guarded)
        print(f"CUDA graph, {'guarded' if is_guarded else 'plain'}: {outcome}")
    for is_guarded in (False, True):
        breaks, graphs, first = compiled(parsed.width, device, is_guarded)
        print(
            f"torch.compile, {'guarded' if is_guarded else 'plain'}: {breaks} graph breaks, {graphs} graphs, "
            f"{graphs - first} of them after the first step"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
