"""The ready files in configs/ work as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.ranks import Ranks, torchrun
from tests.distributed.test_lightning import batches, make_module, set_weight
from tests.wandb_file import read_run

CONFIGS = Path(__file__).parents[2] / "configs"


def run_cli(folder: str, diverged: bool) -> tuple[list[str], str]:
    import lightning.pytorch as pl
    from lightning.pytorch.cli import LightningCLI

    base = type(make_module(pl, {"on_fit_start": set_weight} if diverged else {}))

    class Model(base):  # type: ignore[misc,valid-type]
        def train_dataloader(self) -> Any:
            return batches()

    options = {"devices": 2, "max_steps": 1, "default_root_dir": folder, "enable_progress_bar": "false"}
    options |= {"logger": "false", "enable_checkpointing": "false", "enable_model_summary": "false"}
    arguments = [
        "fit",
        "--config",
        str(CONFIGS / "lightning.yaml"),
        *(f"--trainer.{key}={value}" for key, value in options.items()),
    ]
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


def test_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    script, checkpoint = CONFIGS / "plain_loop.py", tmp_path / "model.pt"
    for name in ("fresh", "resumed"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv("WANDB_DIR", str(tmp_path / name))
        done = torchrun(2, str(script), "--checkpoint", str(checkpoint), "--steps", "2")
        assert done.returncode == 0, done.stderr
        run = read_run(tmp_path / name)
        assert len(run.metric("loss")) == 2
        assert set(run.metric("fsdp_guard/diverged")) == {0}  # looked at, and right
        assert set(torch.load(checkpoint)) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_plain_loop_with_the_optimizer_too_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    source = (CONFIGS / "plain_loop.py").read_text()
    built = "    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
    before, sharded, after = source.partition("    for layer in (model[0]")
    assert after.count(built) == 1
    script = tmp_path / "script.py"
    script.write_text(before + built + sharded + after.replace(built, ""))
    done = torchrun(2, str(script), "--checkpoint", str(tmp_path / "model.pt"))
    assert done.returncode != 0
    assert "HolderDivergenceError" in done.stderr
    (alert,) = read_run(tmp_path).alerts
    assert "optimizer_orphan" in alert.text
    assert not (tmp_path / "model.pt").exists()
