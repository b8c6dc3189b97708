"""The Lightning callback: a thin adapter that tells a Guard when to look."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fsdp_guard.guard import Guard, OnDivergence
from fsdp_guard.report import Event
from fsdp_guard.reporters import Reporter
from fsdp_guard.reporters.wandb import WandbReporter

if TYPE_CHECKING:
    import wandb

_NAMESPACES = ("lightning.pytorch", "pytorch_lightning")


def _callback_bases() -> tuple[type, ...]:
    """Return the Callback classes of the Lightning packages in use: those imported so far, else one installed."""
    in_use = [name for name in _NAMESPACES if sys.modules.get(name) is not None]
    if not in_use:
        in_use = [name for name in _NAMESPACES if importlib.util.find_spec(name.partition(".")[0])][:1]
    if not in_use:
        raise ImportError(
            "FsdpGuard is a callback for Lightning, and neither 'lightning' nor 'pytorch_lightning' is installed. "
            "Install one with: pip install 'fsdp-guard[lightning]'. Without Lightning, use fsdp_guard.Guard."
        )
    return tuple(importlib.import_module(name).Callback for name in in_use)


class FsdpGuard(*_callback_bases()):  # type: ignore[misc]
    """Stops a run whose LightningModule and sharding runtime no longer agree on the parameters.

    Looks when the fit starts, before sanity checking, when training starts, after each load, before the first forward
    and the first optimizer step after it, and before each checkpoint is written; when validation, testing or
    predicting starts on its own, likewise. It has no hook on batches. What one rank finds, all ranks raise. Works under
    ``lightning.pytorch`` and ``pytorch_lightning``, at any position among the callbacks.

    W&B: reports to the run of the Trainer's ``WandbLogger`` if it has one, else to the active ``wandb.run``, else to
    the log alone.

    Args:
        on_divergence: ``"raise"`` a ``HolderDivergenceError``, ``"warn"``, or a callable that takes the report.
        require_holders: Raise ``NoHoldersError`` when no known runtime manages the model.
        refresh_stale: Let the runtime refresh compute weights that a restore left stale, and report that, instead of
            treating them as a divergence.
        allow_unmanaged: FQNs of trainable parameters that no holder owns on purpose, such as those that were handed to
            FSDP2's ``ignored_params``, or patterns of them with ``*`` and ``?``.
        reporters: Callables that take a report, instead of the one that reports to W&B.
        finish_run: Finish the W&B run with exit code 1 before raising, so that its alert outlives the process.
            Not used when ``reporters`` is given.
        agree_timeout_s: Longest wait for the other ranks at those points, in seconds; after it, this rank goes on with
            its own verdict.
        acknowledge_timeout_s: Longest wait before raising for the rank that reports to W&B to have done so, in seconds.

    Raises:
        ValueError: ``on_divergence`` is none of the above, or a timeout is not positive.

    Example::

        >>> from fsdp_guard import FsdpGuard
        >>> trainer = Trainer(strategy=ModelParallelStrategy(), callbacks=[FsdpGuard()])
    """

    def __init__(
        self,
        on_divergence: OnDivergence = "raise",
        require_holders: bool = False,
        refresh_stale: bool = False,
        allow_unmanaged: Sequence[str] = (),
        reporters: Sequence[Reporter] | None = None,
        finish_run: bool = True,
        agree_timeout_s: float = 60.0,
        acknowledge_timeout_s: float = 10.0,
    ) -> None:
        super().__init__()
        if reporters is None:
            reporters = [WandbReporter(self._wandb_run, finish_run=finish_run)]
        self._guard = Guard(
            reporters=reporters,
            on_divergence=on_divergence,
            require_holders=require_holders,
            refresh_stale=refresh_stale,
            allow_unmanaged=allow_unmanaged,
            agree_timeout_s=agree_timeout_s,
            acknowledge_timeout_s=acknowledge_timeout_s,
        )
        self._trainer: Any = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Watch from before the restore, where the strategy restores after its setup, and look once."""
        self._attach(trainer)

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """Look before sanity checking runs the first forward."""
        self._check()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Look before the first batch."""
        self._check()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Watch and look, if this is ``Trainer.validate``; inside a fit there is nothing new to see."""
        if trainer.state.fn == "validate":
            self._attach(trainer)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Watch and look before the first batch."""
        self._attach(trainer)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Watch and look before the first batch."""
        self._attach(trainer)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """Look before the checkpoint is written, so that a diverged run overwrites no good one."""
        # A checkpoint that is written because of an exception must not replace that exception with ours.
        if self._trainer is not None and not trainer.interrupted:
            self._check(Event.SAVE)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Take the hooks away."""
        self._detach()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take the hooks away."""
        self._detach()

    def _attach(self, trainer: Any) -> None:
        self._detach()
        self._trainer = trainer
        self._guard.watch(trainer.strategy.model, trainer.optimizers)
        self._check()

    def _check(self, event: Event = Event.CALL) -> None:
        self._guard.check(self._trainer.strategy.model, self._trainer.optimizers, event=event)

    def _detach(self) -> None:
        self._guard.unwatch()
        self._trainer = None

    def _wandb_run(self) -> wandb.Run | None:
        """Return the WandbLogger's run, else the active one; neither can exist before wandb is imported."""
        if sys.modules.get("wandb") is None:
            return None
        import wandb

        for logger in self._trainer.loggers if self._trainer is not None else ():
            run = getattr(logger, "experiment", None)
            if isinstance(run, wandb.Run):
                return run
        return wandb.run
