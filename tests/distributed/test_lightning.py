"""The callback under real Trainers: Megatron-FSDP V2 and FSDP2 sharded in configure_model, DDP by its strategy."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_fsdp import experimental
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from fsdp_guard import DivergenceKind as Kind
from fsdp_guard import HolderDivergenceError, NoHoldersError, Report
from tests.distributed.ranks import BACKEND, Ranks
from tests.mfsdp import DEVICE, MAIN_LAYOUT, replace_parameter, shard
from tests.wandb_file import read_run

CLUSTER = {"devices": 1, "num_nodes": 2} if torch.cuda.device_count() == 1 else {"devices": 2}
"""One card is both ranks' first, so to Lightning they are two nodes of one card each."""

NAMESPACES = ["lightning.pytorch", "pytorch_lightning"]

needs_assign = pytest.mark.skipif(MAIN_LAYOUT, reason="main refuses assign=True itself")


def shard_mfsdp_v2(module: Any) -> None:
    shard(module.net, main_grads_dtype=torch.float32)


def shard_fsdp2(module: Any) -> None:
    fully_shard(module.net[0], mesh=module.device_mesh["data_parallel"])
    fully_shard(module.net, mesh=module.device_mesh["data_parallel"])


def leave_plain(module: Any) -> None:
    """For strategies that wrap the model themselves."""


