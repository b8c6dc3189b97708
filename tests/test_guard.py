"""The parts of the product that need no process group: messages, bad input, reporters, imports."""

from __future__ import annotations

import gc
import json
import logging
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_guard
from fsdp_guard import (
    Divergence,
    DivergenceKind,
    Event,
    Guard,
    HolderDivergenceError,
    NoHoldersError,
    Report,
    UnsupportedLayoutError,
)
from tests.main_layout import fully_shard


def sharded() -> nn.Module:
    return fully_shard(nn.Linear(4, 4))


def diverged() -> nn.Module:
    model = sharded()
    model.weight = nn.Parameter(torch.full((4, 4), 0.123456789))
    return model


def divergence(kind: DivergenceKind, fqn: str) -> Divergence:
    return Divergence(kind, fqn, "mfsdp_v2", f"what was seen of {fqn}", f"what to do about {kind}", rank=3)


def test_message_names_count_parameters_cause_and_remedy() -> None:
    replaced = [divergence(DivergenceKind.REPLACED_PARAMETER, f"layers.{i}.weight") for i in range(5)]
    orphan = divergence(DivergenceKind.OPTIMIZER_ORPHAN, "head.weight")
    message = str(Report((*replaced, orphan), 12, 0, ("mfsdp_v2",), Event.LOAD, 3))
    lines = message.splitlines()
    assert lines[0] == (
        "fsdp_guard: 6 holder divergences at event 'load' on rank 3 (12 parameters checked, runtime mfsdp_v2)."
    )
    assert "replaced_parameter (5 parameters)" in lines
    assert "  layers.2.weight" in lines
    assert "  layers.3.weight" not in lines
    assert "  ... and 2 more" in lines
    assert "optimizer_orphan (1 parameter)" in lines
    assert "    what was seen of head.weight" in lines
    flat = " ".join(message.split())
    assert "Cause: The module shows a parameter that the runtime does not hold" in flat
    assert message.count("Do this: what to do about replaced_parameter") == 1
    assert max(map(len, lines)) <= 110


@pytest.mark.parametrize("kind", DivergenceKind)
def test_every_kind_has_a_cause(kind: DivergenceKind) -> None:
    assert kind.cause.endswith(".")
    assert str(kind) == kind.value == f"{kind}"


def test_report_is_plain_data() -> None:
    report = fsdp_guard.inspect(diverged())
    data = json.loads(json.dumps(report.to_dict()))
    assert data["ok"] is False
    assert (data["event"], data["runtimes"], data["parameters_checked"]) == ("call", ["mfsdp_v2"], 2)
    (found,) = data["divergences"]
    assert set(found) == {"kind", "fqn", "runtime", "detail", "remedy", "rank"}
    assert (found["kind"], found["fqn"]) == ("replaced_parameter", "weight")
    assert "Parameter float32 (4,4) 0x" in found["detail"]
    assert data["elapsed_s"] > 0


def test_report_carries_no_weights() -> None:
    report = fsdp_guard.inspect(diverged())
    for text in (str(report), json.dumps(report.to_dict())):
        assert "0.123" not in text


def test_ok_means_that_something_was_compared() -> None:
    assert fsdp_guard.inspect(sharded()).ok
    assert not fsdp_guard.inspect(diverged()).ok
    assert not fsdp_guard.inspect(nn.Linear(4, 4)).ok


def test_errors_can_be_pickled() -> None:
    report = fsdp_guard.inspect(diverged())
    for error in (HolderDivergenceError(report), NoHoldersError(report), UnsupportedLayoutError("a.B", "c 1", "d")):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert str(again) == str(error)


OPTIMIZER = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.mark.parametrize(
    ("model", "optimizers", "error", "message"),
    [
        (None, None, TypeError, "got NoneType"),
        ("model", None, TypeError, "got str"),
        ([], None, ValueError, "empty"),
        ([nn.Linear(1, 1), 3], None, TypeError, r"model\[1\] must be a torch.nn.Module, got int"),
        (nn.Linear(1, 1), 3, TypeError, "param_groups.*got int"),
        (nn.Linear(1, 1), [OPTIMIZER, "adam"], TypeError, r"optimizers\[1\].*got str"),
        (nn.Linear(1, 1), {"a": OPTIMIZER}, TypeError, "got dict"),
    ],
)
def test_bad_input(model: Any, optimizers: Any, error: type[Exception], message: str) -> None:
    for look in (fsdp_guard.inspect, Guard().check, Guard().watch):
        with pytest.raises(error, match=message):
            look(model, optimizers)


