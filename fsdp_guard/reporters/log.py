"""Report to Python's logging."""

from __future__ import annotations

import logging

from fsdp_guard.report import Report

_logger = logging.getLogger("fsdp_guard")


class LogReporter:
    """Logs each report as one record of the logger ``fsdp_guard``.

    ERROR for a divergence, WARNING for compute weights that are pending or were refreshed, INFO otherwise. The
    record carries ``report.to_dict()`` as its attribute ``fsdp_guard``, for structured logs.
    """

    def __call__(self, report: Report) -> None:
        """Log ``report``."""
        level = logging.WARNING if report.pending or report.refreshed else logging.INFO
        if report.divergences:
            level = logging.ERROR
        _logger.log(level, "%s", report, extra={"fsdp_guard": report.to_dict()})
