"""Report to Weights & Biases."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from fsdp_guard.report import Divergence, Report

if TYPE_CHECKING:
    import wandb

ALERT_TITLE = "fsdp_guard: holder divergence"
"""Title of every alert; W&B automations and chat filters may match it."""

_COLUMNS: list[str | int] = ["kind", "fqn", "runtime", "detail", "cause", "remedy", "event", "rank"]


class WandbReporter:
    """Reports to a W&B run: two metrics at every event; at a divergence an alert, a table and summary keys as well.

    - Metrics ``fsdp_guard/diverged`` (0 or 1) and ``fsdp_guard/divergences`` (how many); also
      ``fsdp_guard/refreshed`` where stale compute weights were refreshed. Those of a clean look join the next row that
      the script logs, so they do not move the run's step; those of a divergence are a row of their own.
    - An alert of level ERROR with the title ``fsdp_guard: holder divergence``, whose text is the report.
    - Table ``fsdp_guard/table``: a row for each divergence; metrics ``fsdp_guard/kind/<kind>``: its rows of each kind.
    - Summary keys ``fsdp_guard/event``, ``fsdp_guard/ranks``, ``fsdp_guard/kinds``, and ``fsdp_guard/first_fqn``,
      ``fsdp_guard/first_cause``, ``fsdp_guard/first_remedy`` of the first of them, from the last look that diverged;
      a run without them had none.

    A divergence of another rank is reported like one of this rank: it is enough that one rank has a run.

    Nothing of a tensor but its name, shape and dtype leaves the process.

    Args:
        run: The run to report to, or a callable that returns it or ``None``, asked at each report. Default:
            ``wandb.run``, the active run, if there is one.
        finish_run: Finish the run with exit code 1 before the guard raises. In offline mode an alert is on disk only
            after that, and a launcher kills the other ranks at the first failure (measured with wandb 0.31).
    """

    def __init__(
        self, run: wandb.Run | Callable[[], wandb.Run | None] | None = None, *, finish_run: bool = True
    ) -> None:
        self._run = run
        self._finish_run = finish_run

    def __call__(self, report: Report) -> None:
        """Send ``report`` to the run, if there is one."""
        run = self._find_run()
        if run is None:
            return
        metrics = {
            "fsdp_guard/diverged": int(bool(report.divergences)),
            "fsdp_guard/divergences": len(report.divergences) + report.omitted,
        }
        if report.refreshed:
            metrics["fsdp_guard/refreshed"] = len(report.refreshed)
        if report.divergences:
            self._report_divergences(run, report, metrics)
        else:
            run.log(metrics, commit=False)

    def _report_divergences(self, run: wandb.Run, report: Report, metrics: dict[str, int]) -> None:
        import wandb

        # The alert goes first: it is what wakes somebody up, should one of the others fail.
        run.alert(title=ALERT_TITLE, text=str(report), level="ERROR", wait_duration=0)
        table = wandb.Table(columns=_COLUMNS, data=[_row(report, d) for d in report.divergences])
        kinds = Counter(f"fsdp_guard/kind/{d.kind}" for d in report.divergences)
        run.log({**metrics, **kinds, "fsdp_guard/table": table})
        first = report.divergences[0]
        run.summary.update(
            {
                "fsdp_guard/event": report.event.value,
                "fsdp_guard/ranks": list(report.failed_ranks),
                "fsdp_guard/kinds": sorted({d.kind.value for d in report.divergences}),
                "fsdp_guard/first_fqn": first.fqn,
                "fsdp_guard/first_cause": first.kind.cause,
                "fsdp_guard/first_remedy": first.remedy,
            }
        )

    def is_reporting(self) -> bool:
        """Whether there is a run, so that other ranks may leave it to this one to report."""
        return self._find_run() is not None

    def before_raise(self, report: Report) -> None:
        """Finish the run, so that the alert outlives the process."""
        run = self._find_run()
        if run is not None and self._finish_run:
            run.finish(exit_code=1)

    def _find_run(self) -> wandb.Run | None:
        if callable(self._run):
            return self._run()
        if self._run is not None:
            return self._run
        # A run can only be active if the script has imported wandb; importing it here would cost a second for nothing.
        module = sys.modules.get("wandb")
        return module.run if module is not None else None


def _row(report: Report, divergence: Divergence) -> list[str | int]:
    d = divergence
    return [d.kind.value, d.fqn, d.runtime, d.detail, d.kind.cause, d.remedy, report.event.value, d.rank]
