"""Documents that agree with the code and with each other, and name nothing of the machine they were written on."""

import re
from pathlib import Path

import pytest

from rloom.config.describe import packaged_tree, reference
from tests.architecture.source import ROOT, texts

MACHINE_PATHS = re.compile(r"(?<![\w.~$}])/(?:work|tmp|root|mnt)/")
REGISTRIES = re.compile(r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|\bghcr\.io|\bdocker\.io|index-url")
AUTHORSHIP = re.compile(
    r"co-authored-by|generated (?:with|by) (?:an )?ai|ai assistant|coding agent|copilot|chatgpt", re.I
)

EXAMPLES = sorted(
    str(file.parent.relative_to(ROOT)) for file in ROOT.glob("examples/*/README*.md") if "CN" in file.name
)
HEADING = re.compile(r"^#{1,6} ")
PAGE = re.compile(r"\bdocs/(?!NAME)[\w/.-]+\.md\b")  # in an error or a comment
SOURCE = re.compile(r"`((?:rloom|tests|benchmarks|examples|recipes)/[\w/.-]*\w)/?`")  # a file or a folder, on a page
HISTORY = "measurements"  # a page of figures names what was there when they were measured
RUNNABLE = ("bash", "sh", "console", "python", "yaml", "json")


def lines_with(pattern: re.Pattern[str], *, tests: bool) -> list[str]:
    return [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()[:120]}"
        for file, text in texts()
        if file != Path(__file__) and file.suffix != ".json" and (tests or not file.is_relative_to(ROOT / "tests"))
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line)
    ]


def test_no_file_names_a_place_on_one_machine() -> None:
    assert lines_with(MACHINE_PATHS, tests=False) == []


def test_no_file_names_a_package_registry() -> None:
    assert lines_with(REGISTRIES, tests=True) == []


def test_no_file_speaks_of_who_typed_it() -> None:
    assert lines_with(AUTHORSHIP, tests=True) == []


def test_the_reference_is_the_one_the_schema_makes() -> None:
    assert (ROOT / "docs" / "reference.md").read_text(encoding="utf-8") == reference(), "run `make docs`"


def test_the_packaged_tree_is_the_one_the_schema_makes() -> None:
    file = ROOT / "rloom" / "trainer" / "config" / "ppo_trainer.yaml"
    assert file.read_text(encoding="utf-8") == packaged_tree(), "run `make docs`"


def test_every_page_that_a_file_names_exists() -> None:
    named = {
        (str(file.relative_to(ROOT)), page)
        for file, text in texts()
        if not file.is_relative_to(ROOT / "docs") and not file.is_relative_to(ROOT / "tests" / "architecture")
        for page in PAGE.findall(text)
    }
    assert [entry for entry in sorted(named) if not (ROOT / entry[1]).is_file()] == []
    assert len(named) > 30


def test_every_source_file_that_a_page_names_exists() -> None:
    folders = ("docs", "examples", "learning_notes", "recipes")
    pages = [page for folder in folders for page in (ROOT / folder).rglob("*.md") if HISTORY not in page.parts]
    named = {(page.name, name) for page in pages for name in SOURCE.findall(page.read_text(encoding="utf-8"))}
    assert [entry for entry in sorted(named) if not (ROOT / entry[1]).exists()] == []
    assert len(named) > 30


def blocks(text: str) -> list[tuple[str, list[str]]]:
    """(language, lines) of each fenced block, comments cut off: those are translated."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)
    return [(language, [re.sub(r"(^|\s+)#.*", "", line) for line in body.splitlines()]) for language, body in found]


def headings(text: str) -> list[int]:
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return [line.index(" ") for line in prose.splitlines() if HEADING.match(line)]


@pytest.mark.parametrize("folder", [".", *EXAMPLES])
def test_the_readmes_of_both_languages_are_equal(folder: str) -> None:
    files = [ROOT / folder / "README.md", ROOT / folder / "README_CN.md"]
    english, chinese = (file.read_text(encoding="utf-8") for file in files)
    assert headings(english) == headings(chinese)
    assert [language for language, _ in blocks(english)] == [language for language, _ in blocks(chinese)]
    for (language, one), (_, other) in zip(blocks(english), blocks(chinese), strict=True):
        if language in RUNNABLE:
            assert one == other
        else:
            assert len(one) == len(other)


def test_every_folder_of_examples_has_a_readme_in_both_languages() -> None:
    found = {"examples/ppo_trainer", "examples/rloo_trainer", "examples/grpo_trainer", "examples/tutorial"}
    assert found | {"examples/reward_server"} <= set(EXAMPLES)


@pytest.mark.parametrize("folder", EXAMPLES)
def test_links_between_examples_and_documents_exist(folder: str) -> None:
    for name in ("README.md", "README_CN.md"):
        text = (ROOT / folder / name).read_text(encoding="utf-8")
        links = [link.split("#")[0] for link in re.findall(r"\]\((?!http)([^)]+)\)", text)]
        assert [link for link in links if not (ROOT / folder / link).exists()] == []


def test_a_commented_block_counts_as_the_same_command() -> None:
    one, other = "```bash\n./train.sh  # learns\n```\n", "```bash\n./train.sh  # 学习\n```\n"
    assert blocks(one) == blocks(other) == [("bash", ["./train.sh"])]
    assert headings("# A\n```bash\n# no heading\n```\n## B\n") == [1, 2]
