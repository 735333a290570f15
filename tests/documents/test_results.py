"""The page of results: its scripts exist, and the keys of its recipes compose."""

import re
import shlex
from pathlib import Path

import pytest

from tests.unit.config.test_config_recipes import SCRIPTS, config_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results.md"


def commands() -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


RECIPES = [shlex.split(command) for command in commands() if "/train.sh" in command]


def test_every_script_that_the_page_starts_exists_and_every_recipe_is_on_it() -> None:
    named = {word for command in commands() for word in shlex.split(command) if word.endswith((".py", ".sh"))}
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []
    assert {words[0].removeprefix("recipes/") for words in RECIPES} == set(SCRIPTS)


@pytest.mark.parametrize("words", RECIPES, ids=" ".join)
def test_a_command_of_a_recipe_sets_its_keys(words: list[str], tmp_path: Path) -> None:
    script, _, *own = words
    config = config_of(script.removeprefix("recipes/"), tmp_path, *own)
    assert config.algorithm.adv_estimator == ("gae" if "ppo" in own else "grpo")
    given = dict(word.split("=") for word in own if "=" in word)
    assert given.keys() <= config.given
