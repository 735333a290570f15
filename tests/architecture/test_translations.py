"""Chinese pages that agree with the English ones: docs/NAME.zh.md beside docs/NAME.md."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.architecture.source import ROOT
from tests.architecture.test_documents import blocks, headings
from tests.families_chinese import chinese as chinese_families

DOCS = ROOT / "docs"
CHINESE = sorted(DOCS.rglob("*.zh.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
SPAN = re.compile(r"``.+?``|`[^`\n]+`")
ANCHOR = re.compile(r'<a id="([\w-]+)"></a>')
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
# The first characters of a line that does not continue a paragraph.
BLOCK_START = re.compile(r"\s*(?:[-*+] |\d+\. |\||#|>|<!--|!!!|\$\$)")


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def joined(text: str) -> str:
    """The prose with each paragraph on one line: a code span of the English page may be broken across two lines."""
    return re.sub(r"(?<=\S)\n[ \t]*(?![-*+|#<\n ]|\d+\. )(?=\S)", " ", prose(text))


def code_spans(text: str) -> set[str]:
    return {span.strip("` ") for span in SPAN.findall(joined(text))}


def numbers(text: str) -> set[str]:
    return {number.rstrip(",") for number in NUMBER.findall(SPAN.sub("", joined(text)))}


def table_rows(text: str) -> list[int]:
    """The number of columns of each row; a bar in a code span or after a backslash is text."""
    lines = [SPAN.sub("", line).replace(r"\|", "") for line in prose(text).splitlines()]
    return [line.count("|") for line in lines if line.startswith("|")]


def broken_sentences(text: str) -> list[str]:
    """Lines that continue the paragraph before them: Markdown makes a space of the line break, which Chinese lacks."""
    lines = prose(text).splitlines()
    return [
        after for before, after in pairwise(lines) if before.strip() and after.strip() and not BLOCK_START.match(after)
    ]


def english_names(links: list[str]) -> list[str]:
    return [link.replace(".zh.md", ".md") for link in links]


def anchors(page: Path) -> set[str]:
    """What a link can name after `#` in a page: the ids before the headings of a Chinese one, else the headings
    themselves, in lower case with hyphens."""
    if page.name.endswith(".zh.md"):
        return set(ANCHOR.findall(page.read_text(encoding="utf-8")))
    titles = re.findall(r"^#{1,6} (.+)$", prose(page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


@pytest.fixture(params=CHINESE, ids=lambda file: file.name)
def pair(request: pytest.FixtureRequest) -> tuple[str, str]:
    chinese: Path = request.param
    english = chinese.with_name(chinese.name.replace(".zh.md", ".md"))
    return english.read_text(encoding="utf-8"), chinese.read_text(encoding="utf-8")


def test_headings_and_tables_are_in_the_same_order(pair: tuple[str, str]) -> None:
    english, chinese = pair
    assert headings(chinese) == headings(english)
    assert table_rows(chinese) == table_rows(english)


def test_code_blocks_differ_in_comments_only(pair: tuple[str, str]) -> None:
    english, chinese = (blocks(text) for text in pair)
    assert [language for language, _ in chinese] == [language for language, _ in english]
    for (language, lines), (_, other) in zip(chinese, english, strict=True):
        if language == "text":  # drawings, with words in them
            assert len(lines) == len(other)
        else:
            assert lines == other


def test_keys_and_links_are_the_same(pair: tuple[str, str]) -> None:
    english, chinese = pair
    assert code_spans(chinese) == code_spans(english)
    assert sorted(english_names(LINK.findall(chinese))) == sorted(LINK.findall(english))


def test_no_number_is_lost(pair: tuple[str, str]) -> None:
    english, chinese = pair
    assert numbers(english) - numbers(chinese) == set()


def test_a_paragraph_is_one_line(pair: tuple[str, str]) -> None:
    assert broken_sentences(pair[1]) == []


@pytest.mark.parametrize("file", CHINESE, ids=lambda file: file.name)
def test_every_anchor_exists_in_chinese(file: Path) -> None:
    for target in LINK.findall(file.read_text(encoding="utf-8")):
        name, _, anchor = target.partition("#")
        if anchor and ":" not in name:
            assert anchor in anchors(file.parent / name if name else file), (
                f'{target}: put <a id="{anchor}"></a> before the title of that section'
            )


def test_the_page_of_model_families_follows_the_english_one() -> None:
    english, chinese = ((DOCS / name).read_text(encoding="utf-8") for name in ("models.md", "models.zh.md"))
    assert chinese == chinese_families(english), "run `make docs`"


def test_the_comparison_finds_what_differs() -> None:
    english, chinese = (
        "Set `lr` to\n`1e-6`, 10 times.\n\n| a | b |\n",
        "把 `lr` 设为 `1e-6`，共 10 次。\n\n| 甲 | 乙 |\n",
    )
    assert code_spans(english) == code_spans(chinese) == {"lr", "1e-6"}
    assert numbers(english) == numbers(chinese) == {"10"}
    assert table_rows(english) == table_rows(chinese) == [3]
    assert broken_sentences(english) == ["`1e-6`, 10 times."]
    assert broken_sentences(chinese) == []
