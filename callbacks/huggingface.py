"""The callback for Hugging Face's Trainer: a thin adapter that tells a Guard when to look."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from fsdp_guard.guard import Guard
from fsdp_guard.report import Event
from fsdp_guard.reporters import Reporter
from fsdp_guard.reporters.wandb import WandbReporter

try:
    from transformers import TrainerCallback
except ModuleNotFoundError as error:
    raise ImportError(
        "HfFsdpGuard is a callback for Hugging Face's Trainer, and 'transformers' is not installed. Install it with: "
        "pip install 'fsdp-guard[huggingface]'. In a loop of your own, use fsdp_guard.Guard."
    ) from error


class HfFsdpGuard(TrainerCallback):
    """Stops a run whose model and sharding runtime no longer agree on the parameters.

    Looks when training starts, which is after a resume, after each load, before the first forward and the first
    optimizer step after it, before each checkpoint is written, and when training ends; in ``Trainer.evaluate`` and
    ``predict`` of a model that was not trained, after the first batch. What one rank finds, all ranks raise.

    The Trainer hands callbacks the model that it was given: under FSDP2 that is the sharded model itself, while a
    ``DistributedDataParallel`` wrapper stays out of sight, and the guard says that it found no runtime.

    W&B: reports to the active run, such as that of transformers' own ``WandbCallback``, else to the log alone.

    Args:
        reporters: Callables that take a report, instead of the one that reports to W&B.
        finish_run: Finish the W&B run with exit code 1 before raising, so that its alert outlives the process.
            Not used when ``reporters`` is given.
        options: The other arguments of :class:`fsdp_guard.Guard`, such as ``on_divergence="warn"``.

    Raises:
        TypeError, ValueError: As ``Guard``.

    Example::

        >>> from fsdp_guard.callbacks import HfFsdpGuard
        >>> trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[HfFsdpGuard()])
    """

    def __init__(self, reporters: Sequence[Reporter] | None = None, finish_run: bool = True, **options: Any) -> None:
        if reporters is None:
            reporters = [WandbReporter(finish_run=finish_run)]
        self._guard = Guard(reporters=reporters, **options)
        self._watched: weakref.ref[Any] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Watch, and look before the first batch."""
        self._attach(given)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Look before a checkpoint is written, so that a diverged run overwrites no good one."""
        # Trainer's own callbacks come first, so this is decided by now.
        if control.should_save:
            self._check(given, Event.SAVE)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """As at the end of a step."""
        self.on_step_end(args, state, control, **given)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Look at what ``load_best_model_at_end`` has left. Later loads, as before an evaluation, stay watched."""
        self._check(given)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Watch and look once, if the model was not trained here."""
        if self._watched is None or self._watched() is not given["model"]:
            self._attach(given)

    def _attach(self, given: dict[str, Any]) -> None:
        self._guard.unwatch()
        self._guard.watch(given["model"], _optimizers(given))
        self._watched = weakref.ref(given["model"])
        self._check(given)

    def _check(self, given: dict[str, Any], event: Event = Event.CALL) -> None:
        self._guard.check(given["model"], _optimizers(given), event=event)


def _optimizers(given: dict[str, Any]) -> Any:
    """Return the optimizer that Accelerate's ``AcceleratedOptimizer`` wraps, which runs the step hooks."""
    optimizer = given.get("optimizer")
    return getattr(optimizer, "optimizer", optimizer)
