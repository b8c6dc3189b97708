"""The ready files in configs/ work as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.ranks import Ranks
from tests.distributed.test_lightning import batches, make_module, set_weight

CONFIG = Path(__file__).parents[2] / "configs" / "lightning.yaml"


def run_cli(folder: str, diverged: bool) -> tuple[list[str], str]:
    import lightning.pytorch as pl
    from lightning.pytorch.cli import LightningCLI

    base = type(make_module(pl, {"on_fit_start": set_weight} if diverged else {}))

    class Model(base):  # type: ignore[misc,valid-type]
        def train_dataloader(self) -> Any:
            return batches()

    options = {"devices": 2, "max_steps": 1, "default_root_dir": folder, "enable_progress_bar": "false"}
    options |= {"logger": "false", "enable_checkpointing": "false", "enable_model_summary": "false"}
    arguments = ["fit", "--config", str(CONFIG), *(f"--trainer.{key}={value}" for key, value in options.items())]
    cli = None
    try:
        cli = LightningCLI(Model, args=arguments, save_config_callback=None, seed_everything_default=False)
    except Exception as error:
        return [], type(error).__name__
    return [type(callback).__name__ for callback in cli.trainer.callbacks], ""


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="the file asks for NCCL, which refuses two ranks on one GPU")
def test_lightning_cli(ranks: Ranks, tmp_path: Path) -> None:
    for callbacks, error in ranks(run_cli, str(tmp_path), False):
        assert error == ""
        assert "FsdpGuard" in callbacks
    for _, error in ranks(run_cli, str(tmp_path), True):
        assert error == "HolderDivergenceError"
