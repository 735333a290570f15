"""The search of the site: an index for each language, and guides before decisions and measurements. MkDocs calls it."""

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority

CHINESE = "zh/"
BASE = re.compile(r'"base": "\.\.(/)?')  # of a page, from it to the root of the site
BACKGROUND = ("decisions/", "measurements/")
LOWER = 0.2  # of what a match in them counts


def on_page_markdown(markdown: str, page: Any, **_: Any) -> None:
    if page.file.src_uri.startswith(BACKGROUND):
        page.meta.setdefault("search", {"boost": LOWER})


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """A Chinese page looks for the index and for what it finds in zh/."""
    if not page.file.dest_uri.startswith(CHINESE):
        return output
    return BASE.sub(lambda found: '"base": "' + ("" if found[1] else "."), output, count=1)


@event_priority(-200)  # after the i18n plugin, which writes the index of all languages with -100
def on_post_build(config: Any, **_: Any) -> None:
    site = Path(config["site_dir"])
    file = site / "search" / "search_index.json"
    index = json.loads(file.read_text("utf-8"))
    chinese = [entry for entry in index["docs"] if entry["location"].startswith(CHINESE)]
    if not chinese:  # the plugin builds each language for itself first
        return
    english = [entry for entry in index["docs"] if not entry["location"].startswith(CHINESE)]
    below = [{**entry, "location": entry["location"].removeprefix(CHINESE)} for entry in chinese]
    for target, docs in ((file, english), (site / CHINESE / "search" / file.name, below)):
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps({**index, "docs": docs}, ensure_ascii=False), "utf-8")
