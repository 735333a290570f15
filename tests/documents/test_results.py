"""The page of results: its scripts exist, their keys compose, and both languages have equal commands and figures."""

import re
import shlex
from pathlib import Path

import pytest

from tests.unit.config.test_config_recipes import SCRIPTS, config_of

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / name for name in ("results.md", "results.zh.md")]


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


RECIPES = [shlex.split(command) for command in commands(PAGES[0]) if "/train.sh" in command]


def test_every_script_that_the_page_starts_exists_and_every_recipe_is_on_it() -> None:
    named = {word for command in commands(PAGES[0]) for word in shlex.split(command) if word.endswith((".py", ".sh"))}
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []
    assert {words[0].removeprefix("recipes/") for words in RECIPES} == set(SCRIPTS)


@pytest.mark.parametrize("words", RECIPES, ids=" ".join)
def test_a_command_of_a_recipe_sets_its_keys(words: list[str], tmp_path: Path) -> None:
    script, _, *own = words
    config = config_of(script.removeprefix("recipes/"), tmp_path, *own)
    assert config.algorithm.adv_estimator == ("gae" if "ppo" in own else "grpo")
    given = dict(word.split("=") for word in own if "=" in word)
    assert given.keys() <= config.given


def test_both_languages_have_the_same_commands_and_figures() -> None:
    english, chinese = (page.read_text(encoding="utf-8") for page in PAGES)
    assert commands(PAGES[0]) == commands(PAGES[1])
    tables = [re.findall(r"^\|.* \| (?:GRPO|PPO|RLOO) \|.*$", text, re.M) for text in (english, chinese)]
    figures = [[re.findall(r"\d+\.\d+", row) for row in rows] for rows in tables]
    assert figures[0] == figures[1] and len(figures[0]) >= 6
