"""Real DDP on the CPU: what its reducer reduces against what the module shows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, prune

import fsdp_guard
from fsdp_guard import DivergenceKind as Kind
from fsdp_guard import UnsupportedLayoutError
from tests.distributed.ranks import Ranks
from tests.mfsdp import Block, Tower, found_in, replace_parameter

Found = list[tuple[Kind, str]]


def tower(freeze: str = "") -> Tower:
    torch.manual_seed(0)
    model = Tower([Block()])
    if freeze:
        model.get_submodule(freeze).requires_grad_(False)
    return model


def wrapped(freeze: str = "", **options: Any) -> Any:
    return DistributedDataParallel(tower(freeze), **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: nn.Module) -> None:
    """On inputs of this rank's own, so that a gradient is the same on all ranks if it was reduced."""
    model(torch.full((2, 4), float(dist.get_rank() + 1))).sum().backward()


def found(model: nn.Module, optimizer: Any = None) -> Found:
    report = fsdp_guard.inspect(model, optimizer)
    assert report.parameters_checked > 0
    assert report.runtimes == ("torch_ddp",)
    return found_in(report)


# What is right.


def fresh(model: Any) -> None:
    """As it was wrapped."""


def stepped(model: Any) -> None:
    step(model)


def loaded_in_place(model: Any) -> None:
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})


def converted(model: Any) -> None:
    """The parameters stay the same objects."""
    model.to(torch.float64).to(torch.float32)


def frozen_after_wrap(model: Any) -> None:
    model.module.head.requires_grad_(False)


def frozen_addition(model: Any) -> None:
    model.module.scale = nn.Parameter(torch.ones(1), requires_grad=False)


def moved(model: Any) -> None:
    """The same parameters under another name."""
    model.module.blocks[0] = checkpoint_wrapper(model.module.blocks[0])


def pruned(model: Any) -> None:
    """The same parameter under another name, and a mask."""
    prune.l1_unstructured(model.module.head, "weight", amount=0.5)


def shared(model: Any) -> None:
    """A second name for a parameter that the reducer has."""
    model.module.again = model.module.head


CLEAN = [fresh, stepped, loaded_in_place, converted, frozen_after_wrap, frozen_addition, moved, pruned, shared]
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "small buckets": {"bucket_cap_mb": 1e-4},
}


def run_clean(change: Callable[[Any], None]) -> dict[str, tuple[int, Found]]:
    results = {}
    for name, options in OPTIONS.items():
        model = wrapped(**options)
        change(model)
        results[name] = fsdp_guard.inspect(model).parameters_checked, found(model, sgd(model))
        if change is frozen_after_wrap and name != "unused":
            continue  # DDP itself raises in the second forward
        step(model)
        step(model)
        results[f"{name}, trained"] = fsdp_guard.inspect(model).parameters_checked, found(model, sgd(model))
    return results


@pytest.mark.parametrize("change", CLEAN, ids=lambda change: change.__name__)
def test_clean(ranks: Ranks, change: Callable[[Any], None]) -> None:
    for results in ranks(run_clean, change):
        assert {divergences == [] for _, divergences in results.values()} == {True}, results
        # A second name of a parameter is a second binding.
        assert {checked for checked, _ in results.values()} == {10 if change is shared else 8}


# What is silent without the guard: a gradient that each rank has for itself.


def set_weight(model: Any) -> None:
    replace_parameter(model.module.head)


def load_with_assign(model: Any) -> None:
    state = {name: value.detach().clone() for name, value in model.module.head.state_dict().items()}
    model.module.head.load_state_dict(state, assign=True)


def half_of_a_tie(model: Any) -> None:
    model.module.head = model.module.embed


def add_parameter(model: Any) -> None:
    model.module.head.scale = nn.Parameter(torch.ones(2))
    model.module.head.register_forward_hook(lambda head, args, output: output * head.scale)


def unfreeze(model: Any) -> None:
    model.module.embed.requires_grad_(True)


def swap_submodule(model: Any) -> None:
    torch.manual_seed(1)
    model.module.head = nn.Linear(4, 3)


def parametrize(model: Any) -> None:
    parametrizations.weight_norm(model.module.head)


def copied(model: Any) -> None:
    model.module.head = copy.deepcopy(model.module.head)


