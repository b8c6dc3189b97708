"""Compute weights against main weights: a bf16 model with fp32 main weights keeps both."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron_fsdp import experimental
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import fsdp_guard
import fsdp_guard.values
from fsdp_guard import DivergenceKind as Kind
from fsdp_guard import Guard, HolderDivergenceError, Report
from tests.distributed.ranks import Ranks
from tests.distributed.test_lightning import NAMESPACES, Outcome, run
from tests.mfsdp import (
    DEVICE,
    LOADED_LOSSES,
    MAIN_LAYOUT,
    STALE_LOSS,
    Block,
    Tower,
    checkpoint,
    loss,
    sgd,
    shard,
    shard_as,
    sharded_linear,
    train,
)

BF16 = torch.bfloat16


def stale(report: Report) -> list[str]:
    assert {d.kind for d in report.divergences} <= {Kind.STALE_COMPUTE_WEIGHT}, str(report)
    return [d.fqn for d in report.divergences]


def loaded(dtype: torch.dtype = BF16) -> nn.Module:
    model = sharded_linear(dtype)
    model.load_state_dict(checkpoint(), assign=False)
    return model


def run_unguarded() -> tuple[list[float], list[str], list[str]]:
    model = loaded()
    by_values = stale(fsdp_guard.inspect(model, values=True))
    by_identity = stale(fsdp_guard.inspect(model))
    return train(model, sgd(model), 2), by_values, by_identity


def test_in_place_load_leaves_compute_weights_stale(ranks: Ranks) -> None:
    for losses, by_values, by_identity in ranks(run_unguarded):
        assert losses[0] == STALE_LOSS, "the runtime no longer fails silently here: measure again"
        assert losses[1] != STALE_LOSS, "the first step refreshes the compute weights"
        assert by_values == ["weight"]
        assert by_identity == [], "identity alone cannot see it"


def run_refresh() -> tuple[list[str], list[str], list[str], float]:
    model = loaded()
    first, second = fsdp_guard.refresh(model), fsdp_guard.refresh(model)
    return first, second, stale(fsdp_guard.inspect(model, values=True)), loss(model).item()


def test_refresh(ranks: Ranks) -> None:
    for first, second, left, value in ranks(run_refresh):
        assert first == ["weight"]
        assert second == left == []
        assert value == LOADED_LOSSES[0]


class Recorder:
    def __init__(self) -> None:
        self.seen: list[tuple[str, int, int, int]] = []

    def __call__(self, report: Report) -> None:
        counts = len(report.divergences), len(report.pending), len(report.refreshed)
        self.seen.append((report.event.value, *counts))


def attempt(function: Callable[..., Any], *args: Any) -> str:
    try:
        function(*args)
    except HolderDivergenceError as error:
        return error.report.event.value
    finally:
        dist.barrier()  # else one rank may hear of the other's next look at this one
    return ""


def run_watched(what: str) -> tuple[list[str], list[tuple[str, int, int, int]], float | None]:
    recorder = Recorder()
    model = sharded_linear(BF16)
    options: dict[str, Any] = {what: True} if what in ("strict_load", "refresh_stale") else {}
    value = None
    with Guard(reporters=[recorder], **options).watch(model):
        outcomes = [attempt(model.load_state_dict, checkpoint())]
        if what == "refresh":
            fsdp_guard.refresh(model)
        if what == "runtime's own":
            for group in model.parameter_groups:
                group.sync_model_weight_from_main_weight()
        if what != "strict_load":
            outcomes.append(attempt(loss, model))
            value = loss(model).item()
    return outcomes, recorder.seen, value


@pytest.mark.parametrize(
    ("what", "raised", "seen", "value"),
    [
        # event, divergences, pending, refreshed
        ("nothing", ["", "first_forward"], [("load", 0, 1, 0), ("first_forward", 1, 0, 0)], STALE_LOSS),
        ("refresh", ["", ""], [("load", 0, 1, 0), ("first_forward", 0, 0, 0)], LOADED_LOSSES[0]),
        ("runtime's own", ["", ""], [("load", 0, 1, 0), ("first_forward", 0, 0, 0)], LOADED_LOSSES[0]),
        ("refresh_stale", ["", ""], [("load", 0, 1, 0), ("first_forward", 0, 0, 1)], LOADED_LOSSES[0]),
        ("strict_load", ["load"], [("load", 1, 0, 0)], None),
    ],
)
def test_verdict_falls_before_the_first_forward(
    ranks: Ranks, what: str, raised: list[str], seen: list[Any], value: float | None
) -> None:
    for outcome in ranks(run_watched, what):
        assert outcome == (raised, seen, value)


def run_clean() -> dict[str, list[str]]:
    trained = loaded()
    train(trained, sgd(trained), 1)
    return {
        "after the wrap": stale(fsdp_guard.inspect(sharded_linear(BF16), values=True)),
        "after an optimizer step": stale(fsdp_guard.inspect(trained, values=True)),
        "fp32": stale(fsdp_guard.inspect(loaded(torch.float32), values=True)),
    }


def test_clean(ranks: Ranks) -> None:
    for found in ranks(run_clean):
        assert found == {"after the wrap": [], "after an optimizer step": [], "fp32": []}


def run_fp32_reads_nothing() -> int:
    calls = 0
    count = fsdp_guard.values._count_differing

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return count(*args)

    fsdp_guard.values._count_differing = counted
    fsdp_guard.inspect(loaded(torch.float32), values=True)
    fsdp_guard.values._count_differing = count
    return calls


def test_one_buffer_is_skipped(ranks: Ranks) -> None:
    assert ranks(run_fp32_reads_nothing) == [0, 0]


def bf16_tower() -> Tower:
    torch.manual_seed(0)
    model = Tower([Block(), Block()]).to(DEVICE, BF16)
    shard(*model.blocks, model)
    return model


def run_counts(chunk: int) -> tuple[list[tuple[str, str]], int]:
    """Change single elements of the main weights, in the first and the last row, and count ``chunk`` at a time."""
    scratch = fsdp_guard.values._SCRATCH_BYTES
    fsdp_guard.values._SCRATCH_BYTES = 3 * chunk
    model = bf16_tower()
    with torch.no_grad():
        for name in ("up.weight", "down.bias"):
            local = model.blocks[1].get_parameter(name)._local_tensor
            if local.numel():
                local.view(-1)[0] += 1
                local.view(-1)[-1] += 1
    report = fsdp_guard.inspect(model, values=True)
    fsdp_guard.values._SCRATCH_BYTES = scratch
    return [(d.fqn, d.detail) for d in report.divergences], report.parameters_checked


@pytest.mark.parametrize("chunk", [1, 3, 7, 8 * 1024 * 1024])
def test_each_parameter_is_counted_exactly(ranks: Ranks, chunk: int) -> None:
    by_rank = ranks(run_counts, chunk)
    assert {fqn for found, _ in by_rank for fqn, _ in found} == {"blocks.1.up.weight", "blocks.1.down.bias"}
    for found, checked in by_rank:
        assert checked == 12
        for fqn, detail in found:
            # (8, 4) over two ranks; the four elements of the bias are on one of them, or two and two.
            compared = {"blocks.1.up.weight": (16, 32), "blocks.1.down.bias": (2, 4)}[fqn]
            assert any(f"Seen 2 of this rank's {n} bfloat16" in detail for n in compared), detail


def run_special_values() -> dict[str, list[str]]:
    found = {}
    for name, main, compute in [
        ("equal", 1.0, 1.0),
        ("rounds to it", 1.0 + 2**-12, 1.0),
        ("one bit apart", 1.0, 1.0 + 2**-7),
        ("signs of zero", 0.0, -0.0),
        ("nan", float("nan"), float("nan")),
        ("nan and number", float("nan"), 0.0),
        ("infinity", float("inf"), float("inf")),
    ]:
        model = sharded_linear(BF16)
        (group,) = model.parameter_groups
        group.main_weight.local_buffer.fill_(compute)
        group.model_weight.local_buffer.copy_(group.main_weight.local_buffer)
        group.main_weight.local_buffer.fill_(main)
        found[name] = stale(fsdp_guard.inspect(model, values=True))
    return found


def test_bits_are_what_counts(ranks: Ranks) -> None:
    for found in ranks(run_special_values):
        different = [name for name, fqns in found.items() if fqns]
        assert different == ["one bit apart", "signs of zero", "nan and number"]


def run_nans_of_every_kind() -> list[str]:
    """torch's CPU cast gives a NaN other bits in a vector than at its end: refreshed is refreshed all the same."""
    model = nn.Linear(37, 5, bias=False, device=DEVICE, dtype=BF16)
    shard(model)
    (group,) = model.parameter_groups
    bits = torch.arange(0x7F800001, 0x7F800001 + group.main_weight.local_buffer.numel(), dtype=torch.int32)
    group.main_weight.local_buffer.copy_(bits.view(torch.float32))
    group.sync_model_weight_from_main_weight()
    scratch = fsdp_guard.values._SCRATCH_BYTES
    fsdp_guard.values._SCRATCH_BYTES = 15
    found = stale(fsdp_guard.inspect(model, values=True))
    fsdp_guard.values._SCRATCH_BYTES = scratch
    return found


