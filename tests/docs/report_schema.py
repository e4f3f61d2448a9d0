"""The JSON schema of ``report.json``, for the documentation: ``python -m tests.docs.report_schema`` prints it."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from pytest_fsdp_meta.evidence.codec import NON_FINITE
from pytest_fsdp_meta.reports.schema import SCHEMA, Report

TITLE = f"report.json of pytest-fsdp-meta, schema {SCHEMA}"
PLAIN = {str: "string", bool: "boolean", int: "integer"}


def report_schema() -> dict[str, Any]:
    """Return the JSON schema of ``report.json``."""
    described = schema_of(Report, TITLE)
    described["$defs"]["Report"]["properties"]["schema"] = {"const": SCHEMA}
    return described


def schema_of(kind: type, title: str) -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of the output of ``to_plain`` for a dataclass.

    The first paragraph of each docstring is the description.
    """
    definitions: dict[str, Any] = {}
    reference = _schema(kind, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **reference,
        "$defs": definitions,
    }


def _schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(inner[0], definitions), {"type": "null"}]}
    if is_dataclass(kind):
        assert isinstance(kind, type)
        if kind.__name__ not in definitions:
            definitions[kind.__name__] = {}  # entered first, so that a class that contains itself ends the recursion
            definitions[kind.__name__] = _schema_of_fields(kind, definitions)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    if origin is tuple and not (len(inner) == 2 and inner[1] is Ellipsis):
        parts = [_schema(part, definitions) for part in inner]
        return {"type": "array", "prefixItems": parts, "minItems": len(parts), "maxItems": len(parts)}
    if origin in (tuple, frozenset):
        return {"type": "array", "items": _schema(inner[0], definitions)}
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _schema(inner[1], definitions)}
    if kind is float:
        return {"anyOf": [{"type": "number"}, {"enum": list(NON_FINITE)}]}
    return {"type": PLAIN[kind]}


def _schema_of_fields(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    required = [field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING]
    properties = {field.name: _schema(hints[field.name], definitions) for field in fields(kind)}
    doc = (kind.__doc__ or "").strip().split("\n\n")[0].replace("\n    ", " ")
    return {"type": "object", "description": doc, "properties": properties, "required": required}


if __name__ == "__main__":
    print(json.dumps(report_schema(), indent=1))