def make_module(
    pl: Any,
    hooks: dict[str, Callable[[Any], None]],
    wrap: Callable[[Any], None] = shard_mfsdp_v2,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """A LightningModule that runs ``hooks`` where they are named, and counts its batches.

    fully_shard_optimizer, which mixed precision needs, refuses the closure that Lightning hands to ``step()``: bf16
    goes with manual optimization and the bare optimizer, whose steps Lightning does not count.
    """

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = None
            self.batches = 0
            self.finished_batches = 0
            self.automatic_optimization = dtype == torch.float32

        def configure_model(self) -> None:
            if self.net is None:
                torch.manual_seed(0)
                self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(DEVICE, dtype)
                hooks.get("before_sharding", lambda module: None)(self)
                wrap(self)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            trainable = [parameter for parameter in self.net.parameters() if parameter.requires_grad]
            optimizer = torch.optim.SGD(trainable, lr=0.1, foreach=False)
            if not self.automatic_optimization:
                experimental.fully_shard_optimizer(optimizer)
            return optimizer

        def step(self, batch: torch.Tensor) -> torch.Tensor:
            self.batches += 1
            loss = self.net(batch.to(dtype)).square().mean()
            self.finished_batches += 1
            return loss

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            loss = self.step(batch)
            hooks.get("training_step", lambda module: None)(self)
            if not self.automatic_optimization:
                optimizer = self.optimizers(use_pl_optimizer=False)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def validation_step(self, batch: torch.Tensor) -> None:
            self.step(batch)

        def test_step(self, batch: torch.Tensor) -> None:
            self.step(batch)

        def predict_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.net(batch)

        def on_fit_start(self) -> None:
            hooks.get("on_fit_start", lambda module: None)(self)

        def on_train_start(self) -> None:
            hooks.get("on_train_start", lambda module: None)(self)

    return Module()


def make_trainer(pl: Any, folder: str, callbacks: list[Any], moves: bool = True, **options: Any) -> Any:
    strategies = importlib.import_module(f"{pl.__name__}.strategies")

    class Strategy(strategies.ModelParallelStrategy):  # type: ignore[misc,name-defined]
        """Leaves the model where configure_model put it, as mixed precision needs."""

        def model_to_device(self) -> None:
            pass

    strategy = strategies.ModelParallelStrategy if moves else Strategy
    defaults: dict[str, Any] = {
        "accelerator": "gpu" if DEVICE == "cuda" else "cpu",
        **CLUSTER,
        "strategy": strategy(process_group_backend=BACKEND),
        "default_root_dir": folder,
        "max_steps": 3,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 1,
        "limit_val_batches": 1,
    }
    return pl.Trainer(**{**defaults, **options, "callbacks": callbacks})


def batches() -> DataLoader[torch.Tensor]:
    return DataLoader([torch.ones(4) for _ in range(16)], batch_size=4)


class Outcome:
    """What a Trainer call left behind."""

    def __init__(self) -> None:
        self.events: list[tuple[str, bool]] = []
        self.error = ""
        self.report: Report | None = None
        self.batches = 0
        self.finished_batches = 0
        self.hooks = 0


def assign(module: Any) -> None:
    module.net.load_state_dict({k: v.detach().clone() for k, v in module.net.state_dict().items()}, assign=True)


def set_weight(module: Any) -> None:
    replace_parameter(module.net[0])


def run(
    namespace: str,
    folder: str,
    call: str = "fit",
    hooks: dict[str, Callable[[Any], None]] | None = None,
    ckpt_path: str | None = None,
    wrap: Callable[[Any], None] = shard_mfsdp_v2,
    dtype: torch.dtype = torch.float32,
    guard_options: dict[str, Any] | None = None,
    **options: Any,
) -> Outcome:
    from fsdp_guard import FsdpGuard

    pl = importlib.import_module(namespace)
    outcome = Outcome()

    def record(report: Report) -> None:
        outcome.events.append((report.event.value, report.ok))

    module = make_module(pl, hooks or {}, wrap, dtype)
    if hooks and "before" in hooks:
        module.configure_model()
        hooks["before"](module)
    guard = FsdpGuard(**{"reporters": [record], **(guard_options or {})})
    trainer = make_trainer(pl, folder, [*options.pop("callbacks", []), guard], **options)
    loaders = {"fit": (batches(), batches())}.get(call, (batches(),))
    try:
        getattr(trainer, call)(module, *loaders, ckpt_path=ckpt_path)
    except (HolderDivergenceError, NoHoldersError) as error:
        outcome.report = error.report
        outcome.error = type(error).__name__
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {error}"
    if options.get("enable_checkpointing") is None and call == "fit" and not outcome.error and ckpt_path is None:
        trainer.save_checkpoint(os.path.join(folder, "saved.ckpt"))
    outcome.batches = module.batches
    outcome.finished_batches = module.finished_batches
    hooked = [hook for m in module.modules() for hook in m._load_state_dict_post_hooks.values()]
    outcome.hooks = sum(type(hook).__module__.startswith("fsdp_guard") for hook in hooked)  # FSDP2 has its own
    return outcome


def run_clean_fit_and_resume(namespace: str, folder: str) -> tuple[Outcome, Outcome]:
    first = run(namespace, folder)
    return first, run(namespace, folder, ckpt_path=os.path.join(folder, "saved.ckpt"), max_steps=6)


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_clean_fit_and_resume(ranks: Ranks, namespace: str, tmp_path: Path) -> None:
    for first, resumed in ranks(run_clean_fit_and_resume, namespace, str(tmp_path)):
        assert (first.error, resumed.error) == ("", "")
        assert all(ok for _, ok in first.events + resumed.events)
        assert [event for event, _ in first.events] == ["call", "call", "first_forward", "call", "first_step"]
        # The restore comes after on_fit_start, so the load hook of the watch is what sees it; restoring an optimizer
        # takes a step of its own to allocate the state (torch.distributed.checkpoint, _init_optim_state).
        assert [event for event, _ in resumed.events] == ["call", "load", "first_step", "call", "first_forward"]
        assert first.hooks == resumed.hooks == 0, "hooks are left behind"


def run_converted(namespace: str, folder: str) -> Outcome:
    return run(namespace, folder, precision="bf16-true")


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_precision_that_converts_after_configure_model(ranks: Ranks, namespace: str, tmp_path: Path) -> None:
    for outcome in ranks(run_converted, namespace, str(tmp_path)):
        assert outcome.report is not None, outcome.error
        # All four on both ranks, although neither rank has rows of all of them.
        assert [(d.kind, d.fqn) for d in outcome.report.divergences] == [
            (Kind.DETACHED_STORAGE, f"net.{name}") for name in ("0.weight", "0.bias", "2.weight", "2.bias")
        ]
        assert outcome.batches == 0
        assert outcome.hooks == 0, "hooks are left behind after the exception"


def run_hook(namespace: str, folder: str, hook: str, action: Callable[[Any], None], options: dict[str, Any]) -> Outcome:
    return run(namespace, folder, hooks={hook: action}, **options)


@needs_assign
@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start"])
def test_users_load_with_assign(ranks: Ranks, hook: str, tmp_path: Path) -> None:
    outcomes = ranks(run_hook, NAMESPACES[0], str(tmp_path), hook, assign, {})
    # One rank may hear of the other's load before it comes to its own.
    assert "load" in {outcome.report.event.value for outcome in outcomes if outcome.report}
    for outcome in outcomes:
        assert outcome.report is not None, outcome.error
        assert {d.kind for d in outcome.report.divergences} == {Kind.REPLACED_PARAMETER}
        assert outcome.batches == (0 if hook == "on_fit_start" else 1)


@pytest.mark.parametrize(
    ("hook", "options", "event", "batches"),
    [
        ("on_fit_start", {}, "call", 0),  # seen by on_sanity_check_start, before its forward hides it
        ("on_fit_start", {"num_sanity_val_steps": 0}, "call", 0),  # seen by on_train_start
        # Automatic optimization runs the forward inside optimizer.step(closure), so the step comes first.
        ("on_train_start", {"num_sanity_val_steps": 0}, "first_step", 0),
        ("on_train_start", {}, "first_step", 1),
    ],
)
def test_users_assignment(
    ranks: Ranks, hook: str, options: dict[str, Any], event: str, batches: int, tmp_path: Path
) -> None:
    for outcome in ranks(run_hook, NAMESPACES[0], str(tmp_path), hook, set_weight, options):
        assert outcome.report is not None, outcome.error
        assert outcome.report.event.value == event
        assert [d.fqn for d in outcome.report.divergences] == ["net.0.weight"]
        assert outcome.batches == batches


class SaveTwice:
    """Save a good checkpoint, diverge, and try to save over it."""

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, "good")

    def __call__(self, module: Any) -> None:
        if module.batches == 2:
            module.trainer.save_checkpoint(self.path)
        if module.batches == 3:
            module.net.to(torch.bfloat16)
            module.trainer.save_checkpoint(self.path)


