"""``fsdp-guard wandb setup`` against a W&B server on this machine: what it sends, and what it says if W&B does not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdp_guard import cli
from tests.wandb_server import KEY, OTHER_SLACK, SLACK, WEBHOOK, WandbServer

DEFINITION = Path(__file__).parents[1] / "configs" / "wandb.json"
MUTATIONS = {"CreateAutomation", "UpdateAutomation", "UpsertView2"}


@pytest.fixture(scope="module")
def running() -> Iterator[WandbServer]:
    with WandbServer() as server:
        yield server


@pytest.fixture
def server(running: WandbServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> WandbServer:
    running.reset()
    monkeypatch.setenv("WANDB_BASE_URL", running.url)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("HOME", str(tmp_path))  # no login of who runs the tests
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.chdir(tmp_path)
    return running


def set_up(*options: str, project: str = "llm") -> int:
    return cli.main(["wandb", "setup", "--entity", "lab", "--project", project, *options])


def panels_of(server: WandbServer) -> list[tuple[str, list[tuple[str, Any]]]]:
    """Return sections of the one view, each with its panels' kinds and what they plot."""
    (view,) = server.views.values()
    sections = json.loads(view["spec"])["section"]["panelBankConfig"]["sections"]
    return [
        (
            section["name"],
            [(p["viewType"], p["config"].get("metrics") or p["config"].get("panel2Config")) for p in section["panels"]],
        )
        for section in sections
    ]


def test_creates_the_automation_and_the_workspace(server: WandbServer, capfd: pytest.CaptureFixture[str]) -> None:
    assert set_up() == 0
    (sent,) = [variables["input"] for variables in server.sent("CreateAutomation")]
    assert (sent["name"], sent["enabled"], sent["scopeID"]) == ("fsdp_guard in llm", True, "UHJvamVjdDox")
    assert sent["triggeringEventType"] == "RUN_METRIC"
    threshold = json.loads(sent["eventFilter"])["run_metric_filter"]["threshold_filter"]
    assert threshold == {
        "name": "fsdp_guard/diverged",
        "agg_op": "MAX",
        "window_size": 1,
        "cmp_op": "$gt",
        "threshold": 0,
    }
    action = server.triggers[0]["action"]
    assert (action["integration"], action["severity"]) == (SLACK, "ERROR")
    assert action["title"] == "fsdp_guard: holder divergence"
    assert "not what is trained" in action["message"]
    ((name, panels), *_) = panels_of(server)
    assert name == "fsdp_guard"
    assert panels[0] == ("Bar Chart", ["fsdp_guard/diverged"])
    assert panels[1][0] == "Bar Chart"
    assert "fsdp_guard/kind/replaced_parameter" in panels[1][1]
    assert panels[2][0] == "Weave"
    (view,) = server.views.values()
    assert "summary:fsdp_guard/first_fqn" in view["spec"]
    printed, _ = capfd.readouterr()
    assert f"Automation 'fsdp_guard in llm' created. Workspace: {server.url}/lab/llm?nw=" in printed


@pytest.mark.parametrize("by_entity", [True, False])
def test_a_second_run_changes_nothing(server: WandbServer, by_entity: bool) -> None:
    server.by_entity = by_entity
    assert set_up() == 0
    triggers, views, panels = json.dumps(server.triggers), list(server.views), panels_of(server)
    assert set_up() == 0
    assert len(server.sent("CreateAutomation")) == len(server.sent("UpdateAutomation")) == 1
    assert (json.dumps(server.triggers), list(server.views), panels_of(server)) == (triggers, views, panels)


def test_what_the_team_changed_stays(server: WandbServer) -> None:
    assert set_up() == 0
    server.triggers[0]["enabled"] = False
    (view,) = server.views.values()
    spec = json.loads(view["spec"])
    sections = spec["section"]["panelBankConfig"]["sections"]
    sections.append({**sections[0], "__id__": "ours", "name": "ours"})
    view["spec"] = json.dumps(spec)
    assert set_up() == 0
    assert server.triggers[0]["enabled"] is False
    assert [name for name, _ in panels_of(server)][:2] == ["fsdp_guard", "ours"]


def test_a_deleted_workspace_is_made_again(server: WandbServer) -> None:
    assert set_up() == 0
    server.views.clear()
    assert set_up() == 0
    (name,) = server.views
    assert name.removeprefix("nw-").removesuffix("-v") in server.triggers[0]["description"]
    assert len(server.triggers) == 1


