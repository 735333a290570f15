"""The base class of configuration sections, and the fields of a section."""

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


NeedsConsent = Callable[[Any], bool]
EMBEDDED = "embedded"  # the name of the model and the data that are part of rloom
IN_PYTHON = "<python>"  # in place of a path: the rows or the function that were given to `rloom.train`


def key(
    default: Any,
    doc: str,
    *,
    needs_consent: NeedsConsent | None = None,
    same_run: bool | None = None,
    **limits: Any,
) -> Any:
    """`needs_consent`: whether a value runs code, contacts a server, spends money or writes outside of the run
    directory. A checkpoint does not set such a value unless the user repeats it on the command line.

    `same_run`: with another value it is still the same run, since the key is about length, machines, memory, validation
    or output and not about what is trained. None: as its section.
    """
    return Field(default=default, description=doc, json_schema_extra=facts(needs_consent, same_run), **limits)


def facts(needs_consent: NeedsConsent | None, same_run: bool | None) -> Any:
    given = {"needs_consent": needs_consent, "same_run": same_run}
    return {name: value for name, value in given.items() if value is not None} or None


def names_code(value: str) -> bool:
    return ":" in value  # file.py:name, module:name


def section(kind: type[Section], doc: str, *, same_run: bool | None = None) -> Any:
    return Field(default_factory=kind, description=doc, json_schema_extra=facts(None, same_run))
