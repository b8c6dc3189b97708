"""What a team has of the guard in Weights & Biases: an automation that tells it, and a workspace that shows it.

Both through public APIs, ``wandb.automations`` and wandb-workspaces. A workspace can be found again by its URL alone,
so the automation's description keeps that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import wandb
import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.workspaces as ws
from wandb.automations import Automation, OnRunMetric, RunEvent, SendNotification, SendWebhook

from fsdp_guard.report import DivergenceKind
from fsdp_guard.reporters.wandb import ALERT_TITLE

_METRIC = "fsdp_guard/diverged"

_TEXT = (
    "A run's module, optimizer and sharding runtime no longer agree on the parameters: what was loaded or assigned is "
    "not what is trained. The run's own alert and its table fsdp_guard/table name each parameter, the cause and the "
    "line to change."
)

_DESCRIPTION = "Tells of every divergence that fsdp_guard finds. Kept by: fsdp-guard wandb setup. Workspace: "

_PAYLOAD = {
    "title": ALERT_TITLE,
    "text": _TEXT,
    "entity": "${entity_name}",
    "project": "${project_name}",
    "event": "${event_type}",
    "author": "${event_author}",
}
"""Of a webhook; W&B puts the variables in (docs.wandb.ai/models/automations/create-automations/webhook)."""

_NAME = "fsdp_guard"
"""Of the workspace, and of the section in it."""

_COLUMNS = [f"summary:fsdp_guard/{key}" for key in ("diverged", "kinds", "first_fqn", "first_remedy", "event", "ranks")]
"""What the workspace's list of runs shows of each."""

_PANELS: list[tuple[Any, dict[str, Any]]] = [
    (wr.BarPlot, {"title": "Diverged (1) or not (0), by run", "metrics": [_METRIC]}),
    (
        wr.BarPlot,
        {"title": "Divergences, by kind", "metrics": [f"fsdp_guard/kind/{kind}" for kind in DivergenceKind]},
    ),
    (wr.WeavePanelSummaryTable, {"table_name": "fsdp_guard/table"}),
]

_Integration = TypeVar("_Integration")


class SetupError(RuntimeError):
    """Something in W&B is missing, or is not given to this login; the message says what to do."""


@dataclass(frozen=True)
class Outcome:
    """What ``set_up`` has done, or would do.

    Args:
        is_new: Whether there was no such automation before.
        definition: The automation and the workspace in plain strings, numbers, lists and dicts, ready for JSON.
        url: The workspace's address; empty if a dry run found none.
    """

    is_new: bool
    definition: dict[str, Any]
    url: str


def set_up(
    entity: str, project: str, *, slack: str | None = None, webhook: str | None = None, dry_run: bool = False
) -> Outcome:
    """Create the automation and the workspace, or bring those that are there up to date.

    An automation stays disabled where somebody disabled it; of a workspace nothing changes but the guard's section.

    Args:
        entity: The W&B team or user.
        project: A project of it that exists.
        slack: Channel of one of the entity's Slack integrations.
        webhook: Name of one of the entity's webhook integrations. With neither, its only Slack integration is taken.
        dry_run: Ask W&B what is there, and change nothing.

    Raises:
        SetupError: There is no login, no such project, no such integration, or no right to change them.
    """
    with _explained(entity, project):
        api = wandb.Api()
        scope = api.project(project, entity=entity)
        name = f"fsdp_guard in {project}"
        scope_id = scope.id  # the first that asks the server for the project
        existing = next((a for a in api.automations(entity, name=name) if a.scope.id == scope_id), None)
        event = OnRunMetric.model_validate({"scope": scope, "filter": RunEvent.metric(_METRIC).max(1) > 0})
        action = _choose_action(api, entity, slack, webhook)
        workspace = _find_workspace(existing, entity, project) or _new_workspace(entity, project)
        workspace.sections = [_section(), *(s for s in workspace.sections if s.name != _NAME)]
        if dry_run:
            url = _url_in(existing, entity, project)
        else:
            workspace.save()
            url = workspace.url
            if existing is None:
                api.create_automation(event >> action, name=name, description=_DESCRIPTION + url)
            else:
                api.update_automation(existing, event=event, action=action, description=_DESCRIPTION + url)
        return Outcome(existing is None, _definition(name, action), url)