def run_save(folder: str) -> Outcome:
    return run(NAMESPACES[0], folder, hooks={"training_step": SaveTwice(folder)}, limit_val_batches=0)


def test_diverged_run_overwrites_no_good_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    for outcome in ranks(run_save, str(tmp_path)):
        assert outcome.report is not None, outcome.error
        assert outcome.report.event.value == "save"
        assert ("save", True) in outcome.events, "the good checkpoint was not looked at"
        assert outcome.batches == 3


def fail(module: Any) -> None:
    module.net[0].weight.grad = None
    module.net.to(torch.bfloat16)
    raise ZeroDivisionError("the user's own error")


def run_users_exception(folder: str) -> tuple[Outcome, bool]:
    from lightning.pytorch import Callback

    path = os.path.join(folder, "after the exception")

    class SavesOnException(Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            trainer.save_checkpoint(path)

    hooks = {"training_step": fail}
    # Ahead of the guard, so that the guard still watches when this saves.
    outcome = run(NAMESPACES[0], folder, hooks=hooks, callbacks=[SavesOnException()])
    return outcome, os.path.exists(path)


def test_users_exception_is_not_hidden_by_the_save_guard(ranks: Ranks, tmp_path: Path) -> None:
    for outcome, saved in ranks(run_users_exception, str(tmp_path)):
        assert outcome.error == "ZeroDivisionError: the user's own error"
        assert saved


def before_wrap_was_loaded(module: Any) -> None:
    """Nothing: a healthy module."""


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize("call", ["validate", "test", "predict"])
def test_evaluation(ranks: Ranks, namespace: str, call: str, tmp_path: Path) -> None:
    for outcome in ranks(run, namespace, str(tmp_path), call, {"before": before_wrap_was_loaded}):
        assert outcome.error == ""
        assert [event for event, _ in outcome.events] == ["call", "first_forward"]
        assert outcome.hooks == 0
    for outcome in ranks(run, namespace, str(tmp_path), call, {"before": set_weight}):
        assert outcome.report is not None, outcome.error
        assert [d.fqn for d in outcome.report.divergences] == ["net.0.weight"]
        assert outcome.batches == 0


def ddp(namespace: str = NAMESPACES[0]) -> dict[str, Any]:
    strategies = importlib.import_module(f"{namespace}.strategies")
    return {"wrap": leave_plain, "strategy": strategies.DDPStrategy(process_group_backend=BACKEND)}


def fsdp2(namespace: str) -> dict[str, Any]:
    strategies = importlib.import_module(f"{namespace}.strategies")
    strategy = strategies.ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, process_group_backend=BACKEND
    )
    return {"wrap": shard_fsdp2, "strategy": strategy}


STRATEGIES = [ddp, fsdp2]


def run_without_runtime(folder: str) -> tuple[Outcome, Outcome]:
    """DDPStrategy wraps for fits alone."""
    free = run(NAMESPACES[0], folder, "validate", **ddp())
    return free, run(NAMESPACES[0], folder, "validate", guard_options={"require_holders": True}, **ddp())


def test_model_without_a_runtime(ranks: Ranks, tmp_path: Path) -> None:
    for free, required in ranks(run_without_runtime, str(tmp_path)):
        assert (free.error, free.events) == ("", [])
        assert required.error == "NoHoldersError"
        assert required.batches == 0


