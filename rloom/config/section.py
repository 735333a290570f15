"""The base class of configuration sections, and the fields of a section."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


def key(default: Any, doc: str, **limits: Any) -> Any:
    return Field(default=default, description=doc, **limits)


def section(kind: type[Section], doc: str) -> Any:
    return Field(default_factory=kind, description=doc)
