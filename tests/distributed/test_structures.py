"""Every shape of model that the runtime accepts is read whole, and a divergence in a part of it has the right name."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrize

import fsdp_guard
from fsdp_guard import DivergenceKind as Kind
from tests.distributed.ranks import Ranks
from tests.mfsdp import DEVICE, MAIN_LAYOUT, Block, Tower, found_in, replace_parameter, shard, sharded_linear, tower

Named = dict[str, tuple[list[tuple[Kind, str]], int]]


def named(report: fsdp_guard.Report) -> tuple[list[tuple[Kind, str]], int]:
    return found_in(report), report.parameters_checked


def run_nested_units() -> Named:
    model = tower(depth=2)
    clean = fsdp_guard.inspect(model)
    replace_parameter(model.blocks[1].down, "bias")
    replace_parameter(model.head)
    return {
        "clean": named(clean),
        "whole": named(fsdp_guard.inspect(model)),
        "part": named(fsdp_guard.inspect(model.blocks[1])),
    }


def test_nested_units(ranks: Ranks) -> None:
    for found in ranks(run_nested_units):
        assert found["clean"] == ([], 12)
        assert sorted(found["whole"][0]) == [
            (Kind.REPLACED_PARAMETER, "blocks.1.down.bias"),
            (Kind.REPLACED_PARAMETER, "head.weight"),
        ]
        assert found["whole"][1] == 12
        assert found["part"] == ([(Kind.REPLACED_PARAMETER, "down.bias")], 4)


def run_several_groups() -> tuple[int, Named]:
    model = Tower([Block()]).to(DEVICE)
    model.blocks[0].to(torch.bfloat16)
    model.embed.requires_grad_(False)
    shard(model)
    clean = fsdp_guard.inspect(model)
    replace_parameter(model.blocks[0].up)
    frozen = nn.Parameter(model.embed.weight.detach().clone(), requires_grad=False)
    model.embed.weight = frozen
    return len(model.parameter_groups), {"clean": named(clean), "replaced": named(fsdp_guard.inspect(model))}


def test_several_groups_in_one_unit(ranks: Ranks) -> None:
    for groups, found in ranks(run_several_groups):
        assert groups == 3, "one group for each dtype, one for frozen parameters"
        assert found["clean"] == ([], 8)
        assert sorted(found["replaced"][0]) == [
            (Kind.REPLACED_PARAMETER, "blocks.0.up.weight"),
            (Kind.REPLACED_PARAMETER, "embed.weight"),
        ]


def wrapped_by_compile(model: Tower) -> nn.Module:
    return torch.compile(model, backend="eager")


def blocks_wrapped_by_compile(model: Tower) -> nn.Module:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="eager")
    return model


def blocks_wrapped_by_recomputation(model: Tower) -> nn.Module:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    return model


def wrapped_twice(model: Tower) -> nn.Module:
    return torch.compile(blocks_wrapped_by_recomputation(model), backend="eager")


WRAPPERS = [wrapped_by_compile, blocks_wrapped_by_compile, blocks_wrapped_by_recomputation, wrapped_twice]


def run_wrapped(wrap: Callable[[Tower], nn.Module], when: str) -> Named:
    model = Tower([Block(), Block()]).to(DEVICE)
    bare = list(model.blocks)
    if when == "before the root":
        shard(*bare)
        wrapper = wrap(model)
        shard(model)
    else:
        shard(*bare, model)
        wrapper = wrap(model)
    clean = fsdp_guard.inspect(wrapper)
    replace_parameter(bare[1].down)
    return {"clean": named(clean), "replaced": named(fsdp_guard.inspect(wrapper))}


@pytest.mark.parametrize("when", ["before the root", "after the root"])
@pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda wrap: wrap.__name__)
def test_wrappers_around_units(ranks: Ranks, wrap: Callable[[Tower], nn.Module], when: str) -> None:
    if MAIN_LAYOUT and when == "before the root":
        pytest.skip("main shards all units in one context")
    for found in ranks(run_wrapped, wrap, when):
        assert found["clean"] == ([], 12)
        assert found["replaced"] == ([(Kind.REPLACED_PARAMETER, "blocks.1.down.weight")], 12)


def run_wrapped_inside_a_unit(what: str, when: str) -> tuple[Named, str]:
    model = Tower([Block()]).to(DEVICE)

    def wrap() -> None:
        if what == "leaf":
            model.blocks[0].up = checkpoint_wrapper(model.blocks[0].up)
        else:
            model.blocks[0] = checkpoint_wrapper(model.blocks[0])

    if when == "before":
        wrap()
    shard(model)
    if when == "after":
        wrap()
    found = {"found": named(fsdp_guard.inspect(model))}
    try:
        model(torch.ones(3, 4, device=DEVICE)).sum().backward()
    except RuntimeError as error:
        return found, str(error)
    return found, ""


@pytest.mark.parametrize(("what", "when"), [("leaf", "before"), ("block", "before"), ("block", "after")])
def test_wrappers_inside_a_unit(ranks: Ranks, what: str, when: str) -> None:
    for found, error in ranks(run_wrapped_inside_a_unit, what, when):
        assert error == ""
        assert found["found"] == ([], 8)


def test_leaf_wrapped_after_the_unit_breaks_the_runtime_and_is_caught(ranks: Ranks) -> None:
    # The runtime installs unsharded parameters on the wrapper, where forward does not look.
    for found, error in ranks(run_wrapped_inside_a_unit, "leaf", "after"):
        assert "mixed torch.Tensor and DTensor" in error, "the runtime no longer breaks here: measure again"
        assert found["found"][0] == [
            (Kind.MISSING_PARAMETER, "blocks.0.up.weight"),
            (Kind.MISSING_PARAMETER, "blocks.0.up.bias"),
        ]


def run_chunks() -> Named:
    chunks = [sharded_linear(), sharded_linear()]
    clean = fsdp_guard.inspect(chunks)
    replace_parameter(chunks[1])
    return {"clean": named(clean), "replaced": named(fsdp_guard.inspect(tuple(chunks)))}


def test_model_chunks(ranks: Ranks) -> None:
    for found in ranks(run_chunks):
        assert found["clean"] == ([], 2)
        assert found["replaced"] == ([(Kind.REPLACED_PARAMETER, "1.weight")], 2)


def run_mixed_phase() -> Named:
    model = tower(depth=1)
    (group,) = model.blocks[0].parameter_groups
    group.unshard_parameters()
    whole = fsdp_guard.inspect(model)
    shown = dict(model.blocks[0].down.named_parameters())
    group.reshard_parameters()
    model.blocks[0].down.weight = shown["weight"]
    mixed = fsdp_guard.inspect(model)
    return {"whole group unsharded": named(whole), "one of four": named(mixed)}


def test_mixed_phase(ranks: Ranks) -> None:
    for found in ranks(run_mixed_phase):
        assert found["whole group unsharded"] == ([], 8)
        assert found["one of four"][0] == [(Kind.MIXED_PHASE, "blocks.0.down.weight")]


def deleted_submodule(model: Tower) -> None:
    del model.blocks[0].down


def submodule_without_bias(model: Tower) -> None:
    model.blocks[0].down = nn.Linear(8, 4, bias=False)


def parametrized(model: Tower) -> None:
    parametrize.register_parametrization(model.blocks[0].down, "weight", nn.Identity())


def lora(model: Tower) -> None:
    model.blocks[0].lora_a = nn.Linear(4, 2, bias=False)


def frozen_addition(model: Tower) -> None:
    model.blocks[0].scale = nn.Parameter(torch.ones(1), requires_grad=False)


def retied(model: Tower) -> None:
    model.blocks[0].extra = nn.Linear(4, 8, bias=False)
    model.blocks[0].extra.weight = model.blocks[0].up.weight


CHANGES: dict[Callable[[Tower], None], list[tuple[Kind, str]]] = {
    deleted_submodule: [
        (Kind.MISSING_PARAMETER, "blocks.0.down.weight"),
        (Kind.MISSING_PARAMETER, "blocks.0.down.bias"),
    ],
    submodule_without_bias: [
        (Kind.REPLACED_PARAMETER, "blocks.0.down.weight"),
        (Kind.MISSING_PARAMETER, "blocks.0.down.bias"),
    ],
    parametrized: [(Kind.MISSING_PARAMETER, "blocks.0.down.weight")],
    lora: [(Kind.UNMANAGED_PARAMETER, "blocks.0.lora_a.weight")],
    frozen_addition: [],
    retied: [(Kind.BROKEN_TIE, "blocks.0.extra.weight")],
}


def run_changed(change: Callable[[Tower], None]) -> Named:
    model = tower(depth=1)
    change(model)
    return {"changed": named(fsdp_guard.inspect(model))}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_module_changed_after_wrap(ranks: Ranks, change: Callable[[Tower], None]) -> None:
    for found in ranks(run_changed, change):
        assert found["changed"][0] == CHANGES[change]


def run_load_after_deletion() -> list[tuple[str, list[str]]]:
    seen: list[tuple[str, list[str]]] = []
    model = tower(depth=1)
    guard = fsdp_guard.Guard(
        reporters=[lambda report: seen.append((report.event.value, [d.fqn for d in report.divergences]))],
        on_divergence="warn",
    )
    with guard.watch(model):
        state = model.state_dict()
        del model.blocks[0].down
        model.load_state_dict(state, strict=False)
    return seen


def test_load_of_the_whole_model_looks_at_it_as_it_is_now(ranks: Ranks) -> None:
    for seen in ranks(run_load_after_deletion):
        assert seen == [("load", ["blocks.0.down.weight", "blocks.0.down.bias"])]


def run_tied_across_the_border() -> Named:
    """A head outside the unit is tied to the embedding inside it: the wrap takes the embedding away from it."""
    embed, head = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    head.weight = embed.weight
    model = nn.Sequential(embed, head).to(DEVICE)
    shard(model[0])
    return {"tied": named(fsdp_guard.inspect(model))}


def test_tie_that_the_runtime_sees_one_end_of(ranks: Ranks) -> None:
    for found in ranks(run_tied_across_the_border):
        assert found["tied"] == ([(Kind.BROKEN_TIE, "1.weight")], 1)


class Shared(nn.Module):
    """One module under two names: one parameter, one place that shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.again = self.first