# Names of what is not reduced, and what the guard says.
SILENT: dict[Callable[[Any], None], tuple[set[str], Found]] = {
    set_weight: ({"head.weight"}, [(Kind.REPLACED_PARAMETER, "module.head.weight")]),
    load_with_assign: (
        {"head.weight", "head.bias"},
        [(Kind.REPLACED_PARAMETER, "module.head.weight"), (Kind.REPLACED_PARAMETER, "module.head.bias")],
    ),
    copied: (
        {"head.weight", "head.bias"},
        [(Kind.REPLACED_PARAMETER, "module.head.weight"), (Kind.REPLACED_PARAMETER, "module.head.bias")],
    ),
    add_parameter: ({"head.scale"}, [(Kind.UNMANAGED_PARAMETER, "module.head.scale")]),
    unfreeze: (
        {"embed.weight", "embed.bias"},
        [(Kind.UNMANAGED_PARAMETER, "module.embed.weight"), (Kind.UNMANAGED_PARAMETER, "module.embed.bias")],
    ),
    swap_submodule: (
        {"head.weight", "head.bias"},
        [
            (Kind.MISSING_PARAMETER, "(parameter 4 of the reducer)"),
            (Kind.MISSING_PARAMETER, "(parameter 5 of the reducer)"),
            (Kind.UNMANAGED_PARAMETER, "module.head.weight"),
            (Kind.UNMANAGED_PARAMETER, "module.head.bias"),
        ],
    ),
    # weight_norm keeps the weight as its second original, g and v are new.
    parametrize: (
        {"head.parametrizations.weight.original0", "head.parametrizations.weight.original1"},
        [
            (Kind.REPLACED_PARAMETER, "module.head.parametrizations.weight.original1"),
            (Kind.UNMANAGED_PARAMETER, "module.head.parametrizations.weight.original0"),
        ],
    ),
}


def run_silent(change: Callable[[Any], None]) -> tuple[Found, dict[str, float]]:
    """Return what the guard says, and the gradients of a step that nothing stops."""
    model = wrapped(freeze="embed", find_unused_parameters=True)
    change(model)
    divergences = found(model)
    step(model)
    gradients = {n: p.grad.double().norm().item() for n, p in model.module.named_parameters() if p.grad is not None}
    return divergences, gradients


@pytest.mark.parametrize("change", SILENT, ids=lambda change: change.__name__)
def test_silent_case_is_caught(ranks: Ranks, change: Callable[[Any], None]) -> None:
    (divergences, ours), (too, theirs) = ranks(run_silent, change)
    not_reduced, expected = SILENT[change]
    assert {name for name in ours if abs(ours[name] - theirs[name]) > 1e-4} >= {
        name for name in not_reduced if not name.endswith("bias")
    }, "DDP reduces it after all: measure again"
    assert divergences == too == expected


def run_tie() -> tuple[Found, Found, str]:
    model = tower()
    model.head.weight = nn.Parameter(torch.zeros(4, 4))
    model.head.weight = model.embed.weight
    ddp = DistributedDataParallel(model)
    clean = found(ddp)
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    report = fsdp_guard.inspect(ddp)
    return clean, [(d.kind, d.fqn) for d in report.divergences], report.divergences[0].detail


def test_half_of_a_tie_replaced(ranks: Ranks) -> None:
    """The reducer keeps no names: what was tied and is not any more is a parameter that nothing reduces."""
    for clean, broken, detail in ranks(run_tie):
        assert clean == []
        assert broken == [(Kind.UNMANAGED_PARAMETER, "module.head.weight")]
        assert "no torch_ddp holder owns" in detail


def run_told_to_ignore() -> dict[str, tuple[int, int, Found]]:
    by_name: Any = tower()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(by_name, ["head.weight", "head.bias"])
    delayed = tower()
    reduced_apart = [(name, p) for name, p in delayed.named_parameters() if name.startswith("head.")]
    models = {
        "ignored": DistributedDataParallel(by_name),
        "delayed": DistributedDataParallel(
            delayed,
            delay_all_reduce_named_params=reduced_apart,
            param_to_hook_all_reduce=delayed.embed.weight,
        ),
    }
    results = {}
    for name, model in models.items():
        report = fsdp_guard.inspect(model, sgd(model))
        divergences = found_in(report)
        results[name] = report.parameters_checked, report.parameters_unclaimed, divergences
    replace_parameter(by_name.embed)
    results["others"] = 0, 0, found(models["ignored"])
    return results


