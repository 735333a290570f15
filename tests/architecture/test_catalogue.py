"""The Chinese of every sentence that a user can read (rloom/assets/zh), without stale entries, with the same values."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from rloom.language import FOLDER, PLACE, read_catalogue, template_of, to_chinese
from tests.architecture.sentences import FILLED_LATER, SENTENCE, sentences, templates
from tests.architecture.source import ROOT

RLOOM = ROOT / "rloom"
TABLES = RLOOM / "assets" / "tables"
OF_OTHERS = "argparse.txt"  # texts of argparse, in the help and the errors of commands
OF_THE_PAGE = "page.txt"  # tests/architecture/test_page.py
# No texts for users: scripts for a shell, prompts for models and what environments answer them, generated problems and
# documents, patterns of warnings, errors that an agent's program receives.
NO_TEXTS = {
    "cli/completion.py", "config/describe.py", "data/prepare/arithmetic.py",
    "engines/megatron/groups.py", "environments/python.py", "environments/rooms.py",
    "environments/search.py", "environments/sql.py", "rewards/judge/store.py", "rewards/sandbox/launcher.py",
    "rollout/servers/trtllm_server.py", "runs/model_card.py", "view/server.py",
    *(f"episodes/gateway/{name}.py" for name in ("chat", "fields", "messages", "responses")),
}  # fmt: skip
NO_TEXT = re.compile(
    r"^(?:Think step by step|Answer with a Python function|Complete this Python function|Submit the verdict"
    r"|You can call a tool with a block|Write nothing after the block"
    r"|Give one score|There are \{count\}|Only the tags|For further information|If reserved but|ran out of memory"
    r"|huggingface-cli is now|module 'rloom' has|trainer.pools=\{actor|\{% for)"
)
COMMAND = re.compile(r"^(?:rloom|%\(prog\)s|python|import|try|complete|\{\} -m pip) |^# |^<!--|--editable")
PARTS = re.compile(r"\{\}|[:;,.()×=/\d]| a ")
PLURAL = re.compile(r"[a-z]\{\}")  # `{} step{}`: Chinese has no plural


@cache
def catalogue() -> dict[str, str]:
    return {english: chinese for file in FOLDER.iterdir() for english, chinese in read_catalogue(file).items()}


@cache
def all_templates() -> frozenset[str]:
    """Of all texts in the code and the tables of flags, also words that are no sentence."""
    found = set()
    for file in RLOOM.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for text in templates(node):
                shown = re.sub("%[sd]", "{}", text)
                found |= {part.strip() for part in (shown, *shown.split("\n\n"), *shown.split("\n"))}
                found.add(FILLED_LATER.sub("{}", shown).strip())
    for table in TABLES.glob("*.yaml"):
        found |= set(texts_of(yaml.safe_load(table.read_text(encoding="utf-8"))))
    return frozenset(found)


def texts_of(tree: object) -> list[str]:
    if isinstance(tree, dict):
        return [text for value in tree.values() for text in texts_of(value)]
    if isinstance(tree, list):
        return [text for value in tree for text in texts_of(value)]
    return [tree] if isinstance(tree, str) else []


def is_translated(text: str) -> bool:
    """As a whole, by paragraphs or by lines, as `to_chinese` looks for it."""
    known = catalogue()
    return any(
        all(part.strip() in known or not SENTENCE.search(part) or COMMAND.search(part.strip()) for part in parts)
        for parts in ([text], text.split("\n\n"), text.split("\n"))
    )


FILES = [file for file in sorted(RLOOM.rglob("*.py")) if str(file.relative_to(RLOOM)) not in NO_TEXTS]


@pytest.mark.parametrize("folder", sorted({file.relative_to(RLOOM).parts[0] for file in FILES}))
def test_every_sentence_has_a_translation(folder: str) -> None:
    files = [file for file in FILES if file.relative_to(RLOOM).parts[0] == folder]
    missing = [
        f"{file.relative_to(ROOT)}:{line}: {text}"
        for file in files
        for line, text in sentences(file)
        if not is_translated(text) and not NO_TEXT.search(text)
    ]
    assert missing == []


@pytest.mark.parametrize("table", sorted(TABLES.glob("*.yaml")), ids=lambda table: table.name)
def test_every_sentence_of_a_table_has_a_translation(table: Path) -> None:
    """As it is, or as it is shown: with keys and values in the places of a template."""
    found = texts_of(yaml.safe_load(table.read_text(encoding="utf-8")))
    shown = {text: FILLED_LATER.sub("key=value", text.replace("$", "section")) for text in found}
    sentences = [text for text in found if SENTENCE.search(text)]
    assert [text for text in sentences if not is_translated(text) and to_chinese(shown[text]) == shown[text]] == []


@pytest.mark.parametrize("file", sorted(FOLDER.iterdir()), ids=lambda file: file.name)
def test_an_entry_has_the_values_of_its_text_and_is_chinese(file: Path) -> None:
    for english, chinese in read_catalogue(file).items():
        assert chinese.strip(), english
        given = english.count("{}")
        places = [int(place) if place else number for number, place in enumerate(PLACE.findall(chinese))]
        needed = given - len(PLURAL.findall(english))
        assert set(places) <= set(range(given)) and len(places) == len(set(places)) >= needed, english


@pytest.mark.parametrize("file", sorted(FOLDER.iterdir()), ids=lambda file: file.name)
def test_every_entry_is_a_text_of_the_code(file: Path) -> None:
    """Or its parts are: what the code joins from several texts may have one entry."""
    if file.name in (OF_OTHERS, OF_THE_PAGE):
        return
    known = all_templates()
    everything = "\n".join(known)
    made = [template_of(text, "") for text in known if text.count("{}") == 1 and len(text) > 4]
    stale = [
        english
        for english in read_catalogue(file)
        if english not in known
        and any(part.strip(" =\n").rstrip("s") not in everything for part in PARTS.split(english))
        and all(template.values(english) is None for template in made)
    ]
    assert stale == []


def test_an_english_text_has_one_entry() -> None:
    files = {file.name: read_catalogue(file) for file in FOLDER.iterdir()}
    found: dict[str, str] = {}
    for entries in files.values():
        for english, chinese in entries.items():
            assert found.setdefault(english, chinese) == chinese, english


@pytest.mark.parametrize(
    ("english", "chinese"),
    [
        (
            "actor_rollout_ref.rollout.n=1: rloo compares the answers to one prompt; use 2 or more, or "
            "algorithm.adv_estimator=gae",
            "actor_rollout_ref.rollout.n=1：rloo 比较同一 prompt 的多个回答；请使用 2 或更大的值，或 "
            "algorithm.adv_estimator=gae",
        ),
        ("a.json: no such file; name a file in it: b.json", "a.json：没有该文件；请指定其中的一个文件：b.json"),
        (
            "algorithm.gamma=0.9: no effect in this run, because algorithm.adv_estimator=rloo does not discount; "
            "use 1.0, or gae, reinforce_plus_plus or remax",
            "algorithm.gamma=0.9：在本次训练中不起作用，因为 algorithm.adv_estimator=rloo 不使用折扣；"
            "请使用 1.0，或 gae、reinforce_plus_plus 或 remax",
        ),
        (
            "worker 1 died. Its process 12 exited, ended by SIGKILL; Linux sends it when the machine's memory "
            "is used up.",
            "worker 1 已终止。其进程 12 已退出，终止信号：SIGKILL；机器内存耗尽时 Linux 会发送该信号。",
        ),
        ("no such text is known: stays", "no such text is known: stays"),
        ("/tmp/run: data.seed=-1: must be 0 or more", "/tmp/run：data.seed=-1：必须为 0 或更大"),
        ("data.seed=-1: must be 0 or more\nlr is 3", "data.seed=-1：必须为 0 或更大\nlr 为 3"),
    ],
)
def test_a_text_is_filled_with_the_values_of_its_template(english: str, chinese: str) -> None:
    assert to_chinese(english) == chinese
