"""Describes the routes of a swarm server: OpenAPI, and the same as a page to read."""

from __future__ import annotations

import html
import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ajet_sdk.swarm.messages import PREFIX, Refusal
from ajet_sdk.types import Json


@dataclass(frozen=True)
class Described:
    """A route: its holder of the key, its handler, and the messages that it takes and sends."""

    method: str
    path: str
    holder: Any
    handler: Callable[[Request], Awaitable[Response]]
    takes: type[BaseModel] | None
    sends: type[BaseModel] | None

    @property
    def summary(self) -> str:
        """One line of what it is for."""
        return _SUMMARIES[f"{self.method} {self.path}"]


_SUMMARIES = {
    "POST /episodes": "Claim an episode: an attempt at a task, with a base URL and a key.",
    "POST /episodes/{id}/end": "End an episode with its reward; idempotent.",
    "POST /episodes/{id}/abort": "End an episode without a result, with the cause; idempotent.",
    "POST /episodes/{id}/judging": "The workflow is over; returns the key of the judge's calls.",
    "GET /episodes/{id}/calls": "The calls of an open episode so far.",
    "GET /episodes/{id}": "The receipt: what became of the episode and of each token.",
    "GET /status": "State, step, groups, open episodes, clients, and what the step waits for.",
    "GET /events": "Events as a stream (SSE), from the one after `after`.",
    "POST /agree": "This client has enough (swarm.collect: any_client, all_clients).",
    "PUT /config": "The config of the next training, as YAML.",
    "POST /start": "Start the training.",
    "POST /stop": "Stop the training, with a checkpoint.",
}


def openapi(described: Sequence[Described]) -> Json:
    """The OpenAPI 3.1 document of the routes."""
    models = {model for d in described for model in (d.takes, d.sends) if model is not None}
    chosen = sorted(models | {Refusal}, key=lambda model: model.__name__)
    _, schemas = models_json_schema(
        [(model, "validation") for model in chosen],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, Json] = {}
    for d in described:
        operation: Json = {
            "summary": d.summary,
            "security": [{"bearer": []}],
            "description": f"Key: {d.holder}.",
            "responses": {
                "200": _content("done", d.sends),
                "default": _content("refused", Refusal),
            },
        }
        if d.takes is not None:
            operation["requestBody"] = {**_content("", d.takes), "required": True}
            del operation["requestBody"]["description"]
        if "{id}" in d.path:
            operation["parameters"] = [
                {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
            ]
        paths.setdefault(f"{PREFIX}{d.path}", {})[d.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "ajet swarm", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": schemas.get("$defs", {}),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _content(description: str, model: type[BaseModel] | None) -> Json:
    content: Json = {"description": description}
    if model is not None:
        schema = {"$ref": f"#/components/schemas/{model.__name__}"}
        content["content"] = {"application/json": {"schema": schema}}
    return content


def page(described: Sequence[Described]) -> str:
    """A page with all routes and their messages."""
    rows = []
    for d in described:
        messages = [model for model in (d.takes, d.sends) if model is not None]
        listed = "".join(
            f"<details><summary>{_title(m)}</summary>{_fields(m)}</details>" for m in messages
        )
        rows.append(
            f"<h2><code>{d.method} {PREFIX}{html.escape(d.path)}</code></h2>"
            f"<p>{html.escape(d.summary)} Key: {d.holder}.</p>{listed}"
        )
    return (
        "<!doctype html><meta charset=utf-8><title>ajet swarm</title>"
        "<style>body{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "h2{font-size:1rem;margin-top:2rem}td{padding:.1rem 1rem .1rem 0;vertical-align:top}</style>"
        "<h1>ajet swarm</h1><p>The same as <a href=/openapi.json>OpenAPI</a>. Errors are"
        ' <code>{"error": {"code", "message", "retry_after"}}</code>.</p>' + "".join(rows)
    )


def _title(model: type[BaseModel]) -> str:
    about = inspect.getdoc(model) or ""
    return f"<code>{model.__name__}</code> {html.escape(about.partition(chr(10))[0])}"


def _fields(model: type[BaseModel]) -> str:
    schema = model.model_json_schema()
    required = schema.get("required", [])
    rows = "".join(
        f"<tr><td><code>{name}</code><td>{html.escape(_kind(field))}"
        f"<td>{'required' if name in required else html.escape(json.dumps(field.get('default')))}"
        for name, field in schema.get("properties", {}).items()
    )
    return f"<table>{rows}</table>"


def _kind(field: Json) -> str:
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "anyOf" in field:
        return " or ".join(_kind(option) for option in field["anyOf"])
    if "enum" in field:
        return " | ".join(map(str, field["enum"]))
    if field.get("type") == "array":
        return f"list of {_kind(field.get('items', {}))}"
    return str(field.get("type", "any"))


def description_routes(described: Sequence[Described]) -> list[BaseRoute]:
    """`/openapi.json` and `/docs`."""

    async def document(request: Request) -> Response:
        return JSONResponse(openapi(described))

    async def read(request: Request) -> Response:
        return HTMLResponse(page(described))

    return [Route("/openapi.json", document), Route("/docs", read)]
