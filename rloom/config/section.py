"""The base class of configuration sections, and the fields of a section."""

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


NeedsConsent = Callable[[Any], bool]
EMBEDDED = "embedded"  # the name of the model and the data that are part of rloom
IN_PYTHON = "<python>"  # in place of a path: the rows or the function that were given to `rloom.train`


def key(default: Any, doc: str, *, needs_consent: NeedsConsent | None = None, **limits: Any) -> Any:
    """`needs_consent`: whether a value runs code, contacts a server, spends money or writes outside of the run
    directory. A checkpoint does not set such a value unless the user repeats it on the command line."""
    if needs_consent is not None:
        limits["json_schema_extra"] = {"needs_consent": needs_consent}
    return Field(default=default, description=doc, **limits)


def names_code(value: str) -> bool:
    return ":" in value  # file.py:name, module:name


def section(kind: type[Section], doc: str) -> Any:
    return Field(default_factory=kind, description=doc)
