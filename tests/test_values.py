from __future__ import annotations

import pytest
import torch

from fsdp_guard.values import _count


@pytest.mark.parametrize("numel", [0, 1, 65_535, 65_536, 65_537, 131_071, 1_048_653])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 1.0])
def test_count(numel: int, share: float) -> None:
    mask = torch.rand(numel, generator=torch.Generator().manual_seed(0)) < share
    assert _count(mask).item() == sum(mask.tolist())
