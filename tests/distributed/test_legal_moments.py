"""A healthy model is clean at every moment of its life: a false alarm stops somebody's run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute

import fsdp_guard
from tests.distributed.ranks import Ranks
from tests.mfsdp import DEVICE, Block, Tower, checkpoint, loss, sgd, shard, sharded_linear, tower, train


class Looks:
    """Inspects a model whenever it is called, and remembers what it saw."""

    def __init__(self) -> None:
        self.model: nn.Module | None = None
        self.optimizer: Any = None
        self.moments: list[tuple[str, str]] = []
        self.not_ok: list[str] = []

    def __call__(self, moment: str) -> None:
        assert self.model is not None
        report = fsdp_guard.inspect(self.model, self.optimizer)
        shown = "sharded" if all(hasattr(p, "placements") for p in self.model.parameters()) else "unsharded"
        self.moments.append((moment, shown))
        if not report.ok:
            self.not_ok.append(f"{moment}: {report}")


def run_training() -> Looks:
    looks = Looks()
    model = tower(look=looks)
    looks.model, looks.optimizer = model, sgd(model)
    looks("after the wrap")
    inputs = torch.ones(3, 4, device=DEVICE)
    for _ in range(3):
        looks.optimizer.zero_grad()
        looks("after zero_grad")
        outputs = model(inputs)
        looks("between forward and backward")
        outputs.sum().backward()
        looks("between backward and step")
        looks.optimizer.step()
        looks("after the step")
    with torch.no_grad():
        model(inputs)
    looks("after an evaluation")
    model.eval()
    with torch.inference_mode():
        model(inputs)
    looks("after inference mode")
    model.load_state_dict(model.state_dict())
    looks("after an in-place load")
    return strip(looks)


class Recomputing(Block):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return recompute(super().forward, inputs, use_reentrant=False)


class RecomputedFromOutside(Tower):
    use_reentrant = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = recompute(block, hidden, use_reentrant=self.use_reentrant)
        return self.head(hidden)


def run_recomputation(kind: str) -> Looks:
    looks = Looks()
    block, whole = (Recomputing, Tower) if kind == "inside" else (Block, RecomputedFromOutside)
    model = whole([block(looks) for _ in range(2)]).to(DEVICE)
    if isinstance(model, RecomputedFromOutside):
        model.use_reentrant = kind == "reentrant"
    shard(*model.blocks, model)
    looks.model, looks.optimizer = model, sgd(model)
    for _ in range(2):
        outputs = model(torch.ones(3, 4, device=DEVICE))
        looks("between forward and backward")
        outputs.sum().backward()
        looks("between backward and step")
    return strip(looks)


def run_gradient_accumulation() -> Looks:
    looks = Looks()
    model = tower(look=looks)
    looks.model, looks.optimizer = model, sgd(model)
    for _ in range(3):
        model(torch.ones(3, 4, device=DEVICE)).sum().backward()
        looks("between microbatches")
    looks.optimizer.step()
    looks("after the step")
    return strip(looks)


def run_caught_exception() -> Looks:
    """An exception inside a forward leaves whole groups unsharded: both phases, but no mixture."""

    class Failing(Block):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            raise FloatingPointError("loss is not finite")

    looks = Looks()
    model = Tower([Block(), Failing()]).to(DEVICE)
    shard(*model.blocks, model)
    looks.model = model
    with pytest.raises(FloatingPointError):
        model(torch.ones(3, 4, device=DEVICE))
    looks("after an exception")
    return strip(looks)


def strip(looks: Looks) -> Looks:
    """Drop what cannot travel between processes."""
    looks.model = looks.optimizer = None
    return looks


@pytest.mark.parametrize(
    ("run", "args", "unsharded_moments"),
    [
        (run_training, (), {"inside a forward", "inside the backward"}),
        (run_recomputation, ("inside",), {"inside a forward", "inside the backward"}),
        (run_recomputation, ("outside",), {"inside a forward", "inside the backward"}),
        (run_recomputation, ("reentrant",), {"inside a forward", "inside the backward"}),
        (run_gradient_accumulation, (), {"inside a forward", "inside the backward"}),
        (run_caught_exception, (), {"after an exception"}),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_clean_at_every_moment(
    ranks: Ranks, run: Callable[..., Looks], args: tuple[Any, ...], unsharded_moments: set[str]
) -> None:
    for looks in ranks(run, *args):
        assert looks.not_ok == []
        # The looks are worth something only if they saw both phases where both exist.
        assert {moment for moment, shown in looks.moments if shown == "unsharded"} >= unsharded_moments
        assert {shown for _, shown in looks.moments} >= {"unsharded"}


def run_uneven_shards() -> list[tuple[int, fsdp_guard.Report]]:
    """One row of three features: one of the ranks has no row of the weight."""
    model = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 5)).to(DEVICE)
    shard(model)
    empty = sum(parameter._local_tensor.numel() == 0 for parameter in model.parameters())
    reports = [(empty, fsdp_guard.inspect(model, sgd(model)))]
    model.load_state_dict(model.state_dict())
    with torch.no_grad():
        model(torch.ones(2, 3, device=DEVICE))
    reports.append((empty, fsdp_guard.inspect(model, sgd(model))))
    return reports


def test_ranks_without_rows(ranks: Ranks) -> None:
    by_rank = ranks(run_uneven_shards)
    assert sum(empty for (empty, _), *_ in by_rank) > 0, "no rank has an empty shard: nothing is tested"
    for reports in by_rank:
        assert all(report.ok for _, report in reports), reports


def run_optimizer_without_empty_shards() -> tuple[int, fsdp_guard.Report]:
    """Megatron-LM leaves parameters without local rows out of the optimizer."""
    model = nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 5)).to(DEVICE)
    shard(model)
    kept = [parameter for parameter in model.parameters() if parameter._local_tensor.numel()]
    left_out = len(list(model.parameters())) - len(kept)
    return left_out, fsdp_guard.inspect(model, torch.optim.SGD(kept, lr=0.1))


def test_optimizer_may_leave_out_parameters_without_local_rows(ranks: Ranks) -> None:
    by_rank = ranks(run_optimizer_without_empty_shards)
    assert sum(left_out for left_out, _ in by_rank) > 0
    for _, report in by_rank:
        assert report.ok, str(report)


def run_frozen(how: str) -> fsdp_guard.Report:
    model = Tower([Block()]).to(DEVICE)
    if how == "before the wrap":
        model.blocks.requires_grad_(False)
    shard(*model.blocks, model)
    if how == "after the wrap":
        model.blocks.requires_grad_(False)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trainable) == 4
    return fsdp_guard.inspect(model, torch.optim.SGD(trainable, lr=0.1))


@pytest.mark.parametrize("how", ["before the wrap", "after the wrap"])
def test_frozen_parameters_may_be_left_out_of_the_optimizer(ranks: Ranks, how: str) -> None:
    for report in ranks(run_frozen, how):
        assert report.ok, str(report)
        assert report.parameters_checked == 8


def run_optimizers() -> dict[str, fsdp_guard.Report]:
    model = tower()
    head = list(model.head.parameters())
    rest = [parameter for parameter in model.parameters() if all(parameter is not p for p in head)]
    criterion = nn.Linear(4, 4, device=DEVICE)  # same shape as the model's embedding, and none of its business
    everything = torch.optim.Adam([*model.parameters(), *criterion.parameters()])
    trunk = nn.Sequential(sharded_linear(), nn.Linear(4, 4, device=DEVICE))
    head_alone = torch.optim.SGD([*trunk[1].parameters(), nn.Parameter(torch.ones(3))], lr=0.1)
    other_model = torch.optim.SGD(nn.Linear(4, 4, device=DEVICE).parameters(), lr=0.1)
    split = [torch.optim.SGD(head, lr=0.1), torch.optim.AdamW(rest)]
    # One parameter is left out, and said to be; nothing that is stepped instead of it can stand in its place.
    (left_out,) = fsdp_guard.inspect(trunk, head_alone).divergences
    assert left_out.kind is fsdp_guard.DivergenceKind.OPTIMIZER_MISSING
    return {
        "several optimizers": fsdp_guard.inspect(model, split),
        "a loss with parameters of its own": fsdp_guard.inspect(model, everything),
        "an optimizer of another model besides": fsdp_guard.inspect(model, [*split, other_model]),
    }


def test_optimizers_of_healthy_runs(ranks: Ranks) -> None:
    for reports in ranks(run_optimizers):
        for name, report in reports.items():
            assert report.ok, f"{name}: {report}"


def run_optimizer_state() -> fsdp_guard.Report:
    model = tower()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    model(torch.ones(3, 4, device=DEVICE)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    return fsdp_guard.inspect(model, optimizer)


def test_optimizer_with_state(ranks: Ranks) -> None:
    for report in ranks(run_optimizer_state):
        assert report.ok, str(report)


def run_plain_head() -> fsdp_guard.Report:
    """A sharded trunk and a head that no runtime manages."""
    model = nn.Sequential(sharded_linear(), nn.Linear(4, 4, device=DEVICE))
    return fsdp_guard.inspect(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_parameters_outside_all_units_are_counted_not_flagged(ranks: Ranks) -> None:
    for report in ranks(run_plain_head):
        assert report.ok, str(report)
        assert (report.parameters_checked, report.parameters_unclaimed) == (1, 2)


def run_guarded_training() -> list[float]:
    model = sharded_linear()
    optimizer = sgd(model)
    with fsdp_guard.Guard(reporters=[]).watch(model, optimizer):
        model.load_state_dict(checkpoint())
        assert loss(model).item() == 0.44921875
        return train(model, optimizer, 3)


def test_guarded_training_gives_the_same_losses(ranks: Ranks) -> None:
    for losses in ranks(run_guarded_training):
        assert losses == pytest.approx([0.44921875, 0.394821, 0.347011], abs=1e-6)