def run_shared_module() -> Named:
    model = Shared().to(DEVICE)
    shard(model)
    clean = fsdp_guard.inspect(model)
    replace_parameter(model.again)
    return {"clean": named(clean), "replaced": named(fsdp_guard.inspect(model))}


def test_module_under_two_names(ranks: Ranks) -> None:
    for found in ranks(run_shared_module):
        assert found["clean"] == ([], 1)
        assert found["replaced"][0] == [(Kind.REPLACED_PARAMETER, "first.weight")]


def run_import_path_of_megatron_core() -> tuple[str, Named]:
    """The real package under its second import path, as megatron-core vendors it."""
    import megatron_fsdp

    path = "megatron.core.distributed.fsdp.src.megatron_fsdp"
    init = Path(megatron_fsdp.__file__)
    spec = importlib.util.spec_from_file_location(path, init, submodule_search_locations=[str(init.parent)])
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[path] = package
    spec.loader.exec_module(package)
    experimental = importlib.import_module(f"{path}.experimental")
    model = nn.Linear(4, 4, bias=False, device=DEVICE)
    shard(model, package=experimental)
    clean = fsdp_guard.inspect(model)
    replace_parameter(model)
    unit_class = next(cls for cls in type(model).__mro__ if cls.__name__ == "FsdpModule")
    return unit_class.__module__, {"clean": named(clean), "replaced": named(fsdp_guard.inspect(model))}


def test_import_path_of_megatron_core(ranks: Ranks) -> None:
    for module, found in ranks(run_import_path_of_megatron_core):
        assert module == "megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.module"
        assert found["clean"] == ([], 1)
        assert found["replaced"] == ([(Kind.REPLACED_PARAMETER, "weight")], 1)


def run_plain_model() -> fsdp_guard.Report:
    return fsdp_guard.inspect(nn.Linear(4, 4))


def test_model_without_a_runtime_is_not_ok(ranks: Ranks) -> None:
    for report in ranks(run_plain_model):
        assert not report.ok
        assert (report.parameters_checked, report.divergences) == (0, ())
        assert "nothing was checked" in str(report)


def run_rank() -> int:
    return fsdp_guard.inspect(sharded_linear()).rank


def test_report_names_the_rank(ranks: Ranks) -> None:
    assert ranks(run_rank) == [0, 1]
