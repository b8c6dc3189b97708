"""The command line: ``fsdp-guard``."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_DEMO_PACKAGES = ("megatron_fsdp", "matplotlib", "wandb")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Without the program's name. Default: those of the process.

    Returns:
        The exit status: 0 for success; 1 if the demo went other than it should, or the doctor found a runtime that it
        does not guard; 2 for a wrong call or installation.
    """
    parser = argparse.ArgumentParser(
        prog="fsdp-guard", description="Checks that a sharding runtime and the module it wraps agree on the parameters."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="make Megatron-LM issue 6087 happen, catch it, and fix it")
    demo.add_argument(
        "--output",
        type=Path,
        default=Path("fsdp-guard-demo"),
        help="folder for the plot and the offline W&B run (default: %(default)s)",
    )
    commands.add_parser("doctor", help="try every sharding runtime that is installed; exit 1 if one is not guarded")
    parsed = parser.parse_args(arguments)
    return _doctor() if parsed.command == "doctor" else _demo(parsed.output)


def _demo(output: Path) -> int:
    missing = [name for name in _DEMO_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"fsdp-guard demo needs {', '.join(missing)}. Install with: pip install 'fsdp-guard[demo]'", file=sys.stderr
        )
        return 2
    from fsdp_guard.demo.stage import run_demo

    return run_demo(output)


def _doctor() -> int:
    # In a process of its own, which makes a process group; and on the CPU, as in a container build.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, "-m", "fsdp_guard.doctor"], env=environment, check=False).returncode
