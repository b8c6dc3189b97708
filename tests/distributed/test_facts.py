"""The measured table: what each operation after the wrap does to training, and what the guard says of it.

Each case runs twice on fresh models: once unguarded, to show that the operation really does what the table says, and
once to ask the guard before the first forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_guard
from fsdp_guard import DivergenceKind as Kind
from fsdp_guard.demo.case import CHECKPOINT
from tests.distributed.ranks import Ranks
from tests.mfsdp import (
    DEVICE,
    LOADED_LOSSES,
    MAIN_LAYOUT,
    STALE_LOSS,
    checkpoint,
    linear,
    loss,
    sgd,
    shard,
    sharded_linear,
    train,
)

Trained = tuple[nn.Module, torch.optim.Optimizer]

SILENT = [STALE_LOSS] * 4


def kinds(report: fsdp_guard.Report) -> set[Kind]:
    return {divergence.kind for divergence in report.divergences}


def assign_true_then_optimizer() -> Trained:
    model = sharded_linear()
    model.load_state_dict(checkpoint(), assign=True)
    return model, sgd(model)


def optimizer_then_assign_true() -> Trained:
    model = sharded_linear()
    optimizer = sgd(model)
    model.load_state_dict(checkpoint(), assign=True)
    return model, optimizer


def assign_false() -> Trained:
    model = sharded_linear()
    optimizer = sgd(model)
    model.load_state_dict(checkpoint(), assign=False)
    return model, optimizer


def new_parameter() -> Trained:
    model = sharded_linear()
    model.weight = nn.Parameter(checkpoint()["weight"])
    return model, sgd(model)


def swapped_tensors() -> Trained:
    model = sharded_linear()
    torch.utils.swap_tensors(model.weight, nn.Parameter(checkpoint()["weight"]))
    return model, sgd(model)


def optimizer_before_wrap() -> Trained:
    model = linear()
    optimizer = sgd(model)
    shard(model)
    return model, optimizer


SILENT_CASES: dict[Callable[[], Trained], set[Kind]] = {
    new_parameter: {Kind.REPLACED_PARAMETER, Kind.OPTIMIZER_ORPHAN, Kind.OPTIMIZER_MISSING},
    swapped_tensors: {Kind.DETACHED_STORAGE},
    optimizer_before_wrap: {Kind.OPTIMIZER_ORPHAN, Kind.OPTIMIZER_MISSING},
}
if not MAIN_LAYOUT:
    SILENT_CASES[assign_true_then_optimizer] = {
        Kind.REPLACED_PARAMETER,
        Kind.OPTIMIZER_ORPHAN,
        Kind.OPTIMIZER_MISSING,
    }


def run_unguarded(case: Callable[[], Trained], steps: int) -> list[float]:
    return train(*case(), steps)


def run_inspect(case: Callable[[], Trained]) -> fsdp_guard.Report:
    return fsdp_guard.inspect(*case())


def run_inspect_after_forward(case: Callable[[], Trained]) -> fsdp_guard.Report:
    model, optimizer = case()
    loss(model).backward()
    return fsdp_guard.inspect(model, optimizer)


@pytest.mark.parametrize("case", SILENT_CASES, ids=lambda case: case.__name__)
def test_silent_case_is_caught(ranks: Ranks, case: Callable[[], Trained]) -> None:
    for losses in ranks(run_unguarded, case, 4):
        assert losses == SILENT, "the runtime no longer fails silently here: measure again"
    for report in ranks(run_inspect, case):
        assert kinds(report) == SILENT_CASES[case]
        assert {divergence.fqn for divergence in report.divergences} == {"weight"}
        assert report.parameters_checked == 1


def test_issue_6087_trains_on_weights_nobody_loaded_for_20_steps(ranks: Ranks) -> None:
    if MAIN_LAYOUT:
        pytest.skip("main raises at the load")
    for losses in ranks(run_unguarded, assign_true_then_optimizer, 20):
        assert losses == [STALE_LOSS] * 20


@pytest.mark.parametrize("case", [c for c in SILENT_CASES if c is not swapped_tensors], ids=lambda case: case.__name__)
def test_optimizer_still_shows_it_after_the_first_forward(ranks: Ranks, case: Callable[[], Trained]) -> None:
    for report in ranks(run_inspect_after_forward, case):
        assert kinds(report) == {Kind.OPTIMIZER_ORPHAN, Kind.OPTIMIZER_MISSING}


def run_optimizer_then_assign_true() -> tuple[set[Kind], set[Kind]]:
    model, optimizer = optimizer_then_assign_true()
    before = fsdp_guard.inspect(model, optimizer)
    loss(model)
    return kinds(before), kinds(fsdp_guard.inspect(model, optimizer))


def test_optimizer_built_before_an_assigning_load(ranks: Ranks) -> None:
    if MAIN_LAYOUT:
        pytest.skip("main raises at the load")
    for before, after in ranks(run_optimizer_then_assign_true):
        # The optimizer has the holders' parameters: only the load was lost, and a forward hides even that.
        assert before == {Kind.REPLACED_PARAMETER}
        assert after == set()


def test_in_place_load_is_right_and_clean(ranks: Ranks) -> None:
    for losses in ranks(run_unguarded, assign_false, 4):
        assert losses == pytest.approx(LOADED_LOSSES, abs=1e-6)
    for report in ranks(run_inspect, assign_false):
        assert report.ok, str(report)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(inputs))


def run_tied() -> tuple[bool, fsdp_guard.Report]:
    model = Tied().to(DEVICE)
    shard(model)
    return model.embed.weight is model.head.weight, fsdp_guard.inspect(model)


def test_tied_weights(ranks: Ranks) -> None:
    for still_tied, report in ranks(run_tied):
        assert still_tied is MAIN_LAYOUT
        if MAIN_LAYOUT:
            assert report.ok, str(report)
            assert report.parameters_checked == 2
        else:
            (divergence,) = report.divergences
            assert (divergence.kind, divergence.fqn) == (Kind.BROKEN_TIE, "head.weight")
            assert "embed.weight" in divergence.detail


def run_registered_after_wrap() -> fsdp_guard.Report:
    model = sharded_linear()
    model.bias = nn.Parameter(torch.zeros(4, device=DEVICE))
    return fsdp_guard.inspect(model)


def test_parameter_registered_after_wrap(ranks: Ranks) -> None:
    for report in ranks(run_registered_after_wrap):
        (divergence,) = report.divergences
        assert (divergence.kind, divergence.fqn) == (Kind.UNMANAGED_PARAMETER, "bias")


def run_converted_after_wrap() -> tuple[fsdp_guard.Report, str]:
    model = sharded_linear()
    model.to(torch.bfloat16)
    report = fsdp_guard.inspect(model, sgd(model))
    try:
        train(model, sgd(model), 1)
    except Exception as error:
        return report, f"{type(error).__name__}: {error}"
    return report, ""


def test_converted_after_wrap(ranks: Ranks) -> None:
    for report, upstream_error in ranks(run_converted_after_wrap):
        assert upstream_error, "the runtime no longer raises here: measure again"
        assert kinds(report) == {Kind.DETACHED_STORAGE}
        assert "bfloat16" in report.divergences[0].detail


def run_moved_after_wrap(dtype: torch.dtype, move: bool) -> tuple[fsdp_guard.Report, fsdp_guard.Report, list[float]]:
    model = linear(dtype)
    shard(model, main_grads_dtype=torch.float32)
    if move:
        model.to(DEVICE)
    optimizer = sgd(model)
    return fsdp_guard.inspect(model), fsdp_guard.inspect(model, optimizer), train(model, optimizer, 3)


def test_move_that_moves_nothing_cuts_the_optimizer_off(ranks: Ranks) -> None:
    """Lightning's ModelParallelStrategy does this after configure_model."""
    for report, with_optimizer, losses in ranks(run_moved_after_wrap, torch.bfloat16, True):
        assert losses == [STALE_LOSS] * 3, "the runtime no longer fails silently here: measure again"
        assert report.ok, "an evaluation is none the worse for it"
        (divergence,) = with_optimizer.divergences
        assert (divergence.kind, divergence.fqn) == (Kind.OPTIMIZER_ORPHAN, "weight")
        assert "model_to_device" in divergence.remedy


