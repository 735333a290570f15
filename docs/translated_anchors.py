"""Hook of MkDocs: the headings of NAME.zh.md also get the anchors of NAME.md, so that one link fits both languages."""

import re
from pathlib import Path
from typing import Any

from pymdownx.slugs import slugify

FENCE_OR_HEADING = re.compile(r"^```.*?^```$|^(#{1,6}) +(.+?)$", re.M | re.S)
slug = slugify(case="lower")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    translation = Path(page.file.abs_src_path)
    if not translation.name.endswith(".zh.md"):
        return markdown
    original = translation.with_name(translation.name.replace(".zh.md", ".md")).read_text(encoding="utf-8")
    return with_anchors(markdown, [slug(title, "-") for title in headings(original)])


def headings(markdown: str) -> list[str]:
    return [found[2].replace("`", "") for found in FENCE_OR_HEADING.finditer(markdown) if found[2]]


def with_anchors(markdown: str, anchors: list[str]) -> str:
    """Each heading with the anchor at its place in the list; without any, if the numbers of headings differ."""
    if len(headings(markdown)) != len(anchors):
        return markdown
    left = iter(anchors)

    def anchored(found: re.Match[str]) -> str:
        return f'{found[1]} <a id="{next(left)}"></a>{found[2]}' if found[2] else found[0]

    return FENCE_OR_HEADING.sub(anchored, markdown)
