"""The code in docs/divergences.md does what its sections say: the first block of each breaks, the second does not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdp_guard
from fsdp_guard import DivergenceKind
from tests.distributed.ranks import Ranks
from tests.distributed.test_runtimes import small, wrap_v2
from tests.mfsdp import MAIN_LAYOUT

PAGE = (Path(__file__).parents[2] / "docs" / "divergences.md").read_text()


def blocks_of(kind: str) -> list[str]:
    (section,) = re.findall(rf"^## {kind}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


def run_block(code: str) -> list[str]:
    names: dict[str, Any] = {"build": small, "shard": wrap_v2, "fsdp_guard": fsdp_guard, "nn": nn, "torch": torch}
    exec(code, names)
    report = fsdp_guard.inspect(names["model"], names.get("optimizer"), values=True)
    assert report.parameters_checked
    return [divergence.kind.value for divergence in report.divergences]


@pytest.mark.skipif(MAIN_LAYOUT, reason="the page is about the released layout")
@pytest.mark.parametrize("kind", [kind.value for kind in DivergenceKind])
def test_divergences(ranks: Ranks, kind: str) -> None:
    broken, right = blocks_of(kind)
    # On one rank at least: a rank without rows of a parameter has nothing to miss.
    assert any(kind in found for found in ranks(run_block, broken))
    assert ranks(run_block, right) == [[], []]
