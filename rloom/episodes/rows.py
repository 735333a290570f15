"""What a row of the data names: its environment, its tools, the user that answers. Names are checked at the start."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rloom.errors import DataError
from rloom.types import Prompt

Row = Mapping[str, Any]
CHOOSING_COLUMNS = ("environment", "env_class")  # TRL's and SkyRL's


@dataclass(frozen=True)
class CodeNames:
    """What the user's code has, and what it needs of each row."""

    # columns that each one's reset needs; "": rows do not choose
    environments: Mapping[str, Sequence[str]] = field(default_factory=dict)
    tools: Sequence[str] = ()
    configured: Sequence[str] = ()  # tools that receive `tools_kwargs`
    interactions: Sequence[str] = ()
    without_reward: Sequence[str] = ()  # environments that never give one


def chosen_environment(row: Row) -> tuple[str, Any] | None:
    """The column and its value."""
    return next(((name, row[name]) for name in CHOOSING_COLUMNS if row.get(name) is not None), None)


def extra_info(row: Row) -> Row:
    found = row.get("extra_info")
    return found if isinstance(found, Mapping) else {}


def selected_tools(row: Row) -> Sequence[str] | None:
    """verl's `extra_info.tool_selection`. None: all tools."""
    chosen = extra_info(row).get("tool_selection")
    return None if chosen is None else list(chosen)


def tools_kwargs(row: Row) -> Row:
    """By tool. A parquet file has null for those that another row has."""
    found = row.get("tools_kwargs") or extra_info(row).get("tools_kwargs") or {}
    return {name: value for name, value in found.items() if value is not None}


def interaction_kwargs(row: Row) -> dict[str, Any]:
    found = row.get("interaction_kwargs") or extra_info(row).get("interaction_kwargs") or {}
    return {key: value for key, value in found.items() if value is not None}


def check_rows(names: CodeNames, rows: Mapping[str, Sequence[Prompt]]) -> None:
    """`rows`: by the key of their files. DataError: a row names what the code does not have, or lacks what it needs."""
    for key, prompts in rows.items():
        for prompt in prompts:
            for fault in faults(names, prompt.columns):
                raise DataError(f"{key}, row {prompt.index} (counting from 0): {fault}")


def faults(names: CodeNames, row: Row) -> Iterator[str]:
    """One sentence each."""
    needed, environments = names.environments.get("", ()), names.environments
    if "" not in environments:
        column, name = chosen_environment(row) or ("environment", None)
        if not isinstance(name, str) or name not in environments:
            yield f"the row has {column}={name!r}; the environments are {', '.join(environments)}"
            return
        needed = environments[name]
    for column in needed:
        if column not in row:
            yield f"`reset` needs `{column}`; the columns are {', '.join(row)}. Add it, or give `{column}` a default"
    for name in selected_tools(row) or ():
        if name not in names.tools:
            yield f"extra_info.tool_selection has {name!r}; the tools are {', '.join(names.tools)}"
    yield from tool_argument_faults(names, row)
    if names.interactions:
        name = interaction_kwargs(row).get("name")
        if name not in names.interactions and (name is not None or len(names.interactions) > 1):
            listed = ", ".join(names.interactions)
            yield f"extra_info.interaction_kwargs.name is {name!r}; the interactions are {listed}"


def tool_argument_faults(names: CodeNames, row: Row) -> Iterator[str]:
    """Arguments of a tool that a run does not use are no fault: data may have those of further tools."""
    if not names.configured:
        return
    given = tools_kwargs(row)
    if extra_info(row).get("need_tools_kwargs") and not given:
        yield "extra_info.need_tools_kwargs is true, and the row has no extra_info.tools_kwargs"
    without = [name for name in names.configured if name not in given]
    for name in given:
        if name not in names.tools and without:
            yield (
                f"extra_info.tools_kwargs has {name!r}, which is no tool, and has nothing for {', '.join(without)}; "
                "correct the name"
            )
