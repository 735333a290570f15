"""Every configuration key is documented and does something."""

import ast

import pytest

from rloom.config.base import PassSection
from rloom.config.keys import Key, all_keys
from rloom.config.schema import Config, SftConfig
from tests.architecture.source import ROOT, modules, parse

RULES = ("base", "checks", "derived", "engine_checks", "episode_sections", "reward_sections", "schema", "sections")
LEAVES = [key for key in all_keys().values() if key.section is None]
SFT_LEAVES = [key for key in all_keys(SftConfig).values() if key.section is None]


def names_read() -> set[str]:
    """Attributes read by the code that acts on the configuration, by its rules and by its own properties."""
    acting = [m.tree for m in modules() if not m.name.startswith(("rloom.config", "rloom.plan"))]
    judging = [parse(ROOT / "rloom" / "config" / f"{name}.py") for name in RULES]
    return {
        node.attr
        for tree in (*acting, *judging)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


@pytest.mark.parametrize("key", [*all_keys().values(), *all_keys(SftConfig).values()], ids=lambda key: key.path)
def test_a_key_says_in_a_sentence_what_it_does(key: Key) -> None:
    assert key.doc.endswith("."), f"{key.path}: {key.doc!r}"
    assert key.doc[0].isupper() or key.doc[0].isdigit() or key.doc.split()[0].rstrip(":") in key.kind.replace("|", " ")


def test_every_key_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    sections = {part.split("\n", 1)[0]: part for part in page.split("\n## ")[1:]}
    titles = [("", key) for key in LEAVES] + [("sft: ", key) for key in SFT_LEAVES]
    missing = [
        f"{title}{key.path}"
        for title, key in titles
        if f"| `{key.path.rsplit('.', 1)[1]}` |" not in sections[title + key.path.rsplit(".", 1)[0]]
    ]
    assert missing == []
    assert len(LEAVES) > 100


def test_every_key_is_read() -> None:
    sections = [key.section for root in (Config, SftConfig) for key in all_keys(root).values()]
    passes = [kind.pass_keys for kind in sections if kind is not None and issubclass(kind, PassSection)]
    read = names_read() | {name for names in passes for name in (names.dynamic, names.budget)}  # by `batching`
    unread = {key.path for key in [*LEAVES, *SFT_LEAVES] if key.path.rsplit(".", 1)[-1] not in read}
    assert unread == set()
