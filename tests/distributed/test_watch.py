"""When the guard looks, and that nothing of it is left afterwards."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import fsdp_guard
import fsdp_guard.holders
from fsdp_guard import DivergenceKind as Kind
from fsdp_guard import Event, Guard, HolderDivergenceError
from fsdp_guard.demo.case import INITIAL
from tests.distributed.ranks import Ranks
from tests.mfsdp import (
    DEVICE,
    MAIN_LAYOUT,
    Tower,
    checkpoint,
    linear,
    loss,
    replace_parameter,
    sgd,
    shard,
    sharded_linear,
    tower,
    train,
)

Seen = list[tuple[str, int, list[str]]]


class Recorder:
    """A reporter that remembers events, counts and FQNs."""

    def __init__(self) -> None:
        self.seen: Seen = []

    def __call__(self, report: fsdp_guard.Report) -> None:
        self.seen.append((report.event.value, report.parameters_checked, [d.fqn for d in report.divergences]))
        dist.barrier()  # else one rank may hear of the other's next look at this one


def raised(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return the event of the HolderDivergenceError that ``function`` raises, or what else happened."""
    try:
        function(*args, **kwargs)
    except HolderDivergenceError as error:
        return error.report.event.value
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.barrier()  # else one rank may hear of the other's next look at this one
    return "nothing"


