"""The web page of `rloom view`: plain files without markup from data, without requests to others, in two languages."""

import json
import re
from pathlib import Path

import pytest

from rloom.language import read_catalogue
from rloom.view.server import CATALOGUE, CHINESE, PageFiles
from tests.architecture.source import ROOT

PAGE = ROOT / "rloom" / "view" / "page"
FILES = sorted(PAGE.iterdir())
SCRIPTS = [file for file in FILES if file.suffix == ".js"]
MAX_LINES_A_FILE = 450
# What would parse an answer as markup or run it, and any address of another server. Answers are shown through text
# nodes only.
FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|setHTML|DOMParser|srcdoc"
    r"|\beval\b|new Function|javascript:|https?://|['\"(]//\w|\bimportScripts\b|WebSocket|sendBeacon"
)
ENTRY = re.compile(r'^  "([\w.]+)": (".*"),$', re.M)
USED = re.compile(r'"([a-z]+\.[a-z_]+)"')
USED_PREFIX = re.compile(r"\bt\(\s*`([\w.]+)\$\{")


def read(file: Path) -> str:
    return file.read_text(encoding="utf-8")


def texts() -> dict[str, str]:
    return {key: json.loads(text) for key, text in ENTRY.findall(read(PAGE / "texts.js"))}


def placeholders(text: str) -> list[str]:
    return sorted(re.findall(r"\{(\w+)\}", text))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_nothing_parses_markup_runs_text_or_asks_another_server(file: Path) -> None:
    assert FORBIDDEN.findall(read(file)) == []


def test_the_rule_finds_what_it_forbids() -> None:
    for line in ("a.innerHTML = x", "eval(x)", 'fetch("https://a.b")', 'import "//a.b/c.js"', "document.write(x)"):
        assert FORBIDDEN.search(line), line
    assert not FORBIDDEN.search('node.textContent = text; // "a" / "b"')


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_file_is_over_450_lines(file: Path) -> None:
    assert len(read(file).splitlines()) <= MAX_LINES_A_FILE


def test_the_policy_of_the_server_allows_all_of_the_first_page() -> None:
    page = read(PAGE / "index.html")
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon\w+=", page) == []
    named = re.findall(r'(?:src|href)="([\w.]+)"', page)
    assert [name for name in named if PageFiles().get(f"/{name}") is None] == []
    assert {file.name for file in FILES if file.suffix == ".css"} <= set(named)


def test_every_module_is_imported_and_exists() -> None:
    imported = {name for file in SCRIPTS for name in re.findall(r'from "\./([\w.]+)"', read(file))}
    assert imported | {"main.js", "theme.js"} == {file.name for file in SCRIPTS} | {CHINESE[1:]}
    # without the list the browser learns of a module only after it has read the one that imports it
    preloaded = re.findall(r'rel="modulepreload" href="([\w.]+)"', read(PAGE / "index.html"))
    assert preloaded == sorted(imported)


def test_every_text_is_in_both_languages_with_the_same_values() -> None:
    table = texts()
    assert len(table) == len(re.findall(r'^  "[\w.]+":', read(PAGE / "texts.js"), re.M)) > 150
    chinese = read_catalogue(CATALOGUE)
    assert set(chinese) == set(table.values())
    for english, text in chinese.items():
        assert text.strip() and text != english
        assert placeholders(english) == placeholders(text), english


def test_every_text_that_is_used_exists_and_every_text_is_used() -> None:
    known = set(texts())
    code = "\n".join(read(file) for file in SCRIPTS if file.name != "texts.js")
    prefixes = tuple(USED_PREFIX.findall(code))
    named = set(USED.findall(code))
    assert {key for key in re.findall(r'\bt\(\s*"([\w.]+)"', code) if key not in known} == set()
    assert [prefix for prefix in prefixes if not any(key.startswith(prefix) for key in known)] == []
    assert {key for key in known if key not in named and not key.startswith(prefixes)} == set()


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_has_the_contrast_of_wcag_aa_in_both_themes(theme: int) -> None:
    found = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", read(PAGE / "style.css"))
    colours = {name: pair[theme] for name, *pair in found}
    assert contrast("#000000", "#ffffff") == 21
    for text in ("ink", "muted", "accent", "good", "bad", "error", "warning"):
        for behind in ("back", "panel", "raised", "sunken"):
            assert contrast(colours[text], colours[behind]) >= 4.5, (text, behind)
    for line in (f"c{i}" for i in range(10)):  # graphics need less
        assert contrast(colours[line], colours["panel"]) >= 3, line
