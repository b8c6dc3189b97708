"""The command line: ``fsdp-guard``."""

from __future__ import annotations

import argparse
import importlib.util
import json
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
        The exit status: 0 for success; 1 if the demo went other than it should, the doctor found a runtime that it does
        not guard, or W&B refused; 2 for a wrong call or installation.
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
    _add_wandb(commands)
    parsed = parser.parse_args(arguments)
    if parsed.command == "doctor":
        return _doctor()
    return _demo(parsed.output) if parsed.command == "demo" else _set_up_wandb(parsed)


def _add_wandb(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    wandb = commands.add_parser("wandb", help="set Weights & Biases up for a team").add_subparsers(required=True)
    setup = wandb.add_parser(
        "setup",
        help="create, or bring up to date, the automation that alerts on a divergence, and a workspace that shows it",
    )
    setup.add_argument("--entity", required=True, help="W&B team or user")
    setup.add_argument("--project", required=True, help="W&B project, which must exist")
    receiver = setup.add_mutually_exclusive_group()
    receiver.add_argument("--slack", metavar="CHANNEL", help="Slack channel (default: the only one that the team has)")
    receiver.add_argument("--webhook", metavar="NAME", help="webhook of the team, instead of Slack")
    setup.add_argument("--dry-run", action="store_true", help="print what would be created, as JSON; change nothing")


def _set_up_wandb(parsed: argparse.Namespace) -> int:
    if not _has_packages(("wandb", "wandb_workspaces"), "wandb setup", extra="dashboard"):
        return 2
    from fsdp_guard.dashboard import SetupError, set_up

    try:
        outcome = set_up(
            parsed.entity, parsed.project, slack=parsed.slack, webhook=parsed.webhook, dry_run=parsed.dry_run
        )
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    name, done = outcome.definition["automation"]["name"], "created" if outcome.is_new else "updated"
    if parsed.dry_run:
        print(json.dumps(outcome.definition, indent=2))
        print(f"Nothing was changed; automation {name!r} would be {done}.", file=sys.stderr)
    else:
        print(f"Automation {name!r} {done}. Workspace: {outcome.url}")
    return 0


def _has_packages(packages: Sequence[str], command: str, *, extra: str) -> bool:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        needs = f"fsdp-guard {command} needs {', '.join(missing)}."
        print(f"{needs} Install with: pip install 'fsdp-guard[{extra}]'", file=sys.stderr)
    return not missing


def _demo(output: Path) -> int:
    if not _has_packages(_DEMO_PACKAGES, "demo", extra="demo"):
        return 2
    from fsdp_guard.demo.stage import run_demo

    return run_demo(output)


def _doctor() -> int:
    # In a process of its own, which makes a process group; and on the CPU, as in a container build.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, "-m", "fsdp_guard.doctor"], env=environment, check=False).returncode
