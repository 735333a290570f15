"""Tags of a run and whether the list hides it: `labels.json` in the run directory.

They are in the run directory, not in the browser: the storage of a browser belongs to one port and one machine, while
a run is looked at through ssh, from another browser, on the port that is free. It is the only file that the viewer
writes, and only when the user changes a label.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rloom.atomic import replace_text
from rloom.errors import DataError
from rloom.runs.records import open_regular, parse_row
from rloom.view.http_errors import BadRequest, NotWritable
from rloom.view.query import Json, Query, format_value
from rloom.view.run_cache import RunHandle

LABELS_FILE = "labels.json"
LARGEST_FILE = 1 << 16  # bytes
MOST_TAGS, LONGEST_TAG = 20, 40
TAG = re.compile(r"[\w .:+/-]+")  # of any script


@dataclass(frozen=True)
class Labels:
    tags: Sequence[str] = ()
    hidden: bool = False


def is_tag(text: object) -> bool:
    return isinstance(text, str) and 0 < len(text) <= LONGEST_TAG and TAG.fullmatch(text) is not None


def read_labels(run: Path) -> Labels:
    """A file that is missing, or that the viewer did not write, has none."""
    try:
        with open_regular(run / LABELS_FILE) as file:
            row = parse_row(file.read(LARGEST_FILE)) or {}
    except (OSError, DataError):
        return Labels()
    tags = row.get("tags")
    known = [tag for tag in tags if is_tag(tag)] if isinstance(tags, list) else []
    return Labels(known[:MOST_TAGS], row.get("hidden") is True)


def write_labels(run: RunHandle, query: Query) -> Json:
    """Replace the labels by those of the address: `tags=` for each, and `hidden=yes`."""
    tags = list(dict.fromkeys(tag.strip() for tag in query.all("tags") if tag.strip()))
    wrong = next((tag for tag in tags if not is_tag(tag)), None)
    if wrong is not None or len(tags) > MOST_TAGS:
        raise BadRequest(
            f"tags={format_value(wrong or str(len(tags)))}: use at most {MOST_TAGS} tags of up to {LONGEST_TAG} "
            "letters, digits, spaces and . : + / - _"
        )
    hidden = query.choice("hidden", ("no", "yes")) == "yes"
    file = run.path / LABELS_FILE
    with run.folder():  # one writer at a time, and only into a run directory
        try:
            if tags or hidden:
                replace_text(file, json.dumps({"tags": tags, "hidden": hidden}, ensure_ascii=False) + "\n")
            else:
                file.unlink(missing_ok=True)
        except OSError as error:
            raise NotWritable(f"the labels cannot be written to {file}: {error.strerror}") from error
    return {"tags": tags, "hidden": hidden}
