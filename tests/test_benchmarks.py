"""The benchmarks run, and print a row for what they were asked for. What they measure is not judged here."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch


@pytest.mark.parametrize(
    ("module", "arguments", "row"),
    [
        ("benchmarks.host", ["--parameters", "20", "--repeats", "1"], "| 20 | "),
        ("benchmarks.load", ["--units", "3", "--width", "4", "--repeats", "1"], "| 3 | "),
        ("benchmarks.peers", ["--layers", "2", "--width", "16", "--repeats", "1"], "| broken: swap_tensors | alarm | "),
        ("benchmarks.values", ["--mib", "64", "--repeats", "1"], "| 64 | "),
        ("benchmarks.step", ["--steps", "4"], "| guarded / plain | " if torch.cuda.is_available() else "needs a GPU"),
        ("benchmarks.agreement", ["--ranks", "3", "--rounds", "2", "--repeats", "1"], "| 3 | "),
    ],
)
def test_benchmark_runs(module: str, arguments: list[str], row: str) -> None:
    run = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert row in run.stdout
