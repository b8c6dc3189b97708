"""``fsdp-guard doctor`` tries what is installed, and fails a build whose runtime would not be guarded."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from fsdp_guard import cli
from fsdp_guard.holders import RUNTIMES

RUNTIME_NAMES = {runtime.name for runtime in RUNTIMES}


def run_doctor(patch: str = "") -> tuple[int, str]:
    """Run it in a process of its own, where ``patch`` has changed what is installed."""
    script = f"import sys\n{patch}\nfrom fsdp_guard.doctor import main\nsys.exit(main())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=False)
    return done.returncode, done.stdout + done.stderr


def test_everything_that_is_installed_is_guarded(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    printed, complaints = capfd.readouterr()
    head, _, *lines = printed.splitlines()
    assert f"torch {version('torch')}" in head
    assert {line.split()[0] for line in lines} == RUNTIME_NAMES
    assert all(line.split()[1] == "guarded:" for line in lines)
    assert f"megatron-fsdp {version('megatron-fsdp')}, megatron_fsdp.experimental" in printed
    assert complaints == ""


def test_a_runtime_that_is_not_installed_is_said_and_is_no_failure() -> None:
    status, printed = run_doctor("sys.modules['megatron_fsdp'] = None")
    assert status == 0, printed
    assert "mfsdp_v2     not installed (megatron-fsdp or megatron-core)" in printed
    assert "torch_ddp    guarded" in printed


UNKNOWN_LAYOUT = """
from megatron_fsdp.experimental.parameter_group import FsdpParameterGroup as Group
def __getattribute__(self, name, get=object.__getattribute__):
    if name == "main_weight" and sys._getframe(1).f_code.co_filename.endswith("holders/base.py"):
        raise AttributeError(name)
    return get(self, name)
Group.__getattribute__ = __getattribute__
"""

UNSEEN = "import fsdp_guard.holders.mfsdp_v2 as reader\nreader._is_unit_class = lambda cls: False"

BROKEN_INSTALLATION = """
import importlib.util
find = importlib.util.find_spec
def find_spec(name):
    if name == "megatron_fsdp.experimental":
        raise OSError("libcudart.so.13: cannot open shared object file")
    return find(name)
importlib.util.find_spec = find_spec
"""

CANNOT_WRAP = """
import torch
def refuse(*args, **options):
    raise ValueError("no such placement")
import megatron_fsdp.experimental
megatron_fsdp.experimental.fully_shard = refuse
"""

BLIND = "import fsdp_guard.doctor\nfsdp_guard.doctor._replace_a_parameter = lambda model: None"


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        (UNKNOWN_LAYOUT, "main_weight"),
        (UNSEEN, "should agree with its holders"),
        (BROKEN_INSTALLATION, "Cannot be imported: OSError: libcudart.so.13"),
        (CANNOT_WRAP, "could not be wrapped on the CPU: ValueError: no such placement"),
        (BLIND, "was replaced, and that was not seen"),
    ],
    ids=["unknown layout", "not recognised", "broken installation", "cannot wrap", "nothing found"],
)
def test_what_is_not_guarded_fails_the_build(patch: str, words: str) -> None:
    status, printed = run_doctor(patch)
    assert status == 1, printed
    (at,) = [number for number, line in enumerate(printed.splitlines()) if line.startswith("mfsdp_v2     NOT GUARDED")]
    assert words in " ".join(printed.splitlines()[at + 1 :])


def test_megatron_core_carries_the_same_runtimes(tmp_path: Path) -> None:
    """Under its own import path, beside the package or without it."""
    import megatron_fsdp

    inner = tmp_path / "megatron" / "core" / "distributed" / "fsdp" / "src"
    inner.mkdir(parents=True)
    (inner / "megatron_fsdp").symlink_to(Path(megatron_fsdp.__file__).parent)
    status, printed = run_doctor(f"sys.path.insert(0, {str(tmp_path)!r})")
    assert status == 0, printed
    for name in ("", ".experimental"):
        assert f"megatron.core.distributed.fsdp.src.megatron_fsdp{name}\n" in printed
