"""A part of a list: the page shows some rows at a time."""

from collections.abc import Sequence
from typing import Any, TypeVar

from rloom.view.query import Query

Row = TypeVar("Row")
USUAL_SIZE, LARGEST_SIZE = 50, 500


def paged(rows: Sequence[Row], query: Query) -> tuple[dict[str, Any], Sequence[Row]]:
    """({"shown": number of rows on all pages, "page": ..., "size": ...}, rows of this page)"""
    size = query.integer("size", most=LARGEST_SIZE) or USUAL_SIZE
    page = query.integer("page") or 0
    return {"shown": len(rows), "page": page, "size": size}, rows[page * size : (page + 1) * size]
