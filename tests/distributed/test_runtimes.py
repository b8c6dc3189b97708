"""Each invariant under each runtime, one test a cell of the README's table; and models that mix runtimes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fsdp_guard
from fsdp_guard import DivergenceKind as Kind
from fsdp_guard.holders import RUNTIMES
from fsdp_guard.holders.base import local_tensor
from tests.distributed.ranks import Ranks
from tests.mfsdp import DEVICE, found_in, mesh, replace_parameter, shard, shard_v1

README = Path(__file__).parents[2] / "README.md"

Found = list[tuple[Kind, str]]


def small(tied: bool = False) -> Any:
    layers = {name: nn.Linear(4, 4, bias=False) for name in ("embed", "body", "head")}
    if tied:
        layers["head"].weight = layers["embed"].weight
    return nn.Sequential(OrderedDict(layers)).to(DEVICE, torch.bfloat16)


def wrap_v2(model: nn.Module) -> Any:
    shard(model)
    return model


def wrap_v1(model: nn.Module) -> Any:
    return shard_v1(model, nn.Linear)


def wrap_fsdp2(model: nn.Module) -> Any:
    fully_shard(model, mesh=mesh())
    return model


WRAP: dict[str, Callable[[nn.Module], Any]] = {
    "mfsdp_v2": wrap_v2,
    "mfsdp_v1": wrap_v1,
    "torch_fsdp2": wrap_fsdp2,
    "torch_ddp": DistributedDataParallel,
}


def inner(model: Any) -> Any:
    return getattr(model, "module", model)


def replace_by_plain(layer: Any) -> None:
    """Not by a DTensor, which FSDP2 would take over at its first forward."""
    layer.weight = nn.Parameter(torch.zeros(layer.weight.shape, device=DEVICE, dtype=layer.weight.dtype))


def forward(model: Any) -> Any:
    return model(torch.ones(2, 4, device=DEVICE, dtype=torch.bfloat16))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def found(model: Any, optimizer: Any = None, values: bool = False) -> Found:
    report = fsdp_guard.inspect(model, optimizer, values=values)
    return found_in(report)


def break_replaced_parameter(runtime: str) -> Found:
    model = WRAP[runtime](small())
    replace_by_plain(inner(model).body)
    return found(model)


def break_detached_storage(runtime: str) -> Found:
    model = WRAP[runtime](small())
    if runtime == "torch_fsdp2":
        forward(model)  # until then it would take the new storage for its own
        model.reshard()
    inner(model).body.to(torch.float64)
    return found(model)


def break_stale_compute_weight(runtime: str) -> Found:
    model = WRAP[runtime](small())
    assert found(model, values=True) == []
    with torch.no_grad():
        for parameter in model.parameters():
            local_tensor(parameter).add_(1)  # as torch.distributed.checkpoint.load() does
    return found(model, values=True)


def break_mixed_phase(runtime: str) -> Found:
    model = WRAP[runtime](small())
    resting = inner(model).body.weight
    if runtime == "mfsdp_v2":
        model.parameter_groups[0].unshard_parameters()
    elif runtime == "torch_fsdp2":
        model.unshard()
    else:
        forward(model)
    assert found(model) == []
    inner(model).body.weight = resting
    return found(model)


def break_broken_tie(runtime: str) -> Found:
    model = WRAP[runtime](small(tied=True))
    replace_parameter(inner(model).head)
    return found(model)


def break_missing_parameter(runtime: str) -> Found:
    model = WRAP[runtime](small())
    inner(model).body = nn.Identity()
    return found(model)


def break_unmanaged_parameter(runtime: str) -> Found:
    model = WRAP[runtime](small())
    inner(model).body.extra = nn.Parameter(torch.ones(1, device=DEVICE))
    return found(model)


def break_optimizer_orphan(runtime: str) -> Found:
    model = small()
    before = sgd(list(model.parameters()))
    model = WRAP[runtime](model)
    if runtime == "torch_ddp":  # which keeps the parameters that it is given
        replace_parameter(inner(model).body)
        before = sgd(model.parameters())
    return found(model, before)


def break_optimizer_missing(runtime: str) -> Found:
    model = WRAP[runtime](small())
    assert found(model, sgd(model.parameters())) == []
    return found(model, sgd(p for name, p in model.named_parameters() if "body" not in name))


BREAK = {kind: globals()[f"break_{kind}"] for kind in Kind}

NOT_APPLICABLE = {
    ("torch_fsdp2", Kind.STALE_COMPUTE_WEIGHT),
    ("torch_ddp", Kind.STALE_COMPUTE_WEIGHT),
    ("torch_ddp", Kind.DETACHED_STORAGE),
    ("torch_ddp", Kind.MIXED_PHASE),
}
"""One copy of the weights; nothing sharded, so that any storage is right, and there is one phase."""

NAMES_ONE_END_OF_A_TIE = ("mfsdp_v1", "torch_ddp")

NAMES: dict[Any, str] = {
    Kind.BROKEN_TIE: "head",
    Kind.UNMANAGED_PARAMETER: "extra",
    ("torch_fsdp2", Kind.MISSING_PARAMETER): "(Linear).weight",
    ("torch_ddp", Kind.MISSING_PARAMETER): "(parameter 1 of the reducer)",
}
"""What a divergence is called where that is not body: these two runtimes keep no names."""

CELLS = [(name, kind) for name in WRAP for kind in Kind if (name, kind) not in NOT_APPLICABLE]


def run_cell(runtime: str, kind: Kind) -> tuple[Found, Found]:
    model = WRAP[runtime](small())
    return found(model, sgd(model.parameters())), BREAK[kind](runtime)


@pytest.mark.parametrize(("runtime", "kind"), CELLS, ids=[f"{runtime}-{kind}" for runtime, kind in CELLS])
def test_catches(ranks: Ranks, runtime: str, kind: Kind) -> None:
    name = NAMES.get((runtime, kind)) or NAMES.get(kind, "body")
    is_seen_as_added = kind is Kind.BROKEN_TIE and runtime in NAMES_ONE_END_OF_A_TIE
    expected = Kind.UNMANAGED_PARAMETER if is_seen_as_added else kind
    outcomes = ranks(run_cell, runtime, kind)
    assert [clean for clean, _ in outcomes] == [[]] * ranks.size
    # A rank without a part of the parameter has nothing to step and nothing that could be stale.
    assert any(seen is expected and name in fqn for _, broken in outcomes for seen, fqn in broken), outcomes


def test_the_readme_has_this_table() -> None:
    lines = [line for line in README.read_text().splitlines() if line.startswith("| `")]
    rows = {cells[0].strip("`"): cells[1:] for line in lines if len(cells := split(line)) == 1 + len(WRAP)}
    assert set(WRAP) == {runtime.name for runtime in RUNTIMES}
    for kind in Kind:
        for runtime, cell in zip(WRAP, rows[kind.value], strict=True):
            if (runtime, kind) in NOT_APPLICABLE:
                assert cell == "does not apply"
            elif kind is Kind.BROKEN_TIE and runtime in NAMES_ONE_END_OF_A_TIE:
                assert cell == "as `unmanaged_parameter`"
            else:
                assert cell == "✓"


def split(line: str) -> Sequence[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


# Models that mix runtimes.


class Mixed(nn.Module):
    """Two parts under runtimes of their own, and a head that none has."""

    def __init__(self, runtimes: Sequence[str]) -> None:
        super().__init__()
        self.parts = nn.ModuleList([WRAP[runtime](small()) for runtime in runtimes])
        self.head = nn.Linear(4, 2, device=DEVICE)


PAIRS = [(first, second) for first in WRAP for second in WRAP if first < second]


def run_mixed(pair: tuple[str, str]) -> list[tuple[tuple[str, ...], int, int, Found]]:
    model = Mixed(pair)
    parts: Any = model.parts
    looks = []
    for broken in (None, *parts):
        if broken is not None:
            replace_by_plain(inner(broken).body)
        report = fsdp_guard.inspect(model, sgd(model.parameters()) if broken is None else None)
        divergences = [(divergence.kind, divergence.runtime) for divergence in report.divergences]
        looks.append((report.runtimes, report.parameters_checked, report.parameters_unclaimed, divergences))
    return looks


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_each_runtime_is_checked_for_its_part(ranks: Ranks, pair: tuple[str, str]) -> None:
    for looks in ranks(run_mixed, pair):
        for number, (runtimes, checked, unclaimed, divergences) in enumerate(looks):
            assert set(runtimes) == set(pair)
            assert (checked, unclaimed) == (6, 2)
            assert divergences == [(Kind.REPLACED_PARAMETER, runtime) for runtime in pair[:number]]


def run_trunk_and_head() -> list[tuple[tuple[str, ...], int, int, Found]]:
    """A sharded trunk inside DDP, which reduces the head."""
    trunk = WRAP["torch_fsdp2"](small())
    model: Any = nn.Sequential(OrderedDict(trunk=trunk, head=nn.Linear(4, 2, device=DEVICE)))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        model, [name for name, _ in model.named_parameters() if name.startswith("trunk.")]
    )
    model = DistributedDataParallel(model)
    looks = []
    for broken in (None, model.module.head, model.module.trunk.body):
        if broken is not None:
            replace_by_plain(broken)
        report = fsdp_guard.inspect(model)
        divergences = found_in(report)
        looks.append((report.runtimes, report.parameters_checked, report.parameters_unclaimed, divergences))
    return looks


def test_a_sharded_trunk_inside_ddp(ranks: Ranks) -> None:
    wrong = [(Kind.REPLACED_PARAMETER, "module.head.weight"), (Kind.REPLACED_PARAMETER, "module.trunk.body.weight")]
    for looks in ranks(run_trunk_and_head):
        for number, (runtimes, checked, unclaimed, divergences) in enumerate(looks):
            assert set(runtimes) == {"torch_fsdp2", "torch_ddp"}
            assert (checked, unclaimed) == (5, 0)
            assert sorted(divergences) == wrong[:number]