def assigned(module: nn.Module) -> dict[str, torch.Tensor]:
    """A state dict whose tensors are new objects, as a checkpoint's are."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


needs_assign = pytest.mark.skipif(MAIN_LAYOUT, reason="main refuses assign=True itself")


def run_load() -> list[str]:
    model = sharded_linear()
    with Guard(reporters=[]).watch(model):
        return [
            raised(model.load_state_dict, checkpoint()),
            raised(model.load_state_dict, checkpoint(), assign=True),
        ]


@needs_assign
def test_load_is_looked_at(ranks: Ranks) -> None:
    for events in ranks(run_load):
        assert events == ["nothing", "load"]


def run_loads_of_parts() -> Seen:
    recorder = Recorder()
    model = tower(depth=2)
    loads: list[tuple[nn.Module, bool]] = [
        (model, False),
        (model.blocks[0], False),
        (model.blocks, False),
        (model.head, False),
        (model.blocks[1].up, True),
        (model.blocks[1].down, False),
        (model, False),
    ]
    with Guard(reporters=[recorder], on_divergence="warn").watch(model):
        for module, assign in loads:
            module.load_state_dict(assigned(module), assign=assign)
    return recorder.seen


@needs_assign
def test_each_load_is_looked_at_once_over_the_holders_below_it(ranks: Ranks) -> None:
    replaced = ["blocks.1.up.weight", "blocks.1.up.bias"]
    for seen in ranks(run_loads_of_parts):
        assert seen == [
            ("load", 12, []),
            ("load", 4, []),
            ("load", 8, []),
            ("load", 2, []),
            ("load", 2, replaced),
            ("load", 2, []),
            ("load", 12, replaced),
        ]


def run_work_of_loads() -> tuple[int, int]:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(60))).to(DEVICE)
    shard(model)
    bindings = 0
    bind = fsdp_guard.holders._binding

    def counted(*args: Any) -> Any:
        nonlocal bindings
        bindings += 1
        return bind(*args)

    with Guard(reporters=[]).watch(model):
        fsdp_guard.holders._binding = counted
        for child in model:
            child.load_state_dict(child.state_dict())
        fsdp_guard.holders._binding = bind
    return bindings, len(list(model.parameters()))


def test_loads_of_parts_cost_what_the_parts_cost(ranks: Ranks) -> None:
    for bindings, parameters in ranks(run_work_of_loads):
        assert bindings == parameters == 120


def run_load_through_an_unwatched_wrapper() -> Seen:
    recorder = Recorder()
    model = tower(depth=1)
    with Guard(reporters=[recorder], on_divergence="warn").watch(model):
        wrapper = torch.compile(model, backend="eager")
        wrapper.load_state_dict(assigned(wrapper), assign=True)
        nn.Sequential(nn.Linear(2, 2), model).load_state_dict({}, strict=False)
    return recorder.seen


@needs_assign
def test_load_through_a_wrapper_made_after_watch(ranks: Ranks) -> None:
    for seen in ranks(run_load_through_an_unwatched_wrapper):
        assert [(event, checked, len(fqns)) for event, checked, fqns in seen] == [("load", 8, 8)] * 2


def run_distributed_checkpoint(folder: str) -> Seen:
    recorder = Recorder()
    model = tower(depth=1)
    with Guard(reporters=[recorder]).watch(model):
        state = model.state_dict()
        dcp.save(state, checkpoint_id=folder)
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(model, state, options=StateDictOptions(strict=True))
    return recorder.seen


def test_distributed_checkpoint(ranks: Ranks, tmp_path: Any) -> None:
    for seen in ranks(run_distributed_checkpoint, str(tmp_path)):
        assert seen == [("load", 8, [])]


class Exploding(nn.Linear):
    """Raises in the middle of a load, after the hooks of the modules above it have run."""

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        raise OSError("stale file handle")


def run_loads_that_raise() -> tuple[list[str], Seen]:
    recorder = Recorder()
    model = nn.Sequential(nn.Linear(4, 4, bias=False), Exploding(4, 4, bias=False)).to(DEVICE)
    shard(model)
    outcomes = []
    with Guard(reporters=[recorder]).watch(model):
        good = assigned(model)
        outcomes.append(raised(model.load_state_dict, good))
        model[1].__class__ = nn.Linear
        outcomes.append(raised(model.load_state_dict, {**good, "0.weight": torch.zeros(3, 3)}))
        outcomes.append(raised(model.load_state_dict, {"1.weight": good["1.weight"]}))
        outcomes.append(raised(model.load_state_dict, good))
        outcomes.append(raised(model[0].load_state_dict, {"weight": good["0.weight"]}, assign=True))
    return outcomes, recorder.seen


@needs_assign
def test_load_that_raises_leaves_the_hooks_usable(ranks: Ranks) -> None:
    for (exploded, mismatched, incomplete, fine, caught), seen in ranks(run_loads_that_raise):
        assert exploded == "OSError: stale file handle"
        assert "size mismatch for 0.weight" in mismatched
        assert 'Missing key(s) in state_dict: "0.weight"' in incomplete
        assert (fine, caught) == ("nothing", "load")
        assert seen == [("load", 2, []), ("load", 2, []), ("load", 1, ["0.weight"])]


def run_divergence_and_missing_keys() -> tuple[str, str]:
    model = tower(depth=1)
    state = assigned(model)
    del state["head.bias"]
    try:
        with Guard(reporters=[]).watch(model):
            model.load_state_dict(state, assign=True)
    except HolderDivergenceError as error:
        return str(error), str(error.__cause__)
    return "", ""


@needs_assign
def test_divergence_does_not_hide_missing_keys(ranks: Ranks) -> None:
    for message, cause in ranks(run_divergence_and_missing_keys):
        assert "embed.weight" in message
        assert "head.bias" in cause


def run_first_forward() -> list[str]:
    model = sharded_linear()
    outcomes = []
    with Guard(reporters=[]).watch(model):
        model.weight = nn.Parameter(checkpoint()["weight"])
        outcomes.append(raised(loss, model))
        outcomes.append(raised(loss, model))  # the gate is gone, and the forward has put the holder back
    with Guard(reporters=[]).watch(model):
        outcomes.append(raised(loss, model))
    return outcomes


def test_first_forward_is_looked_at_before_the_runtime_hides_the_evidence(ranks: Ranks) -> None:
    for events in ranks(run_first_forward):
        assert events == ["first_forward", "nothing", "nothing"]


def run_inner_unit_first() -> list[str]:
    model = tower(depth=2)
    with Guard(reporters=[]).watch(model):
        replace_parameter(model.blocks[1].up)
        return [raised(model.blocks[0], torch.ones(1, 4, device=DEVICE))]


def test_forward_of_an_inner_unit_opens_the_gate_too(ranks: Ranks) -> None:
    for events in ranks(run_inner_unit_first):
        assert events == ["first_forward"]


def run_several_outermost_units() -> Seen:
    recorder = Recorder()
    model = nn.Sequential(sharded_linear(), nn.ReLU(), sharded_linear())
    with Guard(reporters=[recorder]).watch(model):
        loss(model)
        loss(model)
    return recorder.seen


def test_each_outermost_unit_has_its_own_gate(ranks: Ranks) -> None:
    for seen in ranks(run_several_outermost_units):
        assert seen == [("first_forward", 1, []), ("first_forward", 1, [])]


def run_first_step() -> tuple[list[str], bool]:
    model = linear()
    optimizer = sgd(model)
    shard(model)
    outcomes = []
    with Guard(reporters=[]).watch(model, optimizer):
        loss(model).backward()
        outcomes.append(raised(optimizer.step))
        outcomes.append(raised(optimizer.step))
    kept = torch.equal(model.weight._local_tensor.cpu(), INITIAL.chunk(2)[dist.get_rank()])
    return outcomes, kept


def test_first_step_is_looked_at(ranks: Ranks) -> None:
    for events, kept in ranks(run_first_step):
        assert events == ["first_step", "nothing"]
        assert kept


class AroundAnOptimizer:
    """What Megatron-LM and Accelerate hand out: not a torch optimizer, but one inside."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()


