"""A W&B server on this machine for one team: what the public API sends to its GraphQL endpoint is answered and kept."""

from __future__ import annotations

import base64
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "local-" + "0123456789abcdef" * 2 + "01234567"
SLACK = {"__typename": "SlackIntegration", "id": "SW50OjE=", "teamName": "Lab", "channelName": "#alerts"}
OTHER_SLACK = {"__typename": "SlackIntegration", "id": "SW50OjI=", "teamName": "Lab", "channelName": "#chatter"}
WEBHOOK = {
    "__typename": "GenericWebhookIntegration",
    "id": "SW50OjM=",
    "name": "pager",
    "urlEndpoint": "https://pager.example/hook",
}
PROJECT = {"__typename": "Project", "id": "UHJvamVjdDox", "name": "llm"}
_LAST_PAGE = {"endCursor": None, "hasNextPage": False}


class WandbServer:
    """Team ``lab`` with the project ``llm``; ``with WandbServer() as server`` serves it.

    Attributes:
        integrations: What the team has, as GraphQL nodes.
        triggers: The automations that are there, as GraphQL nodes.
        views: The saved workspaces by their internal name.
        requests: Name and variables of every operation that came.
        refused: Operations that this login may not do.
        by_entity: Whether the server lists automations by entity, which it says in its features.
    """

    def __init__(self) -> None:
        self.reset()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))

    def reset(self) -> None:
        self.integrations: list[dict[str, Any]] = [SLACK]
        self.triggers: list[dict[str, Any]] = []
        self.views: dict[str, dict[str, Any]] = {}
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.refused: set[str] = set()
        self.by_entity = True

    def __enter__(self) -> WandbServer:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    def sent(self, operation: str) -> list[dict[str, Any]]:
        """Return the variables of every request for ``operation``."""
        return [variables for name, variables in self.requests if name == operation]

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        self.requests.append((operation, variables))
        return getattr(self, f"_{operation}")(variables)

    def _Viewer(self, _: dict[str, Any]) -> dict[str, Any]:  # noqa: N802 - the name of the operation
        return {"viewer": {"id": "VXNlcjox", "entity": "lab", "username": "ada", "flags": "{}", "teams": {"edges": []}}}

    def _ServerFeaturesQuery(self, _: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        features = [{"name": "QUERY_AUTOMATIONS_ON_ENTITY", "isEnabled": self.by_entity}]
        return {"serverInfo": {"features": features}}

    def _GetProject(self, variables: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        is_there = (variables["entity"], variables["name"]) == ("lab", "llm")
        project = {**PROJECT, "entityName": "lab", "createdAt": _NOW, "isBenchmark": False, "user": None}
        return {"project": project if is_there else None}

    def _IntegrationsByEntity(self, _: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        return {"entity": {"integrations": {"pageInfo": _LAST_PAGE, "edges": [{"node": n} for n in self.integrations]}}}

    def _GetEntityAutomations(self, _: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        return {"scope": {"triggers": {"pageInfo": _LAST_PAGE, "edges": [{"node": n} for n in self.triggers]}}}

    def _GetEntityAutomationsLegacy(self, _: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        node = {"__typename": "Project", "triggers": self.triggers}
        return {"scope": {"projects": {"pageInfo": _LAST_PAGE, "edges": [{"node": node}]}}}

    def _CreateAutomation(self, variables: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        self.triggers.append(self._trigger(variables["input"], f"VHJpZ2dlcjo{len(self.triggers)}"))
        return {"result": {"trigger": self.triggers[-1]}}

    def _UpdateAutomation(self, variables: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        (place,) = [i for i, trigger in enumerate(self.triggers) if trigger["id"] == variables["input"]["id"]]
        self.triggers[place] = self._trigger(variables["input"], variables["input"]["id"])
        return {"result": {"trigger": self.triggers[place]}}

    def _trigger(self, sent: dict[str, Any], trigger_id: str) -> dict[str, Any]:
        (action,) = [config for config in sent["triggeredActionConfig"].values() if config is not None]
        integration_id = action.pop("integrationID")
        (integration,) = [node for node in self.integrations if node["id"] == integration_id]
        is_slack = integration["__typename"] == "SlackIntegration"
        return {
            "__typename": "Trigger",
            "id": trigger_id,
            "createdAt": _NOW,
            "updatedAt": None,
            "scope": PROJECT,
            **{key: sent[key] for key in ("name", "description", "enabled")},
            "event": {
                "__typename": "FilterEventTriggeringCondition",
                "eventType": sent["triggeringEventType"],
                "filter": sent["eventFilter"],
            },
            "action": {
                "__typename": "NotificationTriggeredAction" if is_slack else "GenericWebhookTriggeredAction",
                "integration": integration,
                **action,
            },
        }

    def _View(self, variables: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        view = self.views.get(variables["viewName"])
        return {"project": {"allViews": {"edges": [{"node": view}] if view else []}}}

    def _UpsertView2(self, variables: dict[str, Any]) -> dict[str, Any]:  # noqa: N802
        name = variables["name"]
        view_id = self.views.get(name, {}).get("id", f"Vmlld{len(self.views)}")
        self.views[name] = {"id": view_id, "displayName": variables["displayName"], "spec": variables["spec"]}
        return {"upsertView": {"view": {"id": view_id, "name": name}, "inserted": True}}


_NOW = "2026-01-01T00:00:00Z"


def _handler_of(server: WandbServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path != "/graphql":  # the package's own telemetry
                return self._send(200, {})
            if self.headers["Authorization"] != "Basic " + base64.b64encode(f"api:{KEY}".encode()).decode():
                return self._send(401, {"errors": [{"message": "invalid credentials"}]})
            sent = json.loads(body)
            found = re.search(r"(?:query|mutation)\s+(\w+)", sent["query"])
            assert found is not None, sent["query"]
            if found[1] in server.refused:
                return self._send(403, {"errors": [{"message": "permission denied"}]})
            return self._send(200, {"data": server.answer(found[1], sent.get("variables") or {})})

        def _send(self, status: int, body: dict[str, Any]) -> None:
            payload = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_: object) -> None:
            pass

    return Handler
