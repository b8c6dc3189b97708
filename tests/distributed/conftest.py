from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module", params=[2, 4, 8])
def team(request: Any) -> Iterator[Ranks]:
    """Groups of several sizes, over TCP as torchrun's are."""
    team = Ranks(request.param, over="tcp")
    yield team
    team.stop()