def test_what_ddp_was_told_to_ignore_is_left_alone(ranks: Ranks) -> None:
    for results in ranks(run_told_to_ignore):
        assert results["ignored"] == results["delayed"] == (6, 2, [])
        assert results["others"][2] == [(Kind.REPLACED_PARAMETER, "module.embed.weight")]


def run_sparse() -> list[Found]:
    """The reducer shows its parameters only after the first backward, where gradients are sparse."""
    model = nn.Sequential(nn.Embedding(4, 4, sparse=True), nn.Linear(4, 4))
    ddp = DistributedDataParallel(model)
    looks = [found(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))]
    replace_parameter(model[0])
    looks.append(found(ddp))
    ddp = DistributedDataParallel(model)
    ddp(torch.tensor([0, 1])).sum().backward()
    looks.append(found(ddp))
    replace_parameter(model[0])
    looks.append(found(ddp))
    return looks


def test_sparse_gradients(ranks: Ranks) -> None:
    replaced = [(Kind.REPLACED_PARAMETER, "module.0.weight")]
    for looks in ranks(run_sparse):
        assert looks == [[], replaced, [], replaced]


def run_optimizers() -> dict[str, Found]:
    results = {}
    plain = tower()
    before = sgd(plain)
    model: Any = DistributedDataParallel(plain)
    results["built before the wrap"] = found(model, before)
    results["a part"] = found(model, sgd(plain.head))
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    ddp = DistributedDataParallel(plain)
    results["built before a load with assign"] = found(ddp, before)
    results["built after it"] = found(ddp, sgd(ddp))
    return results


def test_optimizers(ranks: Ranks) -> None:
    names = [f"module.{name}" for name, _ in tower().named_parameters()]
    for results in ranks(run_optimizers):
        assert results["built before the wrap"] == results["built after it"] == []
        others = [name for name in names if "head" not in name]
        assert results["a part"] == [(Kind.OPTIMIZER_MISSING, name) for name in others]
        orphans = results["built before a load with assign"]
        assert sorted(orphans) == sorted(
            [(kind, name) for kind in (Kind.OPTIMIZER_ORPHAN, Kind.OPTIMIZER_MISSING) for name in names]
        )


def run_memory() -> list[torch.device]:
    """The devices on which a look makes tensors."""
    from torch.utils._python_dispatch import TorchDispatchMode

    made: list[torch.device] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            made.append(result.device)
            return result

    model = wrapped()
    step(model)
    with Record():
        fsdp_guard.inspect(model)
    return made


def test_a_look_allocates_nothing(ranks: Ranks) -> None:
    for made in ranks(run_memory):
        assert {device.type for device in made} <= {"meta"}


def run_watched() -> tuple[list[tuple[str, bool]], int]:
    model = wrapped()
    optimizer = sgd(model)
    events: list[tuple[str, bool]] = []
    guard = fsdp_guard.Guard(
        reporters=[lambda report: events.append((report.event.value, report.ok))], on_divergence="warn"
    )
    with guard.watch(model, optimizer):
        model.load_state_dict(model.state_dict())
        step(model)
        optimizer.step()
        left = sum(len(module._forward_pre_hooks) for module in model.modules())
        dist.barrier()  # or one rank hears of the other's load in its first step
        load_with_assign(model)
        step(model)
        optimizer.step()
    return events, left


def test_watch(ranks: Ranks) -> None:
    for events, left in ranks(run_watched):
        assert events == [
            ("load", True),
            ("first_forward", True),
            ("first_step", True),
            ("load", False),
            ("first_forward", False),
            ("first_step", False),
        ]
        assert left == 0


@pytest.mark.parametrize("attribute", ["_module_parameters", "reducer", "parameters_to_ignore"])
def test_unknown_layout_is_a_clear_error(ranks: Ranks, attribute: str) -> None:
    for message in ranks(run_unknown_layout, attribute):
        assert message == f"torch {torch.__version__}: {attribute}"


def run_unknown_layout(attribute: str) -> str:
    model = wrapped()
    replace_parameter(model.module.head)
    delattr(model, attribute)
    try:
        fsdp_guard.inspect(model)
    except UnsupportedLayoutError as error:
        return f"{error.version}: {error.attribute}"
    return ""
