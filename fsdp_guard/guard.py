"""What to do about a look: report it, and stop the run if module and holders have diverged."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from fsdp_guard.holders import Inventory, take_inventory
from fsdp_guard.inputs import as_modules, as_optimizers, as_patterns, named_roots
from fsdp_guard.invariants import Values, examine
from fsdp_guard.report import Event, HolderDivergenceError, NoHoldersError, Report
from fsdp_guard.reporters import Reporter
from fsdp_guard.reporters.log import LogReporter
from fsdp_guard.reporters.wandb import WandbReporter
from fsdp_guard.verdict import Verdicts, merge
from fsdp_guard.watch import Watch

OnDivergence = Literal["raise", "warn"] | Callable[[Report], object]

_logger = logging.getLogger(__name__)

_numbers = itertools.count()


class Guard:
    """Compares the parameters that a module shows with those that its sharding runtime holds.

    The outcome of every look goes to the log, and to the reporters.

    Args:
        reporters: Callables that take a report, for example ``WandbReporter()`` or a function of your own. Default: a
            ``WandbReporter()``, which does nothing while there is no active W&B run.
        on_divergence: What to do when a divergence was reported: ``"raise"`` a ``HolderDivergenceError``, ``"warn"``
            (the log and the reporters have it already) and go on, or a callable that takes the report.
        require_holders: Raise ``NoHoldersError`` when no known runtime manages the model, instead of saying so once
            at warning level.
        strict_load: Judge compute weights right after a load. By default a load that leaves them stale is reported as
            pending, since the next line of the script may refresh them, and judged before the first forward.
        refresh_stale: Let the runtime refresh stale compute weights before the first forward, and report that, instead
            of treating them as a divergence.
        allow_unmanaged: FQNs of trainable parameters that no holder owns on purpose, such as those that were handed to
            FSDP2's ``ignored_params``, or patterns of them with ``*`` and ``?``.
        agree_timeout_s: Longest wait for the other ranks in ``check``, in seconds; after it, this rank goes on with
            its own verdict.
        acknowledge_timeout_s: Longest wait before raising for the rank that reports to W&B to have done so, in seconds.

    Where torch.distributed is initialised, a divergence on one rank is one on all: each rank hears of it at its next
    look, over the process group's store and without the GPU, and does what ``on_divergence`` says. Create the same
    guards in the same order on every rank.

    Raises:
        TypeError: A reporter is not callable, or ``allow_unmanaged`` is no sequence of strings.
        ValueError: ``on_divergence`` is none of the above, or a timeout is not positive.

    Example::

        >>> guard = fsdp_guard.Guard()
        >>> guard.watch(model, optimizers=optimizer)  # after fully_shard() and after building the optimizer
        >>> model.load_state_dict(checkpoint)  # raises here if the load went past the runtime
    """

    def __init__(
        self,
        *,
        reporters: Sequence[Reporter] | None = None,
        on_divergence: OnDivergence = "raise",
        require_holders: bool = False,
        strict_load: bool = False,
        refresh_stale: bool = False,
        allow_unmanaged: Sequence[str] = (),
        agree_timeout_s: float = 60.0,
        acknowledge_timeout_s: float = 10.0,
    ) -> None:
        if on_divergence not in ("raise", "warn") and not callable(on_divergence):
            raise ValueError(f'on_divergence must be "raise", "warn" or a callable, got {on_divergence!r}.')
        chosen = (WandbReporter(),) if reporters is None else tuple(reporters)
        for reporter in chosen:
            if not callable(reporter):
                raise TypeError(f"a reporter must be a callable that takes a report, got {type(reporter).__name__}.")
        for name, seconds in (("agree", agree_timeout_s), ("acknowledge", acknowledge_timeout_s)):
            if not seconds > 0:
                raise ValueError(f"{name}_timeout_s must be a positive number of seconds, got {seconds!r}.")
        self._reporters: tuple[Reporter, ...] = (LogReporter(), *chosen)
        self._on_divergence = on_divergence
        self._require_holders = require_holders
        self._strict_load = strict_load
        self._refresh_stale = refresh_stale
        self._allow_unmanaged = as_patterns(allow_unmanaged)
        self._said_nothing_found = False
        self._watch: Watch | None = None
        self._verdicts = Verdicts(next(_numbers), agree_timeout_s, acknowledge_timeout_s)
        self._last_report = Report()
        self._last_look_s = 0.0
        self._overheard: Report | None = None

    def check(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizers: Any = None,
        *,
        event: Event | str = Event.CALL,
        values: bool = False,
        collective: bool = True,
    ) -> Report:
        """Look now, report, and raise if something has diverged, here or on another rank.

        Call it where parameters are all sharded or all unsharded: before or after a forward or a step, not from
        another thread during one. Without ``values`` it costs host time only: no kernel, no copy, no synchronisation.

        Args:
            model: The model, or a sequence of model chunks.
            optimizers: All optimizers of the model: one, a sequence, or ``None`` to leave them out.
            event: What the report gives as the reason, for example ``"save"`` right before a checkpoint is written.
            values: Also compare compute weights with main weights, where the runtime keeps both. This reads the
                weights and synchronises with the device once.
            collective: All ranks make this call, so that none goes on before all are known to be sound. Set it to
                ``False`` where only some do, as under ``if rank == 0``: that rank then hears of the others, but does
                not wait for them.

        Returns:
            The report.

        Raises:
            HolderDivergenceError: Something has diverged, and ``on_divergence`` is ``"raise"``.
            NoHoldersError: No known runtime manages the model, and ``require_holders`` is set.
            UnsupportedLayoutError: A known runtime was found in a version whose holders fsdp_guard cannot read.
            TypeError: ``model`` holds something that is no module, or ``optimizers`` something that is no optimizer.
            ValueError: ``model`` is an empty sequence, or ``event`` is none of ``Event``.
        """
        roots = named_roots(as_modules(model))
        what = Values(compare=values, refresh=self._refresh_stale)
        given = as_optimizers(optimizers)
        report = examine(lambda: take_inventory(roots), given, Event(event), what, self._allow_unmanaged)
        return self._conclude(report, collective)

    def watch(self, model: nn.Module | Sequence[nn.Module], optimizers: Any = None) -> Guard:
        """From now on, look after each load, before the first forward and before the first optimizer step.

        The first two also compare compute weights with main weights, where the runtime keeps both.

        Call it after the model was sharded. A later load, of the model or of any module in it, makes the next forward
        and the next step first ones again. Between those, nothing of the guard is left on the path of a step. Watching
        keeps neither the model nor the optimizers alive.

        Args:
            model: The model, or a sequence of model chunks.
            optimizers: All optimizers of the model: one, a sequence, or ``None`` to leave them out.

        Returns:
            This guard, so that ``with guard.watch(model, optimizers):`` ends the watch.

        Raises:
            RuntimeError: This guard watches a model already.
            NoHoldersError: No known runtime manages the model, and ``require_holders`` is set.
            UnsupportedLayoutError: A known runtime was found in a version whose holders fsdp_guard cannot read.
            TypeError: ``model`` holds something that is no module, or ``optimizers`` something that is no optimizer.
            ValueError: ``model`` is an empty sequence.
        """
        if self._watch is not None and self._watch.alive:
            raise RuntimeError(
                "this guard watches a model already. Call guard.unwatch() first, hand all chunks of one model over in "
                "one call, or use a second Guard for a second model."
            )
        modules = as_modules(model)
        watch = Watch(modules, as_optimizers(optimizers), self._look)
        if not watch.found_holders:
            try:
                self._say_nothing_found(Report())
            except NoHoldersError:
                watch.remove()
                raise
        self._watch = watch
        self._listen()
        return self

    def unwatch(self) -> None:
        """Take every hook away. Does nothing if nothing is watched."""
        if self._watch is not None:
            self._watch.remove()
            self._watch = None

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.unwatch()

    def _look(self, take: Callable[[], Inventory], optimizers: Sequence[Any], event: Event) -> Report:
        """Look for a watch."""
        values = {
            Event.LOAD: Values(compare=True, pending=not self._strict_load),
            Event.FIRST_FORWARD: Values(compare=True, refresh=self._refresh_stale),
        }
        self._last_look_s = time.monotonic()
        report = examine(take, optimizers, event, values.get(event, Values()), self._allow_unmanaged)
        return self._conclude(report, collective=False)

    def _conclude(self, report: Report, collective: bool) -> Report:
        # A load of a part that holds nothing sharded is no news; what watch() and check() were given is.
        if report.event is Event.LOAD and not report.parameters_checked:
            return report
        self._listen()
        with self._verdicts.lock:
            self._last_report = report
            report = self._verdicts.share(report, collective=collective)
            overheard, self._overheard = self._overheard, None
        if report.divergences or overheard is None:
            self._tell(report)
        else:
            report = merge(report, [overheard])
        if report.divergences:
            self._act(report)
        return report

    def _tell(self, report: Report) -> None:
        if not report.parameters_checked and not report.divergences:
            self._say_nothing_found(report)
            return
        for reporter in self._reporters:
            _call(reporter, report)
        if report.divergences and self._on_divergence == "raise":
            reports = self._is_reporting()
            for reporter in self._reporters:
                _call(getattr(reporter, "before_raise", None), report)
            self._verdicts.settle(reports=reports)

    def _act(self, report: Report) -> None:
        if callable(self._on_divergence):
            self._on_divergence(report)
        elif self._on_divergence == "raise":
            raise HolderDivergenceError(report)

    def _is_reporting(self) -> bool:
        return any(_call(getattr(reporter, "is_reporting", None)) for reporter in self._reporters)

    def _listen(self) -> None:
        """Hear of other ranks in the background while first ones are due, if it is this rank that tells W&B."""
        if self._is_reporting():
            self._verdicts.announce()
            if self._watch is not None:
                self._verdicts.listen(self._overhear)

    def _overhear(self) -> bool:
        """Report what other ranks have published; this rank's next look raises. Return whether to go on listening."""
        with self._verdicts.lock:
            heard = self._verdicts.hear()
            if heard:
                self._overheard = merge(replace(self._last_report, event=heard[0].event, divergences=()), heard)
                self._tell(self._overheard)
        if self._watch is None or not self._watch.alive:
            return False
        # The others may be that much later than this rank.
        return self._watch.armed or time.monotonic() - self._last_look_s < self._verdicts.agree_timeout_s

    def _say_nothing_found(self, report: Report) -> None:
        if self._require_holders:
            raise NoHoldersError(report)
        if not self._said_nothing_found:
            self._said_nothing_found = True
            _logger.warning("%s", report)


def _call(function: Callable[..., object] | None, *report: Report) -> object:
    """Call a reporter's function; one that fails must not hide what it was to report."""
    if function is None:
        return None
    try:
        return function(*report)
    except Exception:
        _logger.exception(
            "fsdp_guard: the reporter %r failed; the report itself: %s", function, *report or ("none yet",)
        )
        return None
