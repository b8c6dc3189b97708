"""Layouts of Megatron-FSDP V2 that no released package has: main's, and those that nobody knows yet."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_guard
from fsdp_guard import DivergenceKind as Kind
from fsdp_guard import Guard, HolderDivergenceError, UnsupportedLayoutError
from tests import main_layout
from tests.mfsdp import MAIN_LAYOUT, found_in


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(inputs)))


def tied_unit(dtype: torch.dtype = torch.float32) -> Any:
    return main_layout.fully_shard(Tied().to(dtype))


def test_tie_is_one_holder_with_two_bindings() -> None:
    report = fsdp_guard.inspect(tied_unit())
    assert report.ok, str(report)
    assert report.parameters_checked == 4


def test_half_of_a_tie_replaced() -> None:
    model = tied_unit()
    model.head.weight = nn.Parameter(torch.zeros(4, 4))
    assert found_in(fsdp_guard.inspect(model)) == [(Kind.BROKEN_TIE, "head.weight")]


def test_half_of_a_tie_unsharded() -> None:
    model = tied_unit()
    model.head.weight = model.parameter_groups[0].fsdp_parameters[0].unsharded
    assert found_in(fsdp_guard.inspect(model)) == [(Kind.MIXED_PHASE, "head.weight")]


def test_nested_units_and_optimizer() -> None:
    model = nn.Sequential(tied_unit(), nn.Linear(4, 4))
    main_layout.fully_shard(model)
    report = fsdp_guard.inspect(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert report.ok, str(report)
    assert report.parameters_checked == 6


def test_unsharded_parameters_may_lie_in_either_buffer() -> None:
    """ZeRO-1 on main: where the compute weights are replicated already, forward reads them where they are."""
    model = tied_unit(torch.bfloat16)
    group = model.parameter_groups[0]
    for index, parameter in enumerate(group.fsdp_parameters):
        parameter.unsharded.data = group.model_weight.get_local_tensor(index)
        group._show(parameter, parameter.unsharded)
    assert fsdp_guard.inspect(model).ok
    group.fsdp_parameters[1].unsharded.data = torch.zeros(4, 4, dtype=torch.bfloat16)
    assert found_in(fsdp_guard.inspect(model)) == [(Kind.DETACHED_STORAGE, "body.weight")]


def stale_unit() -> Any:
    model = tied_unit(torch.bfloat16)
    with torch.no_grad():
        model.body.weight.add_(1)
    return model


def test_refresh_puts_a_new_buffer_in_place() -> None:
    model = stale_unit()
    assert found_in(fsdp_guard.inspect(model, values=True)) == [(Kind.STALE_COMPUTE_WEIGHT, "body.weight")]
    assert fsdp_guard.refresh(model) == ["body.weight"]
    assert fsdp_guard.inspect(model, values=True).ok
    assert fsdp_guard.refresh(model) == []


def test_guard_refreshes_on_request() -> None:
    report = Guard(reporters=[], refresh_stale=True).check(stale_unit(), values=True)
    assert report.ok
    assert [d.fqn for d in report.refreshed] == ["body.weight"]


def test_guard_says_what_a_refresh_left_stale() -> None:
    model = stale_unit()
    model.parameter_groups[0].sync_model_weight_from_main_weight = lambda: None
    with pytest.raises(HolderDivergenceError) as raised:
        Guard(reporters=[], refresh_stale=True).check(model, values=True)
    assert found_in(raised.value.report) == [(Kind.STALE_COMPUTE_WEIGHT, "body.weight")]


@pytest.mark.parametrize("call", [lambda model: model.half(), lambda model: model.to("meta")], ids=["half", "meta"])
def test_converted(call: Any) -> None:
    model = tied_unit()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        call(model)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert {kind for kind, _ in found_in(fsdp_guard.inspect(model))} >= {Kind.DETACHED_STORAGE}


def test_load_that_the_runtime_refuses_leaves_the_watch_usable() -> None:
    model = tied_unit()
    events: list[str] = []
    with Guard(reporters=[lambda report: events.append(report.event.value)]).watch(model):
        with pytest.raises(RuntimeError, match="assign=True"):
            model.load_state_dict(model.state_dict(), assign=True)
        model.load_state_dict(model.state_dict())
        model.body.bias = nn.Parameter(torch.zeros(4))
        with pytest.raises(HolderDivergenceError):
            model(torch.zeros(1, 4))
    assert events == ["load", "first_forward"]


def test_watching_keeps_nothing_alive() -> None:
    # Not with a released version: those keep their own modules alive, guarded or not.
    guard = Guard(reporters=[])
    model = tied_unit()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard.watch(model, optimizer)
    model.load_state_dict(model.state_dict())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    model.load_state_dict(model.state_dict())
    refs = [weakref.ref(thing) for thing in (model, optimizer, model.body.weight, model.parameter_groups[0])]
    del model, optimizer
    assert [ref() for ref in refs] == [None] * 4, "something outlived its last reference"
    guard.watch(tied_unit())  # no error: what it watched before is gone


def test_deep_copy_is_cut_off_from_its_own_buffers() -> None:
    # torch copies each Parameter into a storage of its own, so the copy's buffers are nobody's: a true divergence.
    model = tied_unit()
    assert {kind for kind, _ in found_in(fsdp_guard.inspect(copy.deepcopy(model)))} == {Kind.DETACHED_STORAGE}
    assert fsdp_guard.inspect(model).ok


def test_gate_in_a_compiled_model() -> None:
    """Dynamo traces the hooks of what it compiles; the gate's it must run as they are."""
    events: list[tuple[str, bool]] = []
    model = tied_unit()
    guard = Guard(reporters=[lambda report: events.append((report.event.value, report.ok))], on_divergence="warn")
    with guard.watch(model):
        compiled = torch.compile(model, backend="eager")
        for _ in range(3):
            compiled(torch.zeros(1, 4))
        assert events == [("first_forward", True)]
        model.load_state_dict(model.state_dict())
        model.body.bias = nn.Parameter(torch.zeros(4))
        compiled(torch.zeros(1, 4))
    assert events[1:] == [("load", True), ("first_forward", False)]