def run_strategy(options: Callable[[str], dict[str, Any]], namespace: str, folder: str) -> tuple[Outcome, Outcome]:
    path = os.path.join(folder, "saved.ckpt")
    required = {"guard_options": {"require_holders": True}}
    first = run(namespace, folder, **required, **options(namespace))
    return first, run(namespace, folder, ckpt_path=path, max_steps=6, **required, **options(namespace))


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize("options", STRATEGIES, ids=lambda options: options.__name__)
def test_clean_fit_and_resume_of_other_runtimes(
    ranks: Ranks, options: Callable[[str], dict[str, Any]], namespace: str, tmp_path: Path
) -> None:
    for first, resumed in ranks(run_strategy, options, namespace, str(tmp_path)):
        assert (first.error, resumed.error) == ("", "")
        assert all(ok for _, ok in first.events + resumed.events)
        assert [event for event, _ in first.events] == ["call", "call", "first_forward", "call", "first_step"]
        # DDPStrategy restores the model before it wraps it, so before there is anything to watch.
        assert ("load", True) in resumed.events or options is ddp
        assert first.hooks == resumed.hooks == 0, "hooks are left behind"


def swap_and_save(module: Any) -> None:
    """When the first forward is over and its gate gone: the next look is that of the save."""
    if module.batches == 2:
        weight = module.net[0].weight
        torch.utils.swap_tensors(weight, nn.Parameter(weight.detach().clone()))
        module.trainer.save_checkpoint(os.path.join(module.trainer.default_root_dir, "diverged"))


def run_strategy_hook(
    options: Callable[[str], dict[str, Any]], folder: str, hook: str, action: Callable[[Any], None]
) -> Outcome:
    return run(NAMESPACES[0], folder, hooks={hook: action}, **options(NAMESPACES[0]))


@pytest.mark.parametrize(
    ("options", "hook", "action", "event", "kind"),
    [
        (ddp, "on_fit_start", set_weight, "call", Kind.REPLACED_PARAMETER),
        (ddp, "on_train_start", assign, "load", Kind.REPLACED_PARAMETER),
        (fsdp2, "on_train_start", set_weight, "first_step", Kind.REPLACED_PARAMETER),
        (fsdp2, "training_step", swap_and_save, "save", Kind.DETACHED_STORAGE),
    ],
)
def test_divergence_of_other_runtimes(
    ranks: Ranks,
    options: Callable[[str], dict[str, Any]],
    hook: str,
    action: Callable[[Any], None],
    event: str,
    kind: Kind,
    tmp_path: Path,
) -> None:
    outcomes = ranks(run_strategy_hook, options, str(tmp_path), hook, action)
    for outcome in outcomes:
        assert outcome.report is not None, outcome.error
    assert event in {outcome.report.event.value for outcome in outcomes}
    for outcome in outcomes:
        runtime = "torch_ddp" if options is ddp else "torch_fsdp2"
        assert (kind, runtime) in {(d.kind, d.runtime) for d in outcome.report.divergences}


def run_with_wandb(folder: str) -> tuple[str, int | None]:
    """A diverged fit whose only W&B run is the WandbLogger's."""
    from lightning.pytorch.loggers import WandbLogger

    logger = WandbLogger(project="guard", save_dir=folder, offline=True)
    outcome = run(
        NAMESPACES[0], folder, hooks={"on_fit_start": assign}, logger=logger, guard_options={"reporters": None}
    )
    return outcome.error, outcome.report.rank if outcome.report else None


@needs_assign
def test_wandb_logger_gets_the_alert(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(run_with_wandb, str(tmp_path)) == [("HolderDivergenceError", 0), ("HolderDivergenceError", 1)]
    recorded = read_run(tmp_path)
    assert [alert.title for alert in recorded.alerts] == ["fsdp_guard: holder divergence"]
    assert recorded.exit_code == 1
    assert recorded.metric("fsdp_guard/diverged") == [1]


def set_weight_on_rank_1(module: Any) -> None:
    if module.global_rank == 1:
        set_weight(module)


def run_one_rank_with_wandb(folder: str) -> tuple[tuple[int, ...], int]:
    from lightning.pytorch.loggers import WandbLogger

    logger = WandbLogger(project="guard", save_dir=folder, offline=True)
    hooks: Any = {"on_fit_start": set_weight_on_rank_1}
    outcome = run(NAMESPACES[0], folder, hooks=hooks, logger=logger, guard_options={"reporters": None})
    return outcome.report.failed_ranks if outcome.report else (), outcome.batches


def test_one_rank_diverges(ranks: Ranks, tmp_path: Path) -> None:
    """The other one, which has the run, stops at the same point and says which."""
    assert ranks(run_one_rank_with_wandb, str(tmp_path)) == [((1,), 0)] * 2
    recorded = read_run(tmp_path)
    assert [alert.title for alert in recorded.alerts] == ["fsdp_guard: holder divergence"]
    assert recorded.summary["fsdp_guard/ranks"] == [1]
    assert recorded.exit_code == 1
