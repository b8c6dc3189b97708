"""Real FSDP2 on the CPU: what it repairs is clean, what it does not repair is caught."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp_guard
from fsdp_guard import DivergenceKind as Kind
from fsdp_guard import UnsupportedLayoutError
from fsdp_guard.demo.case import CHECKPOINT, INITIAL
from tests.distributed.ranks import Ranks
from tests.mfsdp import LOADED_LOSSES, STALE_LOSS, Block, Tower, found_in, replace_parameter

Found = list[tuple[Kind, str]]
Trained = tuple[nn.Module, torch.optim.Optimizer]

SILENT = [STALE_LOSS] * 4


def cpu_mesh(*sizes: int, names: tuple[str, ...] = ("dp",)) -> Any:
    return init_device_mesh("cpu", sizes or (dist.get_world_size(),), mesh_dim_names=names)


def linear() -> nn.Linear:
    model = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        model.weight.copy_(INITIAL)
    return model


def sharded_linear() -> Any:
    return fully_shard(linear(), mesh=cpu_mesh())


def checkpoint() -> dict[str, torch.Tensor]:
    return {"weight": distribute_tensor(CHECKPOINT, cpu_mesh(), [Shard(0)])}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def loss(model: nn.Module) -> torch.Tensor:
    return nn.functional.mse_loss(model(torch.eye(4)), torch.zeros(4, 4))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def trained_once(**options: Any) -> Any:
    """A sharded model after a forward and a backward, from when on FSDP2 reads the module at a load alone."""
    model: Any = fully_shard(linear(), mesh=cpu_mesh(), **options)
    loss(model).backward()
    model.zero_grad()
    return model


def found(model: nn.Module, optimizer: Any = None, **options: Any) -> Found:
    report = fsdp_guard.inspect(model, optimizer, **options)
    assert report.parameters_checked > 0
    assert report.runtimes == ("torch_fsdp2",)
    return found_in(report)


# What FSDP2 repairs, or takes.


def in_place_load() -> Trained:
    model = sharded_linear()
    model.load_state_dict(checkpoint())
    return model, sgd(model)


def assign_before_the_first_forward() -> Trained:
    model = sharded_linear()
    model.load_state_dict(checkpoint(), assign=True)
    return model, sgd(model)


def assign_after_the_first_forward() -> Trained:
    model = trained_once()
    model.load_state_dict(checkpoint(), assign=True)
    return model, sgd(model)


def set_before_the_first_forward() -> Trained:
    model = sharded_linear()
    model.weight = nn.Parameter(checkpoint()["weight"])
    return model, sgd(model)


def made_on_meta() -> Trained:
    """With an optimizer from before: .to_empty() and .to() of a DTensor swap what is in the parameter (torch 2.11)."""
    with torch.device("meta"):
        model = nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=cpu_mesh())
    optimizer = sgd(model)
    model.to_empty(device="cpu")
    model.load_state_dict(checkpoint())
    return model, optimizer


def made_on_meta_and_assigned() -> Trained:
    with torch.device("meta"):
        model = nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=cpu_mesh())
    model.load_state_dict(checkpoint(), assign=True)
    return model, sgd(model)


def converted_and_back() -> Trained:
    model = trained_once()
    model.double()
    model.float()
    model.load_state_dict(checkpoint())
    return model, sgd(model)


REPAIRED = [
    in_place_load,
    assign_before_the_first_forward,
    assign_after_the_first_forward,
    set_before_the_first_forward,
    made_on_meta,
    made_on_meta_and_assigned,
    converted_and_back,
]


def run_repaired(case: Callable[[], Trained]) -> tuple[Found, Found, list[float]]:
    model, optimizer = case()
    before = found(model, optimizer)
    losses = train(model, optimizer)
    return before, found(model, optimizer), losses


@pytest.mark.parametrize("case", REPAIRED, ids=lambda case: case.__name__)
def test_repaired_by_the_runtime(ranks: Ranks, case: Callable[[], Trained]) -> None:
    for before, after, losses in ranks(run_repaired, case):
        assert losses == pytest.approx(LOADED_LOSSES, abs=1e-6), "the runtime no longer repairs this: measure again"
        assert before == after == []


# What it does not repair: silent, at the loss of the weights before.


def set_after_the_first_forward() -> Trained:
    model = trained_once()
    model.weight = nn.Parameter(checkpoint()["weight"])
    return model, sgd(model)


def set_to_a_plain_parameter() -> Trained:
    model = trained_once()
    model.weight = nn.Parameter(CHECKPOINT.clone())
    return model, sgd(model)


def swapped_tensors() -> Trained:
    model = trained_once()
    torch.utils.swap_tensors(model.weight, nn.Parameter(checkpoint()["weight"]))
    return model, sgd(model)


def optimizer_before_wrap() -> Trained:
    model = linear()
    optimizer = sgd(model)
    fully_shard(model, mesh=cpu_mesh())
    return model, optimizer


def optimizer_before_assign() -> Trained:
    model = sharded_linear()
    optimizer = sgd(model)
    model.load_state_dict({"weight": distribute_tensor(INITIAL, cpu_mesh(), [Shard(0)])}, assign=True)
    return model, optimizer


LOST = {Kind.OPTIMIZER_ORPHAN, Kind.OPTIMIZER_MISSING}
SILENT_CASES: dict[Callable[[], Trained], set[Kind]] = {
    set_after_the_first_forward: {Kind.REPLACED_PARAMETER} | LOST,
    set_to_a_plain_parameter: {Kind.REPLACED_PARAMETER} | LOST,
    swapped_tensors: {Kind.DETACHED_STORAGE},
    optimizer_before_wrap: LOST,
    optimizer_before_assign: LOST,
}


def run_silent(case: Callable[[], Trained]) -> tuple[Found, list[float]]:
    return found(*case()), train(*case())


@pytest.mark.parametrize("case", SILENT_CASES, ids=lambda case: case.__name__)
def test_silent_case_is_caught(ranks: Ranks, case: Callable[[], Trained]) -> None:
    for divergences, losses in ranks(run_silent, case):
        assert losses == SILENT, "the runtime no longer fails silently here: measure again"
        assert {kind for kind, _ in divergences} == SILENT_CASES[case]
        assert {fqn for _, fqn in divergences} == {"weight"}


def run_plain_before_the_first_forward() -> tuple[Found, str]:
    model = sharded_linear()
    model.weight = nn.Parameter(CHECKPOINT.clone())
    divergences = found(model)
    try:
        loss(model)
    except AttributeError as error:
        return divergences, str(error)
    return divergences, ""


def test_plain_parameter_before_the_first_forward(ranks: Ranks) -> None:
    for divergences, upstream in ranks(run_plain_before_the_first_forward):
        assert "_local_tensor" in upstream, "upstream's own error, which names no parameter"
        assert divergences == [(Kind.REPLACED_PARAMETER, "weight")]


# Larger models.


def tower(depth: int = 1, **options: Any) -> Tower:
    torch.manual_seed(0)
    model = Tower([Block() for _ in range(depth)])
    for block in model.blocks:
        fully_shard(block, mesh=cpu_mesh(), **options)
    fully_shard(model, mesh=cpu_mesh(), **options)
    return model


def step(model: nn.Module) -> None:
    model(torch.ones(2, 4)).sum().backward()


def part_converted(model: Tower) -> None:
    step(model)
    model.blocks[0].up.to(torch.bfloat16)


def lora(model: Tower) -> None:
    model.blocks[0].lora_a = nn.Linear(4, 2, bias=False)


def frozen_addition(model: Tower) -> None:
    model.blocks[0].scale = nn.Parameter(torch.ones(1), requires_grad=False)


def frozen(model: Tower) -> None:
    model.embed.requires_grad_(False)
    step(model)


def swapped_submodule(model: Tower) -> None:
    model.blocks[0].down = nn.Linear(8, 4)


def copied_submodule(model: Tower) -> None:
    """A deep copy shares nothing with the holders."""
    step(model)
    model.zero_grad()
    model.blocks[0].down = copy.deepcopy(model.blocks[0].down)


def deleted_submodule(model: Tower) -> None:
    step(model)
    del model.blocks[0].down


def tied_after_wrap(model: Tower) -> None:
    model.blocks[0].extra = nn.Linear(4, 8, bias=False)
    model.blocks[0].extra.weight = model.blocks[0].up.weight


def half_unsharded(model: Tower) -> None:
    model.blocks[0].unshard()
    weight = model.blocks[0].down.weight
    model.blocks[0].reshard()
    model.blocks[0].down.weight = weight


def unsharded(model: Tower) -> None:
    model.blocks[0].unshard()


def after_a_step(model: Tower) -> None:
    step(model)


CHANGES: dict[Callable[[Tower], None], Found] = {
    part_converted: [
        (Kind.DETACHED_STORAGE, "blocks.0.up.weight"),
        (Kind.DETACHED_STORAGE, "blocks.0.up.bias"),
    ],
    lora: [(Kind.UNMANAGED_PARAMETER, "blocks.0.lora_a.weight")],
    frozen_addition: [],
    frozen: [],
    swapped_submodule: [
        (Kind.MISSING_PARAMETER, "blocks.0.(Linear).weight"),
        (Kind.MISSING_PARAMETER, "blocks.0.(Linear).bias"),
        (Kind.UNMANAGED_PARAMETER, "blocks.0.down.weight"),
        (Kind.UNMANAGED_PARAMETER, "blocks.0.down.bias"),
    ],
    # The copies are DTensors, which FSDP2 may have been told to ignore; what they took the place of is missed.
    copied_submodule: [
        (Kind.MISSING_PARAMETER, "blocks.0.(Linear).weight"),
        (Kind.MISSING_PARAMETER, "blocks.0.(Linear).bias"),
    ],
    deleted_submodule: [
        (Kind.MISSING_PARAMETER, "blocks.0.(Linear).weight"),
        (Kind.MISSING_PARAMETER, "blocks.0.(Linear).bias"),
    ],
    tied_after_wrap: [(Kind.BROKEN_TIE, "blocks.0.extra.weight")],
    half_unsharded: [(Kind.MIXED_PHASE, "blocks.0.down.weight")],
    unsharded: [],
    after_a_step: [],
}


def run_changed(change: Callable[[Tower], None]) -> Found:
    model = tower()
    change(model)
    return found(model)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_module_changed_after_wrap(ranks: Ranks, change: Callable[[Tower], None]) -> None:
    for divergences in ranks(run_changed, change):
        assert divergences == CHANGES[change]


def run_drift() -> tuple[float, float]:
    """What an unmanaged parameter does: its gradient is this rank's own."""
    model = tower()
    model.head.scale = nn.Parameter(torch.ones(2))
    model.head.register_forward_hook(lambda head, args, output: output * head.scale)
    model(torch.full((2, 4), float(dist.get_rank() + 1))).sum().backward()
    held: Any = model.head.bias.grad
    return model.head.scale.grad.sum().item(), held.full_tensor().sum().item()


