"""Relative links of the pages outside docs/, which the site does not check: their files and anchors exist."""

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.architecture.source import ROOT, files

FENCED = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)
CODE = re.compile(r"``.+?``|`[^`\n]+`")
TARGET = re.compile(r"""\]\(\s*<?([^)\s>]+)>?(?:\s+"[^"]*")?\s*\)|\b(?:href|src)=["']([^"']+)["']""")
HEADING = re.compile(r"^#{1,6} +(.+?)\s*#*$", re.M)
PAGES = [file for file in files() if file.suffix == ".md" and not file.is_relative_to(ROOT / "docs")]


def prose(text: str) -> str:
    return CODE.sub("", FENCED.sub("", text))


def links(text: str) -> list[str]:
    return [one or other for one, other in TARGET.findall(prose(text))]


def anchors(text: str) -> Iterator[str]:
    """As Git browsers make them: lower case, without punctuation, spaces become hyphens, a repeated one is numbered."""
    text = FENCED.sub("", text)
    seen: dict[str, int] = {}
    for title in HEADING.findall(text):
        plain = re.sub(r"<[^>]+>|\[([^\]]*)\]\([^)]*\)", r"\1", title)
        anchor = re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", "-")
        yield f"{anchor}-{seen[anchor]}" if anchor in seen else anchor
        seen[anchor] = seen.get(anchor, 0) + 1
    yield from re.findall(r"""\b(?:id|name)=["']([^"']+)["']""", text)


def faults(page: Path, text: str) -> list[str]:
    found = []
    for link in links(text):
        if re.match(r"[a-z][a-z+.-]*:|//", link):
            continue
        name, _, anchor = unquote(link).partition("#")
        target = page.parent / name if name else page
        if not target.exists():
            found.append(f"{link}: there is no such file")
        elif anchor and anchor not in anchors(text if target == page else target.read_text(encoding="utf-8")):
            found.append(f"{link}: the page has no such anchor")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_an_anchor(page: Path) -> None:
    assert faults(page, page.read_text(encoding="utf-8")) == []


def test_the_pages_are_found() -> None:
    assert {"README.md", "README_CN.md", "CONTRIBUTING.md"} <= {str(page.relative_to(ROOT)) for page in PAGES}


def test_a_broken_link_is_found_and_code_is_not_a_link() -> None:
    page = ROOT / "README.md"
    assert faults(page, "[a](docs/data.md#a-row) [b](LICENSE) [c](https://example.org/x)\n`[d](none)`") == []
    assert faults(page, "[a](docs/nowhere.md)") == ["docs/nowhere.md: there is no such file"]
    assert faults(page, "[a](docs/data.md#nowhere)") == ["docs/data.md#nowhere: the page has no such anchor"]
    assert faults(page, "## 显存优化\n[a](#显存优化) [b](#显存)") == ["#显存: the page has no such anchor"]
    assert list(anchors("# A `b` (c)\n# A b c\n")) == ["a-b-c", "a-b-c-1"]