@pytest.mark.parametrize(("dtype", "move"), [(torch.bfloat16, False), (torch.float32, True)])
def test_no_move_or_no_compute_weights_of_their_own(ranks: Ranks, dtype: torch.dtype, move: bool) -> None:
    for report, with_optimizer, losses in ranks(run_moved_after_wrap, dtype, move):
        assert len(set(losses)) == 3
        assert report.ok
        assert with_optimizer.ok, str(with_optimizer)


def run_numbers_of_the_checkpoint() -> tuple[float, float]:
    model, loaded = linear(), linear()
    with torch.no_grad():
        loaded.weight.copy_(CHECKPOINT)
    return loss(model).item(), loss(loaded).item()


def test_losses_of_the_unsharded_model(ranks: Ranks) -> None:
    for before, after in ranks(run_numbers_of_the_checkpoint):
        assert (before, after) == (STALE_LOSS, LOADED_LOSSES[0])


def run_upstream_main_raises() -> str:
    model: Any = sharded_linear()
    try:
        model.load_state_dict(checkpoint(), assign=True)
    except RuntimeError as error:
        return str(error)
    return ""


def test_main_refuses_assign_true(ranks: Ranks) -> None:
    if not MAIN_LAYOUT:
        pytest.skip("released versions load without a word")
    for message in ranks(run_upstream_main_raises):
        assert "assign=True" in message
