"""What an installed fsdp-guard consists of."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_wheel_has_the_callbacks_inside_the_package_and_nothing_else_at_the_top(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    result = subprocess.run(build, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"fsdp_guard"}
    assert "fsdp_guard/py.typed" in names
    assert "fsdp_guard/callbacks/__init__.py" in names
    assert "fsdp_guard/callbacks/lightning.py" in names
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "fsdp_guard").rglob("*.py")}
    assert modules <= set(names), "a folder is missing from the packages in pyproject.toml"