def test_nans(ranks: Ranks) -> None:
    assert ranks(run_nans_of_every_kind) == [[], []]


def placements(parameter: str, optimizer: str) -> Any:
    """One letter an axis: r for replicated, s for sharded."""
    package: Any = experimental
    kinds: dict[str, Any] = {"r": Replicate(), "s": Shard(0)}
    if not MAIN_LAYOUT:
        kinds = {"r": package.Replicate(), "s": package.Flat()}
    return package.Placements(
        dp_axes=["outer", "inner"][-len(parameter) :],
        parameter=[kinds[letter] for letter in parameter],
        gradient=[kinds[letter] for letter in optimizer],
        optimizer=[kinds[letter] for letter in optimizer],
    )


def run_placements(parameter: str, optimizer: str, sizes: tuple[int, ...], only_rank: int | None) -> list[list[str]]:
    model = Tower([Block()]).to(DEVICE, BF16)
    names = ("outer", "inner")[-len(sizes) :]
    shard_as(placements(parameter, optimizer), init_device_mesh(DEVICE, sizes, mesh_dim_names=names), model)
    found = [stale(fsdp_guard.inspect(model, values=True))]
    with torch.no_grad():
        for main in model.parameters():
            if only_rank in (None, dist.get_rank()):
                main._local_tensor.add_(1)
    found.append(stale(fsdp_guard.inspect(model, values=True)))
    found.append(fsdp_guard.refresh(model))
    found.append(stale(fsdp_guard.inspect(model, values=True)))
    return found


