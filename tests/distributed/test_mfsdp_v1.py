"""The real Megatron-FSDP V1, on the CPU too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron_fsdp
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

import fsdp_guard
from fsdp_guard import DivergenceKind as Kind
from fsdp_guard import Guard, HolderDivergenceError, UnsupportedLayoutError
from fsdp_guard.holders.base import local_tensor
from tests.distributed.ranks import Ranks
from tests.mfsdp import DEVICE, Block, found_in, replace_parameter, shard_v1

Found = list[tuple[Kind, str]]

NAMES = [f"module.body.{name}" for name in ("up.weight", "up.bias", "down.weight", "down.bias")]
NAMES += ["module.embed.weight", "module.head.weight"]

STRATEGIES = ["no_shard", "optim", "optim_grads", "optim_grads_params"]

PRECISIONS = {
    "single": (torch.float32, torch.float32),
    "mixed": (torch.bfloat16, torch.float32),
    "no main weights": (torch.bfloat16, None),
}


class Tied(nn.Module):
    def __init__(self, look: Callable[[str], object] | None = None) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.body = Block(look)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(inputs)))


def wrapped(
    strategy: str = "optim_grads_params",
    precision: str = "mixed",
    look: Callable[[str], object] | None = None,
    freeze: bool = False,
) -> Any:
    torch.manual_seed(0)
    dtype, main_params_dtype = PRECISIONS[precision]
    model = Tied(look).to(DEVICE, dtype)
    model.body.down.requires_grad_(not freeze)
    return shard_v1(model, Block, strategy=strategy, main_params_dtype=main_params_dtype)


def sgd(model: nn.Module) -> Any:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return megatron_fsdp.fully_shard_optimizer(optimizer)


def forward(model: Any) -> torch.Tensor:
    dtype = next(iter(model.raw_param.values())).dtype
    output: torch.Tensor = model(torch.eye(4, device=DEVICE, dtype=dtype))
    return output


def found(model: nn.Module, optimizer: Any = None, values: bool = False) -> Found:
    report = fsdp_guard.inspect(model, optimizer, values=values)
    assert report.runtimes == ("mfsdp_v1",)
    assert report.parameters_checked > 0
    return found_in(report)


def held_here(model: nn.Module) -> set[str]:
    """Names of the parameters of which this rank has a part."""
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if local_tensor(parameter).numel() > 0}


def run_held(strategy: str) -> set[str]:
    return held_here(wrapped(strategy))


# What is right.


def run_clean(strategy: str, precision: str, freeze: bool) -> dict[str, tuple[int, Found]]:
    seen: dict[str, tuple[int, Found]] = {}
    optimizer: Any = None

    def look(moment: str) -> None:
        if optimizer is not None:
            # Compute weights are compared where all ranks come by.
            values = moment.startswith("after")
            report = fsdp_guard.inspect(model, optimizer, values=values)
            assert report.runtimes == ("mfsdp_v1",)
            seen[f"{moment} {len(seen)}"] = report.parameters_checked, found_in(report)

    model = wrapped(strategy, precision, look, freeze)
    optimizer = sgd(model)
    look("after the wrap")
    for _ in range(2):
        value = forward(model).float().square().mean()
        look("after forward")
        value.backward()
        look("after backward")
        optimizer.step()
        look("after step")
        optimizer.zero_grad()
        model.load_state_dict(model.state_dict())
        look("after load")
    return seen


@pytest.mark.parametrize("freeze", [False, True], ids=["trained", "partly frozen"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_clean(ranks: Ranks, strategy: str, precision: str, freeze: bool) -> None:
    for seen in ranks(run_clean, strategy, precision, freeze):
        assert len(seen) == 13
        assert {moment.rpartition(" ")[0] for moment in seen} >= {"inside a forward", "inside the backward"}
        assert seen == dict.fromkeys(seen, (6, []))


# What is not.


def replaced(model: Any) -> None:
    replace_parameter(model.module.body.up)


def assigned(model: Any) -> None:
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def half_of_a_tie_replaced(model: Any) -> None:
    """The runtime keeps one name of a tied parameter, so the other half is a stranger to it."""
    replace_parameter(model.module.head)


def added(model: Any) -> None:
    model.module.extra = nn.Parameter(torch.ones(2, device=DEVICE))


def removed(model: Any) -> None:
    model.module.body.up.bias = None


def one_shown_in_the_other_phase(model: Any) -> None:
    named = (
        model.raw_param
        if model.is_param_fsdp_distributed
        else dict(model.param_and_grad_buffer.optimizer_named_parameters)
    )
    model.module.body.up.weight = named["body.up.weight"]


def converted(model: Any) -> None:
    """A copy in place of a view of the buffer."""
    parameter = model.module.body.up.weight
    if isinstance(parameter, DTensor):
        parameter._local_tensor = parameter._local_tensor.clone()
    else:
        parameter.data = parameter.data.clone()


WRONG: dict[Callable[[Any], None], Found] = {
    replaced: [(Kind.REPLACED_PARAMETER, "module.body.up.weight")],
    assigned: [(Kind.REPLACED_PARAMETER, name) for name in NAMES[:-1]] + [(Kind.UNMANAGED_PARAMETER, NAMES[-1])],
    half_of_a_tie_replaced: [(Kind.UNMANAGED_PARAMETER, "module.head.weight")],
    added: [(Kind.UNMANAGED_PARAMETER, "module.extra")],
    removed: [(Kind.MISSING_PARAMETER, "module.body.up.bias")],
    one_shown_in_the_other_phase: [(Kind.MIXED_PHASE, "module.body.up.weight")],
    converted: [(Kind.DETACHED_STORAGE, "module.body.up.weight")],
}


def run_wrong(change: Callable[[Any], None], strategy: str, materialized: bool) -> Found:
    model = wrapped(strategy)
    optimizer = sgd(model)
    if materialized:
        forward(model)
        assert not model.is_param_fsdp_distributed
    assert found(model, optimizer) == []
    change(model)
    return found(model, optimizer)


@pytest.mark.parametrize("materialized", [False, True], ids=["resting", "materialized"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
def test_wrong(ranks: Ranks, change: Callable[[Any], None], strategy: str, materialized: bool) -> None:
    # There, any place is right: the runtime copies to where the parameter is, or points it at a buffer of its own.
    is_right = change is converted and materialized and strategy in ("no_shard", "optim_grads_params")
    for diverged in ranks(run_wrong, change, strategy, materialized):
        assert sorted(diverged) == ([] if is_right else sorted(WRONG[change]))


def run_optimizers() -> tuple[dict[str, Found], set[str]]:
    model = wrapped()
    before = torch.optim.SGD(list(model.raw_param.values()), lr=0.1)
    partial = torch.optim.SGD([p for n, p in model.named_parameters() if n != NAMES[0]], lr=0.1)
    return {"before the wrap": found(model, before), "without one": found(model, partial)}, held_here(model)


def test_optimizers(ranks: Ranks) -> None:
    for diverged, held in ranks(run_optimizers):
        orphans = [(Kind.OPTIMIZER_ORPHAN, name) for name in NAMES[:-1]]
        missing = [(Kind.OPTIMIZER_MISSING, name) for name in NAMES[:-1] if name in held]
        assert sorted(diverged["before the wrap"]) == sorted(orphans + missing)
        # A rank without a part of a parameter has nothing to step.
        assert diverged["without one"] == [(kind, name) for kind, name in missing if name == NAMES[0]]
    assert any(NAMES[0] in held for _, held in ranks(run_optimizers))


MARK = "_megatron_fsdp_model"


def run_mark() -> tuple[str, bool, bool]:
    model = wrapped()
    was = model.module.body.up.weight
    replaced(model)
    return str(fsdp_guard.inspect(model)), hasattr(was, MARK), hasattr(model.module.body.up.weight, MARK)


def test_the_remedy_names_the_mark_that_a_new_parameter_lacks(ranks: Ranks) -> None:
    for message, had, has in ranks(run_mark):
        assert (had, has) == (True, False)
        assert MARK in message
        assert "could not retrieve a reference to MegatronFSDP" in " ".join(message.split())


def run_unguarded() -> tuple[bool, bool]:
    """Load zeros with assign=True and go on: the runtime drops them without a word."""
    model = wrapped()
    before = forward(model).detach().clone()
    body = model.module.body
    body.load_state_dict({name: torch.zeros_like(value) for name, value in body.state_dict().items()}, assign=True)
    diverged = bool(found(model))
    return diverged, torch.equal(forward(model), before)


def test_without_the_guard_nobody_would_know(ranks: Ranks) -> None:
    assert ranks(run_unguarded) == [(True, True)] * ranks.size


# Compute weights.


def run_stale(folder: str, strategy: str, precision: str, repair: str) -> tuple[set[str], Found, Found, bool]:
    model = wrapped(strategy, precision)
    before = forward(model).detach().clone()
    dcp.save(model.state_dict(), checkpoint_id=folder)
    with torch.no_grad():
        for parameter in model.parameters():
            local_tensor(parameter).add_(1)
    model.install_optimized_model_weights()
    assert found(model, values=True) == []
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    stale, held = found(model, values=True), held_here(model)
    if repair == "refresh":
        fsdp_guard.refresh(model)
    else:
        model.load_state_dict(state)
    return held, stale, found(model, values=True), torch.equal(forward(model), before)


@pytest.mark.parametrize("repair", ["refresh", "load_state_dict"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_stale_after_dcp_load(ranks: Ranks, tmp_path: Path, strategy: str, precision: str, repair: str) -> None:
    for held, stale, repaired, arrived in ranks(run_stale, str(tmp_path), strategy, precision, repair):
        names = set() if precision == "no main weights" else held
        assert sorted(stale) == [(Kind.STALE_COMPUTE_WEIGHT, name) for name in sorted(names)]
        assert repaired == []
        assert arrived
    assert set().union(*ranks(run_held, strategy)) == set(NAMES)


# The guard.


def run_watched() -> list[str]:
    events = []
    for assign in (False, True):
        model = wrapped()
        guard = Guard(reporters=[])
        guard.watch(model, sgd(model))
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        try:
            model.load_state_dict(state, assign=assign)
            forward(model)
            events.append("trained")
        except HolderDivergenceError as error:
            events.append(str(error.report.event.value))
    return events


def test_watched(ranks: Ranks) -> None:
    assert ranks(run_watched) == [["trained", "load"]] * ranks.size


def run_unknown_layout(path: str) -> str:
    model = wrapped()
    owner, _, name = path.rpartition(".")
    target = model
    for part in owner.split(".") if owner else []:
        target = target[0] if part == "0" else getattr(target, part)
    delattr(target, name)
    with pytest.raises(UnsupportedLayoutError) as error:
        fsdp_guard.inspect(model)
    return str(error.value)


@pytest.mark.parametrize(
    "path",
    [
        "param_and_grad_buffer",
        "raw_param",
        "param_and_grad_buffer.optimizer_named_parameters",
        "param_and_grad_buffer.parameter_groups",
        "param_and_grad_buffer.parameter_groups.0.params",
        "param_and_grad_buffer.parameter_groups.0.main_weight_buffer.data",
    ],
)
def test_an_unknown_layout_is_a_clear_error(ranks: Ranks, path: str) -> None:
    for message in ranks(run_unknown_layout, path):
        assert path.rpartition(".")[2] in message
        assert "megatron-fsdp" in message


# What the reader relies on.


def describe(model: Any) -> list[tuple[Any, ...]]:
    """Of each parameter: its buffers (dtype, whether sharded), where its resting object lies, and its other object."""
    described: list[tuple[Any, ...]] = []
    resting = iter(model.param_and_grad_buffer.optimizer_named_parameters)
    for group in model.param_and_grad_buffer.parameter_groups:
        for original in group.params:
            name, parameter = next(resting)
            assert model.raw_param[name] is original
            buffers = (group.main_weight_buffer, group.model_weight_buffer)
            kinds = [buffer and (buffer.data.dtype, buffer.is_data_distributed) for buffer in buffers]
            rests_in = [lies_in(local_tensor(parameter), buffer) for buffer in buffers]
            computes_in = lies_in(original, group.model_weight_buffer)
            described.append((name, *kinds, *rests_in, computes_in, parameter.requires_grad))
    return sorted(described)


def lies_in(tensor: torch.Tensor, buffer: Any) -> bool | None:
    """``None`` for the empty tensor of a rank that has no part of a parameter."""
    if tensor.numel() == 0:
        return None
    return buffer is not None and tensor.untyped_storage().data_ptr() == buffer.data.untyped_storage().data_ptr()


def run_describe(strategy: str, precision: str) -> list[tuple[Any, ...]]:
    return describe(wrapped(strategy, precision, freeze=True))


def expected(strategy: str, precision: str) -> list[tuple[Any, ...]]:
    dtype, main_dtype = PRECISIONS[precision]
    sharded, gathered = strategy != "no_shard", strategy == "optim_grads_params"
    rows: list[tuple[Any, ...]] = []
    for name in sorted(name.removeprefix("module.") for name in NAMES[:-1]):
        trained = "down" not in name
        main = (main_dtype, sharded) if main_dtype is not None and trained else None
        compute = (dtype, gathered) if sharded else None
        rests_in_compute = compute is not None and main is None
        rows.append((name, main, compute, main is not None, rests_in_compute, sharded and not gathered, trained))
    return rows


@pytest.mark.parametrize("precision", ["mixed", "no main weights"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_the_reader_relies_on(ranks: Ranks, strategy: str, precision: str) -> None:
    for described in ranks(run_describe, strategy, precision):
        for seen, right in zip(described, expected(strategy, precision), strict=True):
            assert seen[:3] == right[:3]
            assert all(is_so in (None, should) for is_so, should in zip(seen[3:], right[3:], strict=True)), (
                seen,
                right,
            )