def run_first_step_of_a_wrapper() -> tuple[list[str], Seen]:
    recorder = Recorder()
    model = linear()
    optimizer = AroundAnOptimizer(sgd(model))
    shard(model)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with Guard(reporters=[recorder]).watch(model, optimizer):
        outcomes = [raised(other.step), raised(optimizer.step), raised(optimizer.step)]
    return outcomes, recorder.seen


def test_first_step_of_an_optimizer_around_another(ranks: Ranks) -> None:
    for events, seen in ranks(run_first_step_of_a_wrapper):
        assert events == ["nothing", "first_step", "nothing"]
        assert [event for event, _, _ in seen] == ["first_step"]


def hooks(model: nn.Module, optimizer: Any) -> tuple[int, int, int]:
    modules = list(model.modules())
    return (
        sum(len(module._forward_pre_hooks) for module in modules),
        len(optimizer._optimizer_step_pre_hooks),
        sum(len(m._load_state_dict_pre_hooks) + len(m._load_state_dict_post_hooks) for m in modules),
    )


def run_hooks_come_and_go() -> tuple[list[tuple[int, int, int]], list[str]]:
    recorder = Recorder()
    model = tower(depth=2)
    optimizer = sgd(model)
    counts = [hooks(model, optimizer)]

    def step() -> None:
        model(torch.ones(2, 4, device=DEVICE)).sum().backward()
        optimizer.step()
        counts.append(hooks(model, optimizer))

    guard = Guard(reporters=[recorder]).watch(model, optimizer)
    counts.append(hooks(model, optimizer))
    step()
    step()
    model.head.load_state_dict(model.head.state_dict())
    counts.append(hooks(model, optimizer))
    step()
    model.load_state_dict(model.state_dict())
    model.load_state_dict(model.state_dict())
    counts.append(hooks(model, optimizer))
    guard.unwatch()
    counts.append(hooks(model, optimizer))
    guard.unwatch()
    return counts, [event for event, _, _ in recorder.seen]


def test_gates_are_gone_after_the_first_step_and_back_after_a_load(ranks: Ranks) -> None:
    for counts, events in ranks(run_hooks_come_and_go):
        before, watched, after_step, after_second, loaded, after_third, loaded_twice, unwatched = counts
        units = 3
        assert (watched[0] - before[0], watched[1] - before[1]) == (units, 1)
        assert after_step[:2] == after_second[:2] == after_third[:2] == before[:2]
        assert loaded[:2] == loaded_twice[:2] == watched[:2]
        assert unwatched == before
        assert events == ["first_forward", "first_step", "load", "first_forward", "first_step", "load", "load"]


def run_unwatch_before_anything() -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    model = tower(depth=1)
    optimizer = sgd(model)
    before = hooks(model, optimizer)
    with Guard(reporters=[]).watch(model, optimizer):
        pass
    return before, hooks(model, optimizer)


def test_unwatch_takes_every_hook_away(ranks: Ranks) -> None:
    for before, after in ranks(run_unwatch_before_anything):
        assert before == after


