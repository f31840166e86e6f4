"""A JSON Schema of the TOML, by which editors complete and check it (`#:schema FILE` at the head of a TOML)."""

from __future__ import annotations

from typing import Any

from titanlike.config.schema import Config


def json_schema() -> dict[str, Any]:
    """The schema of a config file, `extends` included."""
    schema = Config.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "titanlike config"
    schema["properties"]["extends"] = {
        "description": "Files that this one is laid over, relative to it.",
        "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    }
    _tidy(schema)
    return schema


def _tidy(node: Any) -> None:
    """A string serves where a list of strings does; titles that repeat the key go."""
    if isinstance(node, list):
        for item in node:
            _tidy(item)
        return
    if not isinstance(node, dict):
        return
    for value in node.values():
        _tidy(value)
    if isinstance(node.get("title"), str) and node["title"] != "titanlike config":
        del node["title"]
    if node.get("type") == "array" and node.get("items") == {"type": "string"}:
        del node["type"], node["items"]
        node["anyOf"] = [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
