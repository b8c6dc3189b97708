"""A training script that a test starts with torchrun: ``launched_huggingface.py FOLDER``; writes what each case did."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate.state
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from fsdp_guard.callbacks import HfFsdpGuard
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import fsdp_guard
from tests.mfsdp import replace_parameter


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.head = nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(inputs))
        return {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": torch.eye(4)[index % 4], "labels": torch.zeros(4)}


class Replace(TrainerCallback):
    """Put another parameter in the place of one on rank 1, after a step. At its next forward FSDP2 drops it."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == self.step:
            replace(given["model"])


def replace(model: Any) -> None:
    if dist.get_rank() == 1:
        replace_parameter(model.head)


@contextlib.contextmanager
def fsdp2_on_the_cpu() -> Iterator[None]:
    """Let Accelerate shard: it does so where it sees several GPUs, and not where it sees several CPUs (1.16)."""
    initialize = accelerate.state.PartialState.__init__

    def see_gpus(self: Any, *args: Any, **options: Any) -> None:
        initialize(self, *args, **options)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    accelerate.state.PartialState.__init__ = see_gpus
    yield
    accelerate.state.PartialState.__init__ = initialize


def make_trainer(folder: Path, looks: list[Any], *callbacks: Any, sharded: bool = True, **options: Any) -> Trainer:
    fsdp = {"version": 2, "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 10}
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
        **({"fsdp": True, "fsdp_config": fsdp} if sharded else {}),
        **{"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, **options},
    )
    guard = HfFsdpGuard(reporters=[looks.append])
    rows = Rows()
    return Trainer(Net(), arguments, train_dataset=rows, eval_dataset=rows, callbacks=[*callbacks, guard])


def healthy(folder: Path, looks: list[Any]) -> None:
    trainer = make_trainer(folder, looks)
    trainer.train()
    trainer.evaluate()


def resumed(folder: Path, looks: list[Any]) -> None:
    make_trainer(folder.with_name("healthy"), looks, max_steps=6).train(resume_from_checkpoint=True)


def never_trained(folder: Path, looks: list[Any]) -> None:
    trainer = make_trainer(folder, looks)
    trainer.evaluate()
    trainer.predict(Rows())


def replaced_before_a_save(folder: Path, looks: list[Any]) -> None:
    make_trainer(folder, looks, Replace(step=4)).train()


def replaced_before_the_end(folder: Path, looks: list[Any]) -> None:
    make_trainer(folder, looks, Replace(step=4), save_strategy="no", eval_strategy="no").train()


def added_before_a_load_and_an_evaluation(folder: Path, looks: list[Any]) -> None:
    trainer = make_trainer(folder, looks)
    trainer.train()
    if dist.get_rank() == 1:
        trainer.model.head.scale = nn.Parameter(torch.ones(1))
    try:
        trainer.model.load_state_dict(trainer.model.state_dict())
    finally:
        dist.barrier()  # or rank 0 would wait in the forward for a rank that has raised and does not come
    trainer.evaluate()


def ddp(folder: Path, looks: list[Any]) -> None:
    make_trainer(folder, looks, sharded=False).train()


CASES = [
    healthy,
    resumed,
    never_trained,
    replaced_before_a_save,
    replaced_before_the_end,
    added_before_a_load_and_an_evaluation,
]


def play(case: Any, folder: Path) -> dict[str, Any]:
    looks: list[Any] = []
    raised = ""
    try:
        case(folder / case.__name__, looks)
    except fsdp_guard.HolderDivergenceError as error:
        raised = str(error)
    return {
        "raised": raised,
        "looks": [(report.event, report.parameters_checked, list(report.runtimes)) for report in looks],
        "checkpoints": sorted(path.name for path in (folder / case.__name__).glob("checkpoint-*")),
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    with fsdp2_on_the_cpu():
        played = {case.__name__: play(case, folder) for case in CASES}
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    played["ddp"] = play(ddp, folder)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(played))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