def test_an_automation_of_another_project_is_left_alone(server: WandbServer) -> None:
    assert set_up() == 0
    server.triggers[0]["scope"] = {"__typename": "Project", "id": "UHJvamVjdDoy", "name": "llm"}
    other = json.dumps(server.triggers[0])
    assert set_up() == 0
    assert len(server.sent("CreateAutomation")) == 2
    assert json.dumps(server.triggers[0]) == other


def test_dry_run_sends_nothing_and_prints_the_definition(
    server: WandbServer, capfd: pytest.CaptureFixture[str]
) -> None:
    assert set_up("--dry-run") == 0
    printed, said = capfd.readouterr()
    assert json.loads(printed) == json.loads(DEFINITION.read_text())
    assert "Nothing was changed; automation 'fsdp_guard in llm' would be created." in said
    assert server.requests
    assert MUTATIONS.isdisjoint(name for name, _ in server.requests)


def test_slack_channel_by_name(server: WandbServer) -> None:
    server.integrations = [SLACK, OTHER_SLACK]
    assert set_up("--slack", "#chatter") == 0
    assert server.triggers[0]["action"]["integration"] == OTHER_SLACK
    assert set_up("--slack", "alerts") == 0
    assert server.triggers[0]["action"]["integration"] == SLACK


def test_webhook_by_name(server: WandbServer) -> None:
    server.integrations = [SLACK, WEBHOOK]
    assert set_up("--webhook", "pager") == 0
    action = server.triggers[0]["action"]
    assert action["integration"] == WEBHOOK
    payload = json.loads(action["requestPayload"])
    assert payload["title"] == "fsdp_guard: holder divergence"
    assert payload["project"] == "${project_name}"


@pytest.mark.parametrize(
    ("integrations", "options", "said"),
    [
        ([], [], "name one Slack channel of lab with --slack, or one with --webhook; there are: none."),
        ([SLACK, OTHER_SLACK], [], "there are: alerts, chatter."),
        ([SLACK], ["--slack", "ops"], "W&B has no Slack channel of lab named 'ops'; there is: alerts."),
        ([SLACK, WEBHOOK], ["--webhook", "alerts"], "W&B has no webhook of lab named 'alerts'; there is: pager."),
    ],
)
def test_without_the_integration(
    server: WandbServer,
    capfd: pytest.CaptureFixture[str],
    integrations: list[dict[str, Any]],
    options: list[str],
    said: str,
) -> None:
    server.integrations = integrations
    assert set_up(*options) == 1
    assert said in capfd.readouterr().err
    assert MUTATIONS.isdisjoint(name for name, _ in server.requests)


@pytest.mark.parametrize("key", ["", KEY[:-1] + "0"])
def test_without_a_login(server: WandbServer, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("WANDB_API_KEY", key)
    # In a process of its own: wandb keeps a login that it once had.
    script = "import sys; from fsdp_guard.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", script, "wandb", "setup", "--entity", "lab", "--project", "llm"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False
    )  # wandb keeps a login it had
    assert done.returncode == 1
    assert "Run 'wandb login', or set WANDB_API_KEY." in done.stderr
    assert "Traceback" not in done.stderr
    assert key == "" or key not in done.stdout + done.stderr
    assert server.sent("CreateAutomation") == []


def test_unknown_project(server: WandbServer, capfd: pytest.CaptureFixture[str]) -> None:
    assert set_up(project="lmm") == 1
    said = capfd.readouterr().err
    assert "W&B refused for lab/lmm" in said
    assert "See that the project exists" in said
    assert len(said) < 400


@pytest.mark.parametrize("operation", sorted(MUTATIONS - {"UpdateAutomation"}))
def test_without_rights(server: WandbServer, capfd: pytest.CaptureFixture[str], operation: str) -> None:
    server.refused = {operation}
    assert set_up() == 1
    said = capfd.readouterr().err
    assert "permission denied" in said
    assert "this login may write to it: an automation takes a member of the team." in said
    assert server.triggers == []


def test_without_the_package(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert set_up() == 2
    said = capfd.readouterr().err
    assert said == (
        "fsdp-guard wandb setup needs wandb, wandb_workspaces. Install with: pip install 'fsdp-guard[dashboard]'\n"
    )