@pytest.mark.parametrize("only_rank", [None, 1])
@pytest.mark.parametrize(
    ("parameter", "optimizer", "sizes"),
    [
        ("s", "s", (2,)),
        ("r", "s", (2,)),  # ZeRO-1: each rank compares its main weights with its replica's part
        ("r", "r", (2,)),
        ("rs", "rs", (2, 1)),  # HSDP
        ("rs", "rs", (1, 2)),
        ("rs", "ss", (2, 1)),  # HFSDP
    ],
)
def test_placements(
    ranks: Ranks, parameter: str, optimizer: str, sizes: tuple[int, ...], only_rank: int | None
) -> None:
    by_rank = ranks(run_placements, parameter, optimizer, sizes, only_rank)
    for fresh, after_load, refreshed, left in by_rank:
        assert fresh == left == []
        assert refreshed == after_load
    seen = {fqn for _, after_load, _, _ in by_rank for fqn in after_load}
    everything = {f"{m}.{p}" for m in ("embed", "blocks.0.up", "blocks.0.down", "head") for p in ("weight", "bias")}
    assert seen == everything if only_rank is None else seen <= everything
    if only_rank is not None:
        assert by_rank[0][1] == [], "rank 0's weights are fresh"
        assert by_rank[1][1] != []


def run_partial_load() -> tuple[list[str], list[str]]:
    pending: list[str] = []
    model = bf16_tower()
    other = {name: value.detach() + 1 for name, value in model.blocks[0].state_dict().items()}
    with Guard(reporters=[lambda report: pending.extend(d.fqn for d in report.pending)]).watch(model):
        model.blocks[0].load_state_dict(other)
        model.head.load_state_dict(model.head.state_dict())
    return pending, stale(fsdp_guard.inspect(model, values=True))


def test_partial_load(ranks: Ranks) -> None:
    by_rank = ranks(run_partial_load)
    for pending, found in by_rank:
        assert pending == found, "the load of the head has nothing to add"
    assert {fqn.rpartition(".")[0] for _, found in by_rank for fqn in found} == {"blocks.0.up", "blocks.0.down"}


def run_distributed_checkpoint_alone(folder: str) -> list[str]:
    """dcp.load writes into the tensors of state_dict(): no load_state_dict, no hook."""
    saved = loaded()
    dcp.save({"model": saved.state_dict()}, checkpoint_id=folder)
    model = sharded_linear(BF16)
    with Guard(reporters=[]).watch(model):
        dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
        return [attempt(loss, model)]


def test_distributed_checkpoint_without_load_state_dict(ranks: Ranks, tmp_path: Any) -> None:
    assert ranks(run_distributed_checkpoint_alone, str(tmp_path)) == [["first_forward"]] * 2


def run_log() -> list[tuple[str, str]]:
    records: list[tuple[str, str]] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append((record.levelname, record.getMessage()))

    handler = Handler()
    logging.getLogger("fsdp_guard").addHandler(handler)
    model = sharded_linear(BF16)
    with Guard(reporters=[], refresh_stale=True).watch(model):
        model.load_state_dict(checkpoint())
        loss(model)
    logging.getLogger("fsdp_guard").removeHandler(handler)
    return records


