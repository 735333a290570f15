"""Chinese pages and texts: one word for one thing (the table in CONTRIBUTING.md), and links that stay in Chinese."""

import re
from pathlib import Path

import pytest

from tests.architecture.source import ROOT, files
from tests.architecture.test_links import FENCED, TARGET, prose

# What is written instead of a retired word. 提示 is not used for a notice either (提醒), so that the rule can be exact;
# the two prompts of a judge keep the name that the users' guides give them.
RETIRED = {
    r"(?<!系统)(?<!评分)提示": "prompt",
    r"(?<!快捷)(?<!方向)(?<!按)(?<!关)键(?!盘)": "配置项",
    r"微批量": "微批",
    r"逐位": "逐比特",
    r"转储": "样本记录文件",
    r"复放": "路由重放",
    r"恢复训练|继续训练|(?:检查点|断点|处|里)恢复": "续训",
    r"聊天模板": "对话模板",
    r"回合": "episode",
    r"看懂一次运行|看懂指标|如何看训练": "看懂训练指标",
    r"(?:[一每本这两多]次|个|显示|查看|对比|所有|其他)运行(?!目录)": "训练任务",
}
# English words that have a Chinese one, outside of code; a page may give both at first: 微批（micro-batch）.
RETIRED_IN_PROSE = {r"(?<!（)(?i:micro-batch)": "微批", r"\bdumps?\b": "样本记录文件"}

PAGES = [
    file
    for file in files()
    if file.name.endswith((".zh.md", "README_CN.md")) or (file.suffix == ".md" and "learning_notes" in file.parts)
]
SOURCES = [
    file for file in files() if file.is_relative_to(ROOT / "rloom") and file.suffix in (".py", ".js", ".yaml", ".txt")
]


def retired(text: str, page: str = "") -> list[str]:
    found = [(word, instead) for word, instead in RETIRED.items() if re.search(word, text)]
    found += [(word, instead) for word, instead in RETIRED_IN_PROSE.items() if page and re.search(word, prose(text))]
    return [f"{match[0]}: write {instead}" for word, instead in found if (match := re.search(word, text))]


def chinese_version(target: Path) -> Path:
    """The Chinese page beside an English one; the page itself if there is none."""
    for name in (target.name.replace(".md", ".zh.md"), target.name.replace("README.md", "README_CN.md")):
        if name != target.name and target.with_name(name).exists():
            return target.with_name(name)
    return target


def english_links(page: Path, text: str) -> list[str]:
    """Relative links to a page that has a Chinese version; the link to the page's own English version is meant so."""
    found = []
    for link in (one or other for one, other in TARGET.findall(FENCED.sub("", text))):
        name = link.partition("#")[0]
        target = (page.parent / name).resolve()
        if name.endswith(".md") and ":" not in name and chinese_version(target) not in (target, page.resolve()):
            found.append(f"{link}: link {chinese_version(target).name}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_uses_one_word_for_one_thing(page: Path) -> None:
    assert retired(page.read_text(encoding="utf-8"), page.name) == []


def test_the_texts_of_the_program_use_the_words_of_the_pages() -> None:
    found = {str(file.relative_to(ROOT)): retired(file.read_text(encoding="utf-8")) for file in SOURCES}
    assert {name: words for name, words in found.items() if words} == {}
    assert any(re.search("[一-鿿]", file.read_text(encoding="utf-8")) for file in SOURCES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_chinese_page_links_to_chinese_pages(page: Path) -> None:
    assert english_links(page, page.read_text(encoding="utf-8")) == []


def test_the_words_are_in_the_table_for_contributors() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert [word for word in {*RETIRED.values(), *RETIRED_IN_PROSE.values()} if f"| {word}" not in table] == []


def test_a_retired_word_and_an_english_link_are_found() -> None:
    assert retired("每个提示词；快捷键、关键；系统提示词、评分提示词") == ["提示: write prompt"]
    assert retired("这个键，微批量", "x.zh.md") == ["键: write 配置项", "微批量: write 微批"]
    assert retired("微批（micro-batch）的 `dump`\n```\nmicro-batch\n```\n", "x.zh.md") == []
    assert retired("按 micro-batch 切分，读 dump", "x.zh.md") == ["micro-batch: write 微批", "dump: write 样本记录文件"]
    assert retired("查看运行，运行目录，再次运行同一条命令") == ["查看运行: write 训练任务"]
    page = ROOT / "docs" / "index.zh.md"
    assert english_links(page, "[a](data.md#x) [b](data.zh.md) [c](reference.md) [English](index.md)") == [
        "data.md#x: link data.zh.md"
    ]
    page = ROOT / "examples" / "sft" / "README_CN.md"
    assert english_links(page, "[English](README.md) [a](../tutorial/README.md)") == [
        "../tutorial/README.md: link README_CN.md"
    ]
