"""The JSON schema of a tool, from the type hints and the docstring of a function: the form that chat templates take.

Equal to `transformers.utils.get_json_schema`, which imports torch.
"""

import inspect
import re
import types
from collections.abc import Callable
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rloom.errors import ConfigError

PLAIN: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    list: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}
NEXT_PART = r"(?=^\s*(?:Returns|Raises|Yields|Examples?):|\Z)"
ARGUMENTS = re.compile(rf"^\s*Args:\s*$(.*?){NEXT_PART}", re.MULTILINE | re.DOTALL)
NAME = r"^[ \t]*(\w+)[ \t]*(?:\([^)\n]*\))?:[ \t]*"  # "number (int): "
ONE_ARGUMENT = re.compile(rf"{NAME}(.*?)(?={NAME}|\Z)", re.MULTILINE | re.DOTALL)


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    name = function.__name__
    text = inspect.getdoc(function)
    if not text:
        raise ConfigError(f"the tool {name} has no docstring, which tells the policy what it does; write one")
    hints = get_type_hints(function)
    described = descriptions(text)
    properties, required = {}, []
    for argument, parameter in inspect.signature(function).parameters.items():
        if argument not in hints:
            raise ConfigError(f"the tool {name} has no type hint for {argument}; write `{argument}: str` or another")
        if argument not in described:
            raise ConfigError(f"the docstring of the tool {name} does not describe {argument}; add it below `Args:`")
        properties[argument] = {**type_schema(hints[argument], name), "description": described[argument]}
        if parameter.default is inspect.Parameter.empty:
            required.append(argument)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    first = re.split(r"^\s*(?:Args|Returns|Raises):\s*$", text, maxsplit=1, flags=re.MULTILINE)[0].strip()
    return {"type": "function", "function": {"name": name, "description": first, "parameters": parameters}}


def descriptions(docstring: str) -> dict[str, str]:
    found = ARGUMENTS.search(docstring)
    return {} if found is None else {name: " ".join(text.split()) for name, text, _ in ONE_ARGUMENT.findall(found[1])}


def type_schema(hint: Any, tool: str) -> dict[str, Any]:
    if hint in PLAIN:
        return dict(PLAIN[hint])
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {**type_schema(type(inner[0]), tool), "enum": list(inner)}
    if origin in (Union, types.UnionType):
        kinds = [type_schema(one, tool) for one in inner if one is not type(None)]
        if all(kind.keys() == {"type"} for kind in kinds):
            names = [kind["type"] for kind in kinds]
            found: dict[str, Any] = {"type": names[0] if len(names) == 1 else sorted(names)}
        else:
            found = kinds[0] if len(kinds) == 1 else {"anyOf": kinds}
        return {**found, "nullable": True} if type(None) in inner else found
    if origin is list:
        return {"type": "array", "items": type_schema(inner[0], tool)}
    if origin is dict:
        return {"type": "object", "additionalProperties": type_schema(inner[1], tool)}
    raise ConfigError(f"the tool {tool} has an argument of type {hint}, which JSON cannot hold; use a plain type")