def test_log_says_pending_and_refreshed(ranks: Ranks) -> None:
    for (first, pending), (second, refreshed) in ranks(run_log):
        assert first == second == "WARNING"
        assert "must still be refreshed before the first forward" in pending
        assert "fsdp_guard.refresh(model)" in " ".join(pending.split())
        assert "were refreshed" in refreshed


def freeze(module: Any) -> None:
    module.net[0].requires_grad_(False)


def start_elsewhere(module: Any) -> None:
    """Differ from what was saved, in what is frozen as well."""
    with torch.no_grad():
        for parameter in module.net.parameters():
            parameter.add_(1)


def freeze_elsewhere(module: Any) -> None:
    freeze(module)
    start_elsewhere(module)


def run_lightning(
    namespace: str, folder: str, call: str, refresh: bool, frozen: bool = True
) -> tuple[Outcome, Outcome]:
    options: dict[str, Any] = {"dtype": BF16, "moves": False, "max_steps": -1}
    hooks = [{"before_sharding": freeze}, {"before_sharding": freeze_elsewhere}]
    if not frozen:
        hooks = [{}, {"before_sharding": start_elsewhere}]
    first = run(namespace, folder, hooks=hooks[0], max_epochs=1, **options)
    events: list[tuple[str, int, int, int]] = []

    def record(report: Report) -> None:
        counts = len(report.divergences), len(report.pending), len(report.refreshed)
        events.append((report.event.value, *counts))

    second = run(
        namespace,
        folder,
        call,
        hooks[1],
        ckpt_path=f"{folder}/saved.ckpt",
        guard_options={"refresh_stale": refresh, "reporters": [record]},
        max_epochs=2,
        **options,
    )
    second.events = events
    return first, second


@pytest.mark.parametrize("call", ["fit", "validate"])
@pytest.mark.parametrize("namespace", NAMESPACES)
def test_lightning_restore(ranks: Ranks, namespace: str, call: str, tmp_path: Any) -> None:
    found, events = set(), set()
    for first, second in ranks(run_lightning, namespace, str(tmp_path), call, False):
        assert first.error == ""
        assert second.report is not None, second.error
        assert {d.kind for d in second.report.divergences} == {Kind.STALE_COMPUTE_WEIGHT}
        assert second.finished_batches == 0
        found |= {d.fqn for d in second.report.divergences}
        events.add(second.report.event.value)
    assert "first_forward" in events
    assert "net.0.weight" in found
    if events == {"first_forward"}:  # else one rank heard of the other's before it came to its own
        assert ("net.2.weight" in found) == (call == "validate"), "a fit refreshes what it trains, see below"


def test_lightning_restore_refreshes_what_the_optimizer_has(ranks: Ranks, tmp_path: Any) -> None:
    """To allocate the state that it fills, torch steps the optimizer, and the runtime refreshes after each step."""
    for _, second in ranks(run_lightning, NAMESPACES[0], str(tmp_path), "fit", False, False):
        assert second.error == ""
        looks = [(event, pending > 0) for event, _, pending, _ in second.events if event in ("load", "first_forward")]
        assert looks == [("load", True), ("first_forward", False)]
        assert second.finished_batches > 0


@pytest.mark.parametrize("call", ["fit", "validate"])
def test_lightning_refreshes_on_request(ranks: Ranks, call: str, tmp_path: Any) -> None:
    for _, second in ranks(run_lightning, NAMESPACES[0], str(tmp_path), call, True):
        assert second.error == ""
        assert sum(divergences for _, divergences, _, _ in second.events) == 0
        assert [event for event, _, _, refreshed in second.events if refreshed] == ["first_forward"]
        assert second.finished_batches > 0


def run_lightning_moving(namespace: str, folder: str, call: str) -> Outcome:
    return run(namespace, folder, call, dtype=BF16, max_steps=-1, max_epochs=1)


def test_lightning_that_moves_the_model_cuts_the_optimizer_off(ranks: Ranks, tmp_path: Any) -> None:
    for outcome in ranks(run_lightning_moving, NAMESPACES[0], str(tmp_path), "fit"):
        assert outcome.report is not None, outcome.error
        assert {d.kind for d in outcome.report.divergences} == {Kind.OPTIMIZER_ORPHAN}
        assert outcome.batches == 0
    for outcome in ranks(run_lightning_moving, NAMESPACES[0], str(tmp_path), "validate"):
        assert outcome.error == ""
