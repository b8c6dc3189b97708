"""A guard leaves no trace in what ``torch.compile`` makes of a model, and still looks before its first forward."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fsdp_guard import Guard, HolderDivergenceError, Report
from tests.distributed.ranks import Ranks
from tests.mfsdp import DEVICE, mesh, replace_parameter


def fsdp2(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=mesh())


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def around(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def in_place(model: nn.Module) -> Any:
    model.compile(backend="eager")
    return model


def whole(wrap: Any, how: Any) -> nn.Module:
    model: nn.Module = how(wrap(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(DEVICE)))
    return model


def blocks(wrap: Any, how: Any) -> nn.Module:
    return nn.Sequential(*(how(wrap(nn.Linear(4, 4).to(DEVICE))) for _ in range(2)))


def blocks_in_a_compiled_whole(wrap: Any, how: Any) -> nn.Module:
    model: nn.Module = how(nn.Sequential(*(wrap(nn.Linear(4, 4).to(DEVICE)) for _ in range(2))))
    return model


def guard_that_notes(events: list[str]) -> Guard:
    def note(report: Report) -> None:
        events.append(report.event.value)
        dist.barrier()  # else one rank may hear of the other's next look at this one

    return Guard(reporters=[note])


def train(model: nn.Module, guarded: bool) -> tuple[list[str], dict[str, dict[str, int]]]:
    """Take three steps; return the events of the looks, and what Dynamo has counted."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    events: list[str] = []
    guard = guard_that_notes(events)
    torch._dynamo.reset()
    counters.clear()
    if guarded:
        guard.watch(model, optimizer)
    for _ in range(3):
        model(torch.ones(2, 4, device=DEVICE)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    counted = {name: dict(counters[name]) for name in ("graph_break", "frames")}
    guard.unwatch()
    return events, counted


def run_compiled(wrap: Any, how: Any, build: Any) -> Any:
    model = build(wrap, how)
    train(model, guarded=False)  # what else the first compilation of a process compiles, such as DDP's own parts
    return train(model, guarded=False), train(model, guarded=True)


WRAPS = pytest.mark.parametrize("wrap", [fsdp2, ddp])
HOWS = pytest.mark.parametrize("how", [around, in_place])
BUILDS = pytest.mark.parametrize("build", [whole, blocks, blocks_in_a_compiled_whole])


@WRAPS
@HOWS
@BUILDS
def test_no_graph_break_and_no_compilation_of_its_own(ranks: Ranks, wrap: Any, how: Any, build: Any) -> None:
    for (_, plain), (events, guarded) in ranks(run_compiled, wrap, how, build):
        trees = 1 if build is whole else 2
        assert events == ["first_forward"] * trees + ["first_step"]
        assert guarded == plain


def run_load_and_replacement(wrap: Any, how: Any, build: Any) -> tuple[list[str], str]:
    """Compiled code runs before the load, so the gate must work without being compiled into it."""
    model = build(wrap, how)
    events: list[str] = []
    with guard_that_notes(events).watch(model):
        model(torch.ones(2, 4, device=DEVICE))
        model.load_state_dict(model.state_dict())
        model(torch.ones(2, 4, device=DEVICE))
        model.load_state_dict(model.state_dict())
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        replace_parameter(linears[0])
        try:
            model(torch.ones(2, 4, device=DEVICE))
        except HolderDivergenceError as error:
            return events, error.report.event.value
    return events, "nothing"


@WRAPS
@HOWS
@BUILDS
def test_looks_again_after_a_load(ranks: Ranks, wrap: Any, how: Any, build: Any) -> None:
    for events, raised in ranks(run_load_and_replacement, wrap, how, build):
        first = ["first_forward"] * (1 if build is whole else 2)
        assert events[: 2 * len(first) + 2] == [*first, "load", *first, "load"]
        assert raised == "first_forward"


def run_unwatched(wrap: Any) -> list[bool]:
    """One guard, two of which the first leaves first, and one whose module is compiled anew meanwhile."""
    model = in_place(wrap(nn.Linear(4, 4).to(DEVICE)))
    compiled = model._compiled_call_impl
    first, second = Guard(reporters=[]), Guard(reporters=[])
    first.watch(model)
    seen = [model._compiled_call_impl is not compiled]
    first.unwatch()
    seen.append(model._compiled_call_impl is compiled)
    first.watch(model)
    second.watch(model)
    first.unwatch()
    seen.append(model._compiled_call_impl is not compiled)
    second.unwatch()
    seen.append(model._compiled_call_impl is compiled)
    first.watch(model)
    model.compile(backend="eager")
    anew = model._compiled_call_impl
    first.unwatch()
    return [*seen, model._compiled_call_impl is anew]


@WRAPS
def test_unwatch_puts_the_compiled_call_back(ranks: Ranks, wrap: Any) -> None:
    assert ranks(run_unwatched, wrap) == [[True] * 5] * 2


def run_dropped() -> bool:
    model = in_place(nn.Sequential(fsdp2(nn.Linear(4, 4).to(DEVICE))))
    guard = Guard(reporters=[]).watch(model)
    ref = weakref.ref(model)
    del model
    gc.collect()
    guard.unwatch()
    return ref() is None


def test_watching_keeps_no_compiled_model_alive(ranks: Ranks) -> None:
    assert ranks(run_dropped) == [True] * 2
