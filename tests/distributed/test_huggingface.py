"""The real Trainer and FSDP2 through Accelerate, two processes under torchrun: one launch for all cases."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import torchrun

TRAINED = ["call", "first_forward", "first_step", "save", "save", "call"]
"""Events of a whole training of four steps, saved after the second and the last."""


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], str]:
    folder: Path = tmp_path_factory.mktemp("huggingface")
    done = torchrun(2, "-m", "tests.distributed.launched_huggingface", str(folder))
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)], done.stderr


@pytest.mark.parametrize(
    ("case", "events"),
    [
        ("healthy", TRAINED),
        ("resumed", ["call", "first_forward", "first_step", "save", "call"]),
        ("never_trained", ["call", "first_forward"]),
    ],
)
def test_healthy_runs_go_on(launched: tuple[list[Any], str], case: str, events: list[str]) -> None:
    for played in launched[0]:
        assert played[case]["raised"] == ""
        assert played[case]["looks"] == [[event, 6, ["torch_fsdp2"]] for event in events]


@pytest.mark.parametrize(
    ("case", "kind", "event", "heard_at"),
    [
        ("replaced_before_a_save", "replaced_parameter", "save", "save"),
        ("replaced_before_the_end", "replaced_parameter", "call", "call"),
        ("added_before_a_load_and_an_evaluation", "unmanaged_parameter", "load", "call|load|first_forward"),
    ],
)
def test_all_ranks_stop_at_what_one_has(
    launched: tuple[list[Any], str], case: str, kind: str, event: str, heard_at: str
) -> None:
    other, failing = (played[case]["raised"] for played in launched[0])
    assert kind in failing
    assert f"at event '{event}' on rank 1" in failing
    assert kind in other
    # A load and a forward wait for nobody: at which look of its own rank 0 hears of them is a race.
    assert re.search(f"on rank 1, said at event '({heard_at})' on rank 0", other)


def test_a_diverged_run_overwrites_no_checkpoint(launched: tuple[list[Any], str]) -> None:
    for played in launched[0]:
        assert played["healthy"]["checkpoints"] == ["checkpoint-2", "checkpoint-4"]
        assert played["replaced_before_a_save"]["checkpoints"] == ["checkpoint-2"]


def test_a_wrapper_that_the_trainer_keeps_to_itself_is_said(launched: tuple[list[Any], str]) -> None:
    played, printed = launched
    assert [case["ddp"]["looks"] for case in played] == [[], []]
    assert "no sharding runtime that fsdp_guard knows manages this model" in printed


def test_without_transformers_the_error_says_what_to_install() -> None:
    script = "import sys; sys.modules['transformers'] = None\nfrom fsdp_guard.callbacks import HfFsdpGuard"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'fsdp-guard[huggingface]'" in done.stderr