def test_unmanaged_gradients_are_not_reduced(ranks: Ranks) -> None:
    (unmanaged, held), (unmanaged_too, held_too) = ranks(run_drift)
    assert held == held_too
    assert unmanaged != unmanaged_too


def ignoring() -> Tower:
    model = Tower([Block()])
    fully_shard(model, mesh=cpu_mesh(), ignored_params={model.blocks[0].up.bias})
    return model


def run_ignored() -> tuple[fsdp_guard.Report, fsdp_guard.Report]:
    guard = fsdp_guard.Guard(reporters=[], allow_unmanaged=["blocks.*.up.bias"])
    return fsdp_guard.inspect(ignoring()), guard.check(ignoring())


def test_ignored_parameters_are_allowed_by_name(ranks: Ranks) -> None:
    for default, allowed in ranks(run_ignored):
        (divergence,) = default.divergences
        assert (divergence.kind, divergence.fqn) == (Kind.UNMANAGED_PARAMETER, "blocks.0.up.bias")
        assert "allow_unmanaged" in divergence.remedy
        assert allowed.ok, str(allowed)
        assert (allowed.parameters_checked, allowed.parameters_unclaimed) == (7, 1)


def run_ignored_dtensor() -> Found:
    """Another parallelism's parameter, as experts are that fully_shard is told to ignore."""
    model = Tower([Block()])
    expert = nn.Parameter(distribute_tensor(torch.zeros(4, 8), cpu_mesh(), [Shard(0)]))
    model.blocks[0].down.weight = expert
    fully_shard(model, mesh=cpu_mesh(), ignored_params={expert})
    return found(model)