def test_bad_options() -> None:
    with pytest.raises(ValueError, match=r"on_divergence.*'explode'"):
        Guard(on_divergence="explode")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"reporter.*int"):
        Guard(reporters=[3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="'lunch' is not a valid Event"):
        Guard().check(sharded(), event="lunch")


def test_unwatch_without_watch_is_a_no_op() -> None:
    guard = Guard()
    guard.unwatch()
    with guard:
        pass


def test_nothing_found_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard()
    model = nn.Linear(4, 4)
    with caplog.at_level(logging.WARNING, "fsdp_guard"), guard.watch(model):
        guard.check(model)
        model.load_state_dict(model.state_dict())
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "nothing was checked" in record.message


def test_require_holders() -> None:
    guard = Guard(require_holders=True)
    model = nn.Linear(4, 4)
    for look in (guard.check, guard.watch):
        with pytest.raises(NoHoldersError, match="nothing was checked"):
            look(model)
    assert not model._load_state_dict_post_hooks, "hooks are left behind"
    assert guard.check(sharded()).ok


def test_log_gets_one_record_a_look(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard(on_divergence="warn")
    with caplog.at_level(logging.INFO, "fsdp_guard"):
        reports = [guard.check(sharded()), guard.check(diverged())]
    assert [record.levelname for record in caplog.records] == ["INFO", "ERROR"]
    for record, report in zip(caplog.records, reports, strict=True):
        assert record.name == "fsdp_guard"
        assert record.__dict__["fsdp_guard"] == report.to_dict()
        assert record.getMessage() == str(report)


def test_reporter_that_fails_is_logged_and_hides_nothing(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Report] = []

    def broken(report: Report) -> None:
        raise ConnectionError("no network")

    with pytest.raises(HolderDivergenceError):
        Guard(reporters=[broken, seen.append]).check(diverged())
    assert len(seen) == 1, "the reporters after the broken one were not called"
    assert "no network" in caplog.text


def test_parameter_without_a_shape_yet() -> None:
    model: Any = sharded()
    model.lazy = nn.LazyLinear(3)
    (_bias, weight) = sorted(fsdp_guard.inspect(model).divergences, key=lambda d: d.fqn)
    assert (weight.kind, weight.fqn) == (DivergenceKind.UNMANAGED_PARAMETER, "lazy.weight")
    assert "uninitialized" in weight.detail


def test_optimizer_state_keyed_by_the_old_parameters() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    fully_shard(model)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    kinds = {(d.kind, d.fqn) for d in fsdp_guard.inspect(model, optimizer).divergences}
    assert kinds == {(DivergenceKind.OPTIMIZER_ORPHAN, "weight"), (DivergenceKind.OPTIMIZER_ORPHAN, "bias")}


def test_optimizer_of_a_part() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)  # type: ignore[index]
    missing = fsdp_guard.inspect(model, optimizer).divergences
    assert {(d.kind, d.fqn) for d in missing} == {
        (DivergenceKind.OPTIMIZER_MISSING, "1.weight"),
        (DivergenceKind.OPTIMIZER_MISSING, "1.bias"),
    }
    assert "2 of 4 are left out" in missing[0].detail
    assert "requires_grad_(False)" in missing[0].remedy
    assert fsdp_guard.inspect(model, []).ok, "no optimizer handed in: none is judged"


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def test_importing_the_package_imports_nothing_else() -> None:
    code = (
        "import sys, fsdp_guard; fsdp_guard.__all__; print([m for m in ('torch', 'lightning', 'wandb') "
        "if m in sys.modules]); fsdp_guard.Guard; print([m for m in ('lightning', 'pytorch_lightning', 'wandb') "
        "if m in sys.modules])"
    )
    assert python(code).stdout == "[]\n[]\n"


def test_public_names() -> None:
    assert fsdp_guard.__all__ == [
        "Divergence",
        "DivergenceKind",
        "Event",
        "FsdpGuard",
        "FsdpGuardError",
        "Guard",
        "HolderDivergenceError",
        "NoHoldersError",
        "Report",
        "UnsupportedLayoutError",
        "WandbReporter",
        "inspect",
        "refresh",
    ]
    assert set(fsdp_guard.__all__) <= set(dir(fsdp_guard))
    with pytest.raises(AttributeError, match="no attribute 'Gard'"):
        fsdp_guard.Gard  # noqa: B018


@pytest.mark.parametrize(
    ("imported", "bases"),
    [
        ("pytorch_lightning", ["pytorch_lightning.callbacks.callback"]),
        ("lightning.pytorch", ["lightning.pytorch.callbacks.callback"]),
        (
            "lightning.pytorch, pytorch_lightning",
            ["lightning.pytorch.callbacks.callback", "pytorch_lightning.callbacks.callback"],
        ),
        ("sys", ["lightning.pytorch.callbacks.callback"]),
    ],
)
def test_callback_belongs_to_the_lightning_in_use(imported: str, bases: list[str]) -> None:
    code = f"import {imported}; from fsdp_guard import FsdpGuard; print([b.__module__ for b in FsdpGuard.__bases__])"
    assert python(code).stdout == f"{bases}\n"


def test_callback_without_lightning_is_a_clear_error() -> None:
    code = (
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if 'lightning' in name.split('.')[0] else find(name, *a)\n"
        "import fsdp_guard; fsdp_guard.Guard\n"
        "from fsdp_guard import FsdpGuard"
    )
    result = python(code)
    assert "ImportError: FsdpGuard is a callback for Lightning" in result.stderr
    assert "pip install 'fsdp-guard[lightning]'" in result.stderr


@pytest.mark.parametrize("enabled", [True, False])
def test_a_look_sets_off_no_collection_and_leaves_the_collector_as_it_was(enabled: bool) -> None:
    phases: list[str] = []
    model = nn.Sequential(*(sharded() for _ in range(2_000)))
    was_enabled = gc.isenabled()
    gc.callbacks.append(lambda phase, info: phases.append(phase))
    try:
        gc.enable() if enabled else gc.disable()
        phases.clear()
        assert fsdp_guard.inspect(model).ok
        during, left = list(phases), gc.isenabled()
    finally:
        gc.callbacks.pop()
        gc.enable() if was_enabled else gc.disable()
    assert left is enabled
    assert len(during) <= 2  # one may begin right after the look: what it made is still counted


def test_a_look_that_fails_leaves_the_collector_on() -> None:
    assert gc.isenabled()
    model = sharded()
    vars(model.parameter_groups[0])["fsdp_parameters"] = [object()]
    with pytest.raises(UnsupportedLayoutError):
        fsdp_guard.inspect(model)
    assert gc.isenabled()
