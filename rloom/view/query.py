"""The checked parameters of an address, and the JSON of a reply."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qs

from rloom.runs.records import to_json_value
from rloom.view.http_errors import BadRequest

Json = Any


def to_json(value: Json) -> bytes:
    """NaN and infinities become null. All characters beyond ASCII are escaped: half a surrogate pair, too, is text."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(to_json_value(value), allow_nan=False, separators=(",", ":"))
    return text.encode("ascii")


MOST_PARAMETERS = 32
MOST_DIGITS = 15  # every such integer is exact in JavaScript too


class Query:
    def __init__(self, values: Mapping[str, Sequence[str]]) -> None:
        self._values = values

    @classmethod
    def parse(cls, text: str) -> "Query":
        try:
            return cls(parse_qs(text, keep_blank_values=True, max_num_fields=MOST_PARAMETERS))
        except ValueError as error:
            raise BadRequest(f"the parameters of the address cannot be read: at most {MOST_PARAMETERS}") from error

    def all(self, name: str) -> Sequence[str]:
        return self._values.get(name, [])

    def text(self, name: str, default: str = "") -> str:
        return self.all(name)[-1] if self.all(name) else default

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """The first choice is the default."""
        given = self.text(name) or choices[0]
        if given not in choices:
            raise BadRequest(f"{name}={format_value(given)}: use one of {', '.join(choices)}")
        return given

    def integer(self, name: str, *, most: int | None = None) -> int | None:
        """From 0 on."""
        given = self.text(name)
        if not given:
            return None
        value = whole_number(given)
        if value is None or (most is not None and value > most):
            raise BadRequest(
                f"{name}={format_value(given)}: use a whole number from 0" + (f" to {most}" if most else "")
            )
        return value

    def number(self, name: str) -> float | None:
        given = self.text(name)
        if not given:
            return None
        try:
            value = float(given)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise BadRequest(f"{name}={format_value(given)}: use a number")
        return value


def whole_number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS else None


def format_value(given: str) -> str:
    return repr(given if len(given) <= 40 else f"{given[:40]}...")


Row = TypeVar("Row")
USUAL_SIZE, LARGEST_SIZE = 50, 500


def paged(rows: Sequence[Row], query: Query) -> tuple[dict[str, Any], Sequence[Row]]:
    """({"shown": number of rows on all pages, "page": ..., "size": ...}, rows of this page)"""
    size = query.integer("size", most=LARGEST_SIZE) or USUAL_SIZE
    page = query.integer("page") or 0
    return {"shown": len(rows), "page": page, "size": size}, rows[page * size : (page + 1) * size]