def test_what_another_parallelism_sharded_is_left_alone(ranks: Ranks) -> None:
    assert ranks(run_ignored_dtensor) == [[], []]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(inputs))


def run_tied() -> tuple[Found, Found, Found, Found]:
    model = Tied()
    fully_shard(model, mesh=cpu_mesh())
    fresh = found(model)
    step(model)
    stepped = found(model, sgd(model))
    with torch.device("meta"):
        model = Tied()
    fully_shard(model, mesh=cpu_mesh())
    model.to_empty(device="cpu")
    fresh += found(model)
    model.load_state_dict(model.state_dict(), assign=True)
    broken = found(model)
    model.head.weight = model.embed.weight
    return fresh, stepped, broken, found(model, sgd(model))


def test_tie(ranks: Ranks) -> None:
    for fresh, stepped, broken, tied_again in ranks(run_tied):
        assert fresh == stepped == tied_again == []
        assert broken == [(Kind.BROKEN_TIE, "head.weight")]


def run_grouped() -> tuple[Found, Found, Found]:
    model = Tower([Block()])
    fully_shard([model.embed, model.head], mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    clean = found(model)
    part = found(model.embed)
    step(model)
    replace_parameter(model.head)
    return clean, part, found(model)


def test_one_group_of_several_units(ranks: Ranks) -> None:
    for clean, part, replaced in ranks(run_grouped):
        assert clean == []
        assert part == [], "the other module of the group is not below the one that was looked at"
        assert replaced == [(Kind.REPLACED_PARAMETER, "head.weight")]


def run_options() -> dict[str, tuple[Found, Found, Found]]:
    results = {}
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, dict[str, Any]] = {
        "keeps": {"reshard_after_forward": False},
        "reshards": {"reshard_after_forward": True},
        "bf16": {"mp_policy": precision},
        "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    }
    for name, chosen in options.items():
        model = tower(depth=2, **chosen)
        optimizer = sgd(model)
        fresh = found(model, optimizer)
        output = model(torch.ones(2, 4))
        forwarded = found(model)
        output.sum().backward()
        optimizer.step()
        results[name] = (fresh, forwarded, found(model, optimizer))
    return results


def test_policies(ranks: Ranks) -> None:
    """Sharded, unsharded after a forward, rows that do not divide: a head of two rows and biases of four."""
    for results in ranks(run_options):
        assert not any(any(looks) for looks in results.values()), results


def run_uneven() -> Found:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    fully_shard(model, mesh=cpu_mesh())
    fresh = found(model, sgd(model))
    step(model)
    return fresh + found(model, sgd(model))


def test_ranks_without_rows(ranks: Ranks) -> None:
    assert ranks(run_uneven) == [[], []]


def run_replicate() -> tuple[Found, Found]:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    model: Any = linear()
    replicate(model, mesh=cpu_mesh())
    loss(model).backward()
    clean = found(model)
    replace_parameter(model)
    return clean, found(model)


def test_replicate(ranks: Ranks) -> None:
    for clean, replaced in ranks(run_replicate):
        assert clean == []
        assert replaced == [(Kind.REPLACED_PARAMETER, "weight")]


def run_watched() -> tuple[list[tuple[str, bool]], int, int]:
    model = tower()
    optimizer = sgd(model)
    events: list[tuple[str, bool]] = []
    guard = fsdp_guard.Guard(
        reporters=[lambda report: events.append((report.event.value, report.ok))], on_divergence="warn"
    )
    before = sum(len(module._forward_pre_hooks) for module in model.modules())
    with guard.watch(model, optimizer):
        model.load_state_dict(model.state_dict(), assign=True)
        optimizer = sgd(model)
        step(model)
        model.load_state_dict(model.state_dict())
        model.blocks[0].down.weight = nn.Parameter(model.blocks[0].down.weight.detach().clone())
        dist.barrier()
        step(model)
    return events, before, sum(len(module._forward_pre_hooks) for module in model.modules())


def test_watch(ranks: Ranks) -> None:
    for events, before, after in ranks(run_watched):
        assert events == [("load", True), ("first_forward", True), ("load", True), ("first_forward", False)]
        assert before == after


def run_copies() -> tuple[str, str]:
    model = tower()
    try:
        copy.deepcopy(model)
    except AssertionError as error:
        refused = str(error)
    with torch.no_grad():
        around = nn.Linear(4, 4)
        around.__class__ = type(fully_shard(linear(), mesh=cpu_mesh()))
    try:
        fsdp_guard.inspect(around)
    except UnsupportedLayoutError as error:
        return refused, error.attribute
    return refused, ""


def test_copies(ranks: Ranks) -> None:
    for refused, attribute in ranks(run_copies):
        assert "does not support deepcopy" in refused
        assert attribute == "FSDPState"


def run_unknown_layout(attribute: str) -> str:
    model = sharded_linear()
    state = model._get_fsdp_state()
    groups = "_fsdp_param_groups" if hasattr(state, "_fsdp_param_groups") else "_fsdp_param_group"  # torch 2.11
    if attribute == "groups":
        delattr(state, groups)
    else:
        group = getattr(state, groups)
        delattr(group[0] if isinstance(group, list) else group, attribute)
    try:
        fsdp_guard.inspect(model)
    except UnsupportedLayoutError as error:
        return f"{error.version}: {error.attribute}"
    return ""


@pytest.mark.parametrize("attribute", ["fsdp_params", "modules", "_reset_sharded_params", "groups"])
def test_unknown_layout_is_a_clear_error(ranks: Ranks, attribute: str) -> None:
    for message in ranks(run_unknown_layout, attribute):
        seen = "_fsdp_param_group" if attribute == "groups" else attribute
        assert message == f"torch {torch.__version__}: {seen}"


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    four = Ranks(4)
    yield four
    four.stop()


def run_on_four() -> dict[str, Found]:
    results: dict[str, Found] = {}
    model: Any = tower(depth=2, reshard_after_forward=2)
    output = model(torch.ones(2, 4))
    blocks: Any = model.blocks
    results["coarser shards between forward and backward"] = found(model)
    assert blocks[0].up.weight.device_mesh.size() == 4
    assert any(p.placements[0].is_replicate() for p in blocks.parameters() if isinstance(p, DTensor))
    output.sum().backward()
    results["after it"] = found(model, sgd(model))
    hybrid = Tower([Block()])
    fully_shard(hybrid, mesh=cpu_mesh(2, 2, names=("replicate", "shard")))
    step(hybrid)
    results["HSDP"] = found(hybrid, sgd(hybrid))
    mesh = cpu_mesh(2, 2, names=("dp", "tp"))
    parallel: Any = parallelize_module(Block(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(parallel, mesh=mesh["dp"])
    step(parallel)
    results["tensor parallel"] = found(parallel, sgd(parallel))
    return results


def test_meshes_of_two_dimensions(four: Ranks) -> None:
    for results in four(run_on_four):
        assert not any(results.values()), results
