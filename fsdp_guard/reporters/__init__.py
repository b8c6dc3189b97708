"""Where a report goes.

A reporter is a callable that takes a report. If it also has a method ``before_raise(report)``, the guard calls that
right before it raises. If it has a method ``is_reporting()`` that returns true, this rank hears of other ranks'
divergences as they happen, and the others wait for it before they raise.
"""

from __future__ import annotations

from collections.abc import Callable

from fsdp_guard.report import Report

Reporter = Callable[[Report], object]
