"""``fsdp-guard doctor``: try each runtime that is installed, and say whether this fsdp_guard guards it.

A version number proves little about a layout, so a small model is really put under each runtime, looked at, broken and
looked at again: on the CPU, in a process group of one rank.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import platform
import sys
import traceback
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fsdp_guard.demo.cpu import install_cuda_stand_ins
from fsdp_guard.holders import RUNTIMES
from fsdp_guard.holders.base import Runtime
from fsdp_guard.invariants import inspect
from fsdp_guard.report import UnsupportedLayoutError


class Finding(NamedTuple):
    """What was found of a runtime in one of the modules that offer it.

    Attributes:
        runtime: The runtime's name.
        source: The module.
        package: The distribution that it comes in, and its version.
        problem: Why a model under this runtime would not be guarded; empty where it is.
    """

    runtime: str
    source: str
    package: str
    problem: str


def main() -> int:
    """Print what is installed and whether it is guarded.

    Returns:
        The exit status: 1 if something is not guarded, else 0.
    """
    print(f"fsdp-guard {version('fsdp-guard')}, Python {platform.python_version()}, torch {torch.__version__}\n")
    if not dist.is_available():
        print("This torch is built without torch.distributed: there is no runtime to guard.")
        return 1
    # What runtimes remark about a model of 20 parameters on the CPU is of no use here.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    install_cuda_stand_ins()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    findings = [finding for runtime in RUNTIMES for finding in examine(runtime)]
    dist.destroy_process_group()
    print("\n".join(describe(findings)))
    return int(any(finding.problem for finding in findings))


def examine(runtime: Runtime) -> Iterator[Finding]:
    """Try ``runtime`` in each module that offers it and is installed."""
    for source, distribution in runtime.sources.items():
        try:
            if importlib.util.find_spec(source.partition(".")[0]) is None or importlib.util.find_spec(source) is None:
                continue
        except ModuleNotFoundError:
            continue  # a package above it has no such module
        except Exception as error:
            yield Finding(runtime.name, source, _installed(distribution), _failure("Cannot be imported", error))
            continue
        yield Finding(runtime.name, source, _installed(distribution), _try(runtime, source))


def describe(findings: list[Finding]) -> Iterator[str]:
    """Yield the lines to print, the runtimes that are missing included."""
    for runtime in RUNTIMES:
        found = [finding for finding in findings if finding.runtime == runtime.name]
        if not found:
            yield f"{runtime.name:12} not installed ({' or '.join(dict.fromkeys(runtime.sources.values()))})"
        for finding in found:
            verdict = "NOT GUARDED" if finding.problem else "guarded"
            yield f"{runtime.name:12} {verdict}: {finding.package}, {finding.source}"
            yield from (f"    {line}" for line in finding.problem.splitlines())


def _try(runtime: Runtime, source: str) -> str:
    """Return why a model under ``runtime`` would not be guarded."""
    try:
        model = runtime.wrap(importlib.import_module(source), nn.Sequential(nn.Linear(4, 4)).bfloat16())
    except Exception as error:
        return _failure("A small model could not be wrapped on the CPU", error)
    try:
        report = inspect(model, values=True)
        if not report.ok or report.runtimes != (runtime.name,) or report.parameters_checked != 2:
            return f"A model that was just wrapped should agree with its holders. Seen instead:\n{report}"
        _replace_a_parameter(model)
        if inspect(model).ok:
            return "A parameter was replaced, and that was not seen."
    except UnsupportedLayoutError as error:
        return str(error)
    except Exception as error:
        return _failure("The holders could not be read", error)
    return ""


def _replace_a_parameter(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            # Not a DTensor: that FSDP2 would take over, rightly, at its first forward.
            module.weight = nn.Parameter(torch.zeros(module.weight.shape, dtype=module.weight.dtype))


def _installed(distribution: str) -> str:
    try:
        return f"{distribution} {version(distribution)}"
    except PackageNotFoundError:
        return f"{distribution} (no version recorded)"


def _failure(what: str, error: Exception) -> str:
    (*_, last) = traceback.format_exception_only(error)
    return f"{what}: {last.strip()}"


if __name__ == "__main__":
    sys.exit(main())
