"""Keys and commands that the guides print: they exist and are accepted."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from rloom.config.keys import all_keys
from rloom.config.load import load_config, load_sft_config
from rloom.config.schema import SftConfig
from tests.architecture.source import ROOT

PAGES = sorted((ROOT / "docs").glob("*.md"))
SECTIONS = "data|actor_rollout_ref|critic|reward_model|algorithm|trainer|custom_reward_function|ray_kwargs"
# a whole dotted key; not the start of a pattern such as trainer.pools.{ref,critic}, nor a flag such as --data.max_len
KEY = re.compile(rf"(?<![\w./{{-])((?:{SECTIONS})(?:\.[a-z][a-z_0-9]*)+)(?=[=\s`',\"\]);:]|\.\s)")
SFT_PAGES = ("sft.md", "sft.zh.md", "reference.md")  # pages that also name keys of `rloom sft`
SFT_KEY = re.compile(r"(?<![\w./{-])((?:model|optim|engine)(?:\.[a-z][a-z_0-9]*)+)(?=[=\s`])")
COLUMNS = {"reward_model.ground_truth"}  # columns of a data file, written like a key
# any name below
OPEN = ("rollout.engine_kwargs.", "function.reward_kwargs.", "model.override_config.", "ray_init.", "template_kwargs.")
REFUSED = re.compile(
    r"^\| .*(?:remove|not in this version|the actor's keys|删去|本版本不支持|actor 的配置项).*\|$", re.M
)
COMMAND = re.compile(r"^```bash\n(.*?)^```", re.M | re.S)


def unknown_keys(text: str, page: str = "") -> set[str]:
    text = re.sub(r"\]\([^)]*\)", "]", REFUSED.sub("", text))
    known = {*all_keys(), *COLUMNS, *(all_keys(SftConfig) if page in SFT_PAGES else ())}
    found = KEY.findall(text) + (SFT_KEY.findall(text) if page.startswith("sft.") else [])
    return {key for key in found if key not in known and not any(name in key for name in OPEN)}


def commands(text: str, *names: str) -> Iterator[list[str]]:
    """The `key=value` arguments of the named commands (`rloom train`) in the code blocks."""
    for block in COMMAND.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if f"{line} ".startswith(tuple(f"{name} " for name in names)):
                words = shlex.split(line, comments=True)[2:]
                yield [word for word in words if "=" in word and not word.startswith("-")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_key_on_a_page_exists(page: Path) -> None:
    assert unknown_keys(page.read_text(encoding="utf-8"), page.name) == set()


@pytest.mark.parametrize("page", [p for p in PAGES if not p.name.endswith(".zh.md")], ids=lambda page: page.name)
def test_every_command_on_a_page_is_accepted(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for arguments in commands(text, "rloom train", "rloom plan"):
        load_config(arguments)
    for arguments in commands(text, "rloom sft"):
        load_sft_config(arguments)


def test_an_unknown_key_and_a_command_over_two_lines_are_found() -> None:
    assert unknown_keys("`data.seeds=1`, `data.seed`, [x](data.md)\n| `data.image_key` | remove |\n") == {"data.seeds"}
    assert unknown_keys("`--data.max_len`, `data.max_lengths`") == {"data.max_lengths"}
    assert unknown_keys("`data.max_length`, `optim.lrs=1`", "sft.md") == {"optim.lrs"}
    page = "```bash\nrloom plan a.b=1 \\\n    'c.d=[1, 2]' ... --gpu_memory 80   # why\nls\n```\n"
    assert list(commands(page, "rloom plan")) == [["a.b=1", "c.d=[1, 2]"]]
