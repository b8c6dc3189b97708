"""How the benchmarks time what runs on the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import fsdp_guard


def medians(functions: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Call the functions in turn, and return the median seconds of each; a first round warms up."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        for name, function in functions.items():
            started = time.perf_counter()
            function()
            if repeat:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(series) for name, series in times.items()}


def expect_sound(report: fsdp_guard.Report, parameters: int) -> None:
    """Fail unless the report is of a look that compared all parameters and found nothing."""
    if not report.ok or report.parameters_checked != parameters:
        raise AssertionError(str(report))
