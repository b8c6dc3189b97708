"""Real wandb in offline mode: what is on disk after the process was killed right behind the raise."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wandb_file import RecordedRun, read_run

SCRIPT = """
import os, signal, sys
import torch, wandb
from torch import nn
import fsdp_guard
from tests.main_layout import fully_shard

run = wandb.init(project="guard", mode="offline", dir=sys.argv[1], settings=wandb.Settings(silent=True))
model = fully_shard(nn.Linear(4, 4))
with torch.no_grad():
    model.weight.fill_(0.123456789)
guard = fsdp_guard.Guard({options})
guard.check(model)
run.log({{"loss": 1.0}}, step=0)
run.log({{"loss": 0.5}}, step=1)
model.weight = nn.Parameter(model.weight.detach().clone())
try:
    guard.check(model, event="save")
except fsdp_guard.HolderDivergenceError as error:
    print(error)
{then}
print("still active" if wandb.run is not None else "finished", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def play(folder: Path, options: str = "", then: str = "") -> tuple[str, RecordedRun]:
    """Run the script, which kills itself, and return what it printed and what is on disk of its run."""
    script = SCRIPT.format(options=options, then=then)
    result = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=False)
    assert result.returncode == -signal.SIGKILL, result.stderr
    return result.stdout, read_run(folder)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, RecordedRun]:
    folder = tmp_path_factory.mktemp("killed")
    return folder, *play(folder)


Killed = tuple[Path, str, RecordedRun]


def test_alert_metrics_and_table_outlive_the_process(killed: Killed) -> None:
    _, printed, run = killed
    (alert,) = run.alerts
    assert alert.title == "fsdp_guard: holder divergence"
    assert alert.level == "ERROR"
    assert alert.text in printed
    assert "  weight" in alert.text.splitlines()
    assert "Do this: Load with load_state_dict(..., assign=False)" in alert.text
    assert run.metric("fsdp_guard/diverged") == [0, 1]
    assert run.metric("fsdp_guard/divergences") == [0, 1]
    assert run.metric("fsdp_guard/kind/replaced_parameter") == [1]
    assert run.table is not None
    assert run.table["columns"] == ["kind", "fqn", "runtime", "detail", "cause", "remedy", "event", "rank"]
    ((kind, fqn, runtime, detail, cause, remedy, event, rank),) = run.table["data"]
    assert (kind, fqn, runtime, event, rank) == ("replaced_parameter", "weight", "mfsdp_v2", "save", 0)
    assert "expected the runtime's own" in detail
    assert "does not hold" in cause
    assert "assign=False" in remedy
    assert run.summary["fsdp_guard/diverged"] == 1
    assert run.summary["fsdp_guard/event"] == "save"
    assert run.summary["fsdp_guard/kinds"] == ["replaced_parameter"]
    assert run.summary["fsdp_guard/first_fqn"] == "weight"
    assert (run.summary["fsdp_guard/first_cause"], run.summary["fsdp_guard/first_remedy"]) == (cause, remedy)
    assert run.exit_code == 1
    assert printed.endswith("finished\n")


def test_a_clean_look_does_not_move_the_step(killed: Killed) -> None:
    _, _, run = killed
    assert {row["_step"]: row["loss"] for row in run.rows if "loss" in row} == {0: 1.0, 1: 0.5}
    assert [row["_step"] for row in run.rows if row.get("fsdp_guard/diverged") == 0] == [0]


def test_no_weight_leaves_the_process(killed: Killed) -> None:
    folder, _, _ = killed
    for path in folder.rglob("*"):
        if path.is_file():
            assert b"0.1234" not in path.read_bytes(), path


def test_run_can_be_left_open(tmp_path: Path) -> None:
    printed, _ = play(tmp_path, "reporters=[fsdp_guard.WandbReporter(finish_run=False)]")
    assert printed.endswith("still active\n")


def test_run_goes_on_where_the_guard_only_warns(tmp_path: Path) -> None:
    _, run = play(tmp_path, "on_divergence='warn'", "run.log({'loss': 0.25}); run.finish()")
    assert len(run.alerts) == 1
    assert run.metric("loss") == [1.0, 0.5, 0.25]
    assert run.exit_code == 0


def test_closed_run_is_logged_and_hides_nothing(tmp_path: Path) -> None:
    options = "reporters=[fsdp_guard.WandbReporter(run)]"
    then = "run.finish()\ntry:\n    guard.check(model)\nexcept fsdp_guard.HolderDivergenceError: print('raised again')"
    printed, run = play(tmp_path, options, then)
    assert "raised again" in printed
    assert len(run.alerts) == 1


def test_without_a_run_the_log_alone(tmp_path: Path) -> None:
    script = SCRIPT.format(options="", then="")
    script = "\n".join(line for line in script.splitlines() if not line.startswith("run"))
    result = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "fsdp_guard: 1 holder divergence" in result.stdout, result.stderr
    assert result.stdout.endswith("finished\n")
    assert list(tmp_path.rglob("*.wandb")) == []