@contextmanager
def _explained(entity: str, project: str) -> Iterator[None]:
    try:
        yield
    except (wandb.errors.AuthenticationError, wandb.errors.UsageError) as error:
        raise SetupError(f"W&B took no login: {error} Run 'wandb login', or set WANDB_API_KEY.") from error
    except SetupError:
        raise
    except Exception as error:
        # What wandb raises has no base class of its own: some of its errors are private ones (0.31).
        if not isinstance(error, ValueError) and not type(error).__module__.startswith("wandb."):
            raise
        raise SetupError(
            f"W&B refused for {entity}/{project}: {error} See that the project exists, and that this login may write "
            "to it: an automation takes a member of the team."
        ) from error


def _choose_action(
    api: wandb.Api, entity: str, slack: str | None, webhook: str | None
) -> SendNotification | SendWebhook:
    if webhook is not None:
        hooks = {hook.name: hook for hook in api.webhook_integrations(entity)}
        return SendWebhook.from_integration(_choose(hooks, webhook, f"webhook of {entity}"), payload=_PAYLOAD)
    channels = {channel.channel_name.lstrip("#"): channel for channel in api.slack_integrations(entity=entity)}
    integration = _choose(channels, slack and slack.lstrip("#"), f"Slack channel of {entity}")
    return SendNotification.from_integration(integration, title=ALERT_TITLE, text=_TEXT, level="ERROR")  # type: ignore[arg-type]


def _choose(integrations: Mapping[str, _Integration], name: str | None, what: str) -> _Integration:
    if name is None and len(integrations) == 1:
        return next(iter(integrations.values()))
    if name is not None and name in integrations:
        return integrations[name]
    asked = f"W&B has no {what} named {name!r}" if name else f"name one {what} with --slack, or one with --webhook"
    raise SetupError(
        f"{asked}; there {'is' if len(integrations) == 1 else 'are'}: {', '.join(sorted(integrations)) or 'none'}. "
        "An admin of the team adds them in the team's settings."
    )


def _find_workspace(existing: Automation | None, entity: str, project: str) -> ws.Workspace | None:
    """Return the workspace that the automation's description names, if it is still there."""
    try:
        url = _url_in(existing, entity, project)
        return ws.Workspace.from_url(url) if url else None
    except ValueError:
        return None


def _url_in(automation: Automation | None, entity: str, project: str) -> str:
    # Only one of this project: a description is for anybody to edit.
    pattern = rf"https?://\S+/{re.escape(entity)}/{re.escape(project)}\?nw=\w+"
    found = re.search(pattern, automation.description or "") if automation is not None else None
    return found[0] if found else ""


def _new_workspace(entity: str, project: str) -> ws.Workspace:
    return ws.Workspace(entity, project, name=_NAME, runset_settings=ws.RunsetSettings(pinned_columns=_COLUMNS))


def _section() -> ws.Section:
    return ws.Section(name=_NAME, is_open=True, panels=[panel(**settings) for panel, settings in _PANELS])


def _definition(name: str, action: SendNotification | SendWebhook) -> dict[str, Any]:
    # Without the integration's id, which means nothing to a reader.
    sent = action.model_dump(mode="json", exclude={"integration_id"})
    return {
        "automation": {"name": name, "event": f"max({_METRIC}) > 0 over 1 value of a run", "action": sent},
        "workspace": {
            "name": _NAME,
            "pinned_columns": _COLUMNS,
            "panels": [{"panel": panel.__name__, **settings} for panel, settings in _PANELS],
        },
    }