def without(*attributes: str) -> Any:
    """A unit whose group lacks what the reader looks for, as a later version might."""
    model = tied_unit()
    group = model.parameter_groups[0]
    for attribute in attributes:
        delattr(group, attribute)
    return model


class FsdpModule:
    """A later version that keeps its groups elsewhere."""


FsdpModule.__module__ = "megatron_fsdp.experimental.module"


def relocated() -> nn.Module:
    model = nn.Linear(4, 4)
    model.__class__ = type("ExperimentalFsdpLinear", (FsdpModule, nn.Linear), {})
    return model


def renamed_parameters() -> Any:
    class Renamed:
        names = ("weight",)

    model = tied_unit()
    model.parameter_groups[0].fsdp_parameters = (Renamed(),)
    return model


@pytest.mark.parametrize(
    ("make", "attribute"),
    [
        (lambda: without("fsdp_parameters"), "sharded_parameters"),
        (lambda: without("main_weight"), "main_weight"),
        (lambda: without("_unsharded_model_weight"), "_unsharded_model_weight"),
        (relocated, "parameter_groups"),
        (renamed_parameters, "fqns"),
    ],
)
def test_unknown_layout_is_a_clear_error_and_never_clean(make: Any, attribute: str) -> None:
    model = make()
    for look in (fsdp_guard.inspect, Guard(reporters=[], on_divergence="warn").check, Guard(reporters=[]).watch):
        with pytest.raises(UnsupportedLayoutError) as caught:
            look(model)
        assert caught.value.attribute == attribute
        assert repr(attribute) in str(caught.value)
        assert "megatron-fsdp 0.6" in caught.value.version
        assert caught.value.cls in str(caught.value)


def test_a_class_of_the_users_that_shares_the_name_is_not_a_unit() -> None:
    class FsdpModule(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))

    report = fsdp_guard.inspect(FsdpModule())
    assert (report.parameters_checked, report.parameters_unclaimed) == (0, 1)


@pytest.mark.skipif(not MAIN_LAYOUT, reason="the installed megatron-fsdp has the released layout")
def test_stand_in_has_the_attributes_of_the_real_one() -> None:
    import inspect

    from megatron_fsdp.experimental import module, parameter_group

    source = inspect.getsource(parameter_group.FsdpParameterGroup)
    stand_in = tied_unit().parameter_groups[0]
    for attribute in vars(stand_in):
        assert f"self.{attribute} =" in source or f"self.{attribute}:" in source, attribute
    real = set(parameter_group.FsdpParameter.__dataclass_fields__)
    assert real == set(main_layout.FsdpParameter.__dataclass_fields__)
    assert isinstance(vars(module.FsdpModule)["parameter_groups"], property)
