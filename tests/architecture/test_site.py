"""The documentation site is built without a warning: links, anchors, navigation. It loads nothing from elsewhere."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def search_index(folder: Path) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((folder / "search" / "search_index.json").read_text("utf-8"))
    return index


def test_the_search_of_a_language_finds_pages_of_that_language_only(site: Path) -> None:
    """A page's `base` leads to the folder of its index, where the address of a result begins."""
    for folder, page in ((site, "index.html"), (site, "decisions/index.html"), (site / "zh", "index.html")):
        [base] = re.findall(r'"base": "([^"]*)"', (folder / page).read_text("utf-8"))
        assert (folder / page).parent.joinpath(base).resolve() == folder
        locations = {entry["location"].partition("#")[0] or "index.html" for entry in search_index(folder)["docs"]}
        assert [name for name in locations if not (folder / name).is_file()] == []
        assert not any(name.startswith("zh/") for name in locations) and "plan.html" in locations
    chinese = [entry for entry in search_index(site / "zh")["docs"] if entry["location"].startswith("plan.html")]
    assert all(re.search("[\u4e00-\u9fff]", entry["title"] + entry["text"]) for entry in chinese)


def test_guides_are_found_before_decisions_and_measurements(site: Path) -> None:
    boosts = {entry["location"].partition("/")[0]: entry.get("boost", 1) for entry in search_index(site)["docs"]}
    assert boosts["decisions"] == boosts["measurements"] == 0.2
    assert boosts["plan.html"] == boosts["troubleshooting.html"] == 1


def test_the_search_finds_chinese_words_within_a_sentence(site: Path) -> None:
    index = search_index(site / "zh")
    words = {word for entry in index["docs"] for word in entry["text"].split(ZERO_WIDTH_SPACE)}
    assert {"显存", "奖励"} <= words
    assert re.split(index["config"]["separator"], f"显存{ZERO_WIDTH_SPACE}奖励") == ["显存", "奖励"]


def test_what_leads_nowhere_stops_the_build(tmp_path: Path) -> None:
    settings = (ROOT / "mkdocs.yml").read_text("utf-8")
    shutil.copytree(ROOT / "docs" / "hooks", tmp_path / "docs" / "hooks")
    (tmp_path / "mkdocs.yml").write_text(settings.split("\nnav:")[0] + "\nnav: [index.md, other.md]\n", "utf-8")
    faults = ("missing.md", "other.md#nowhere", "../rloom/types.py")
    (tmp_path / "docs" / "index.md").write_text("# A\n\n" + " ".join(f"[x]({fault})" for fault in faults))
    (tmp_path / "docs" / "other.md").write_text("# B\n")
    (tmp_path / "docs" / "not_in_nav.md").write_text("# C\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert [fault for fault in (*faults, "not_in_nav.md") if fault not in done.stderr] == []
