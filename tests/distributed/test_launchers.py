"""Whole scripts under the launchers that people use, which end every rank when the first one fails."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import multiprocessing, nn

from fsdp_guard import Guard, HolderDivergenceError
from fsdp_guard.reporters.wandb import ALERT_TITLE
from tests import main_layout
from tests.distributed.ranks import torchrun
from tests.mfsdp import replace_parameter
from tests.wandb_file import read_run

SECONDS = 60
"""More than a launch takes; less than any time-out but the guard's own."""


def launch(case: str, folder: Path, size: int, failing: int) -> int:
    """Run ``launched.py`` under torchrun and return its exit status."""
    started = time.monotonic()
    result = torchrun(size, "-m", "tests.distributed.launched", case, str(folder), str(failing))
    assert time.monotonic() - started < SECONDS, result.stderr
    return result.returncode


@pytest.mark.parametrize(
    ("case", "size", "failing"),
    [
        ("data_parallel", 4, 3),
        ("data_parallel", 2, 0),
        ("pipeline", 2, 0),
        ("pipeline", 2, 1),
    ],
)
def test_torchrun(case: str, size: int, failing: int, tmp_path: Path) -> None:
    """Rank 0 has the run. When another one fails, it waits in a collective, or for the other stage."""
    assert launch(case, tmp_path, size, failing) != 0
    message = (tmp_path / f"rank{failing}").read_text()
    assert "replaced_parameter" in message
    assert f"on rank {failing}" in message
    assert not any("losses" in path.read_text() for path in tmp_path.glob("rank*"))
    run = read_run(tmp_path)
    assert [alert.title for alert in run.alerts] == [ALERT_TITLE]
    assert f"on rank {failing}" in run.alerts[0].text
    assert run.metric("fsdp_guard/diverged")[-1] == 1
    assert run.summary["fsdp_guard/ranks"] == [failing]
    assert run.exit_code == 1


@pytest.mark.parametrize(("case", "size"), [("data_parallel", 4), ("pipeline", 2)])
def test_torchrun_without_a_divergence(case: str, size: int, tmp_path: Path) -> None:
    assert launch(case, tmp_path, size, -1) == 0
    assert all("losses" in (tmp_path / f"rank{rank}").read_text() for rank in range(size))
    run = read_run(tmp_path)
    assert run.alerts == []
    assert run.metric("fsdp_guard/diverged") in ([], [0]), "clean looks join the rows of the script, which logs none"


def spawned(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model = main_layout.fully_shard(nn.Linear(4, 4))
    if rank == 1:
        replace_parameter(model)
    try:
        Guard(reporters=[]).check(model)
    except HolderDivergenceError as error:
        (folder / f"rank{rank}").write_text(str(error.report.failed_ranks))
        raise


def test_torch_multiprocessing(tmp_path: Path) -> None:
    with pytest.raises(multiprocessing.ProcessRaisedException, match="HolderDivergenceError"):
        multiprocessing.spawn(spawned, (tmp_path,), nprocs=2)
    assert "(1,)" in {path.read_text() for path in tmp_path.glob("rank*")}
