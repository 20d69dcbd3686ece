"""The JSON schema of experiment files, by which editors complete and check what is written."""

from typing import Any

from maect.evaluate import evaluation_names
from maect.experiment.schema import ExperimentSpec
from maect.recipes import recipe_names, sizes
from maect.report.registry import FIGURES, TABLE_NAMES


def json_schema() -> dict[str, Any]:
    """Return the schema, with the known names as suggestions where others may be as well."""
    schema = ExperimentSpec.model_json_schema(by_alias=True, mode="validation")
    parts = schema["$defs"]
    _suggest(parts["RunSpec"]["properties"], "recipe", recipe_names())
    _suggest(parts["RunSpec"]["properties"], "size", sizes())
    _suggest(parts["Evaluations"]["properties"]["protocols"], "items", evaluation_names())
    for name, known in (("tables", TABLE_NAMES), ("figures", tuple(FIGURES))):
        listed, mapped = schema["properties"][name]["anyOf"]
        listed["items"] = {"enum": list(known)}
        mapped["propertyNames"] = {"enum": list(known)}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _suggest(parts: dict[str, Any], name: str, known: Any) -> None:
    parts[name] = {"anyOf": [{"enum": list(known)}, parts[name]]}
