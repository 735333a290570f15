"""The documentation site is built without a warning: links, anchors, navigation. It loads nothing from elsewhere."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

# what a browser loads by itself, in contrast to a link that a reader follows
OUTSIDE_ASSET = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//"""
    r"""|<link\b[^>]*\brel=["']?(?:stylesheet|preconnect|preload|icon)[^>]*\bhref=["']?(?:https?:)?//"""
    r"""|url\(["']?(?:https?:)?//|@import\s+["'](?:https?:)?//"""
)
ZERO_WIDTH_SPACE = "\u200b"  # what separates Chinese words in the index


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)],
        cwd=source,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_built_in_both_languages(site: Path) -> None:
    english = {page.relative_to(ROOT / "docs").with_suffix("") for page in (ROOT / "docs").rglob("*.md")}
    names = {str(name).replace("README", "index") for name in english if not name.name.endswith(".zh")}
    for folder in (site, site / "zh"):
        assert {name for name in names if not (folder / f"{name}.html").is_file()} == set()
    assert len(names) > 40


def test_a_reader_loads_nothing_from_another_server(site: Path) -> None:
    files = [file for suffix in ("*.html", "*.css") for file in site.rglob(suffix)]
    assert [str(file.relative_to(site)) for file in files if OUTSIDE_ASSET.search(file.read_text("utf-8"))] == []
    assert OUTSIDE_ASSET.search('<link rel="stylesheet" href="https://fonts.example/css">')
    assert OUTSIDE_ASSET.search('<script async src="//cdn.example/a.js">')
    assert not OUTSIDE_ASSET.search('<a href="https://docs.vllm.ai">')


def test_the_search_finds_chinese_words_within_a_sentence(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    words = {
        word
        for entry in index["docs"]
        if entry["location"].startswith("zh/")
        for word in entry["text"].split(ZERO_WIDTH_SPACE)
    }
    assert {"显存", "奖励"} <= words
    assert re.split(index["config"]["separator"], f"显存{ZERO_WIDTH_SPACE}奖励") == ["显存", "奖励"]


def test_what_leads_nowhere_stops_the_build(tmp_path: Path) -> None:
    settings = (ROOT / "mkdocs.yml").read_text("utf-8")
    (tmp_path / "docs").mkdir()
    (tmp_path / "mkdocs.yml").write_text(settings.split("\nnav:")[0] + "\nnav: [index.md, other.md]\n", "utf-8")
    faults = ("missing.md", "other.md#nowhere", "../rloom/types.py")
    (tmp_path / "docs" / "index.md").write_text("# A\n\n" + " ".join(f"[x]({fault})" for fault in faults))
    (tmp_path / "docs" / "other.md").write_text("# B\n")
    (tmp_path / "docs" / "not_in_nav.md").write_text("# C\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert [fault for fault in (*faults, "not_in_nav.md") if fault not in done.stderr] == []