def run_deleted_optimizer() -> bool:
    guard = Guard(reporters=[])
    model = tower(depth=1)
    optimizer = sgd(model)
    guard.watch(model, optimizer)
    ref = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    return ref() is None and raised(loss, sharded_linear()) == raised(model, torch.ones(1, 4, device=DEVICE))


def test_watching_does_not_keep_the_optimizer_alive(ranks: Ranks) -> None:
    # For the model see test_layouts.py: the released versions keep it alive themselves.
    assert ranks(run_deleted_optimizer) == [True, True]


def run_copies() -> tuple[list[str], int]:
    """A copy of a watched model, here a plain one around a unit, is not watched, and pickles."""
    model = sharded_linear()
    holder = nn.Sequential(nn.Linear(2, 2), model)
    guard = Guard(reporters=[]).watch(holder)
    plain = holder[0]
    twin = copy.deepcopy(plain)
    buffer = io.BytesIO()
    torch.save(plain, buffer)
    buffer.seek(0)
    again = torch.load(buffer, weights_only=False)
    outcomes = [raised(module.load_state_dict, plain.state_dict(), assign=True) for module in (plain, twin, again)]
    guard.unwatch()
    return outcomes, buffer.getvalue().count(b"fsdp_guard")


def test_copies_of_a_watched_module_are_plain(ranks: Ranks) -> None:
    for outcomes, mentions in ranks(run_copies):
        assert outcomes == ["nothing"] * 3
        assert mentions == 0, "unpickling must not need fsdp_guard"


def run_other_reactions() -> tuple[list[str], int, list[float]]:
    taken: list[fsdp_guard.Report] = []
    model = sharded_linear()
    model.weight = nn.Parameter(checkpoint()["weight"])
    outcomes = [
        raised(Guard(reporters=[], on_divergence="warn").check, model),
        raised(Guard(reporters=[], on_divergence=taken.append).check, model),
        raised(Guard(reporters=[]).check, model, event="save"),
    ]
    with Guard(reporters=[], on_divergence="warn").watch(model):
        return outcomes, len(taken), train(model, sgd(model), 2)


def test_reactions_to_a_divergence(ranks: Ranks) -> None:
    for outcomes, taken, losses in ranks(run_other_reactions):
        assert outcomes == ["nothing", "nothing", "save"]
        assert taken == 1
        assert losses == [0.390625] * 2


def run_two_guards() -> list[str]:
    first, second = Guard(reporters=[]), Guard(reporters=[])
    model = sharded_linear()
    outcomes = []
    with first.watch(model), second.watch(model):
        try:
            first.watch(model)
        except RuntimeError as error:
            outcomes.append(str(error))
        outcomes.append(raised(model.load_state_dict, checkpoint()))
    return outcomes


def test_watching_twice(ranks: Ranks) -> None:
    for twice, with_two_guards in ranks(run_two_guards):
        assert "unwatch" in twice
        assert with_two_guards == "nothing"


def run_compiled_part() -> tuple[list[str], list[str]]:
    """The gate is opened from code that Dynamo traces."""
    recorder = Recorder()
    model = Tower([nn.Linear(4, 4)]).to(DEVICE)
    shard(model)
    forward = torch.compile(model.forward, backend="eager")
    with Guard(reporters=[recorder]).watch(model):
        model.forward = forward
        model(torch.ones(2, 4, device=DEVICE))
        model(torch.ones(2, 4, device=DEVICE))
        clean = [event for event, _, _ in recorder.seen]
    with Guard(reporters=[]).watch(model):
        replace_parameter(model.head)
        return clean, [raised(model, torch.ones(2, 4, device=DEVICE))]


def test_compiled_forward(ranks: Ranks) -> None:
    for clean, diverged in ranks(run_compiled_part):
        assert clean == ["first_forward"]
        assert diverged == ["first_forward"]


def test_events_are_a_public_contract() -> None:
    assert [event.value for event in Event] == ["load", "first_forward", "first_step", "save", "call"]
    assert {kind.value for kind in Kind} == {
        "replaced_parameter",
        "detached_storage",
        "stale_compute_weight",
        "mixed_phase",
        "broken_tie",
        "missing_parameter",
        "unmanaged_parameter",
        "optimizer_orphan",
        "optimizer_missing",
    }
