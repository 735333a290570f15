"""The 337 entries of the users' documents, their states, and the page that lists them.

A check is a kind and an argument: `key algorithm.lam`. `python -m tests.documents.entries en|zh` prints the page.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

FILE = Path(__file__).with_name("entries.yaml")

# Kinds that a test looks at: the entry works. kind -> how the page names it, in English and Chinese
WORKS = {
    "command": ("the command is started as printed, and run for two steps: `{}`", "命令按原文启动，并试跑两步：`{}`"),
    "run": ("the command is run as printed: `{}`", "命令按原文运行：`{}`"),
    "key": ("`rloom config {}`", "`rloom config {}`"),
    "keys": ("added to a command of the same document: `{}`", "加到同一文档的命令后：`{}`"),
    "yaml": ("the YAML of document {} is read as printed", "文档 {} 的 YAML 按原文读取"),
    "flag": ("`./train.sh {}`", "`./train.sh {}`"),
    "variable": ("`{}=... ./train.sh`", "`{}=... ./train.sh`"),
    "openrlhf": ("`rloom openrlhf {}`", "`rloom openrlhf {}`"),
    "extra": ("`pip install -e .[{}]`", "`pip install -e .[{}]`"),
    "metric": ("metric `{}`", "指标 `{}`"),
    "file": ("`{}`", "`{}`"),
    "page": ("[guide]({})", "[说明]({})"),
    "test": ("tested: {}", "测试：{}"),
}
# Kinds of entries that no test can look at here: "kind: reason"
STATES = {
    "gpus": ("needs GPUs", "需要 GPU"),
    "network": ("needs the network", "需要网络"),
    "choice": ("different", "有差异"),
    "missing": ("not in this version", "本版本尚未提供"),
}
WORKING = ("works", "可用")
HEADS = (
    """# Coming from the documents

Every command, key, flag, variable, file, metric and answer of the five documents that rloom follows, with its state.
Replace `verl` with `rloom` in a command and run it. `RLOOM_SMOKE=1` in front of it runs two steps with a tiny model and
tiny data first. This page is generated (`make docs`); tests look at each entry that works.
""",
    "# 从文档出发\n\n"
    "五份文档中的每条命令、键、参数、环境变量、文件、指标和问答，以及它们在 rloom 中的状态。"
    "把命令中的 `verl` 换成 `rloom` 即可运行；"
    "前面加上 `RLOOM_SMOKE=1`，会先用很小的模型和数据试跑两步。本页由 `make docs` 生成，标为“可用”的每一项都有测试。\n",
)
COLUMNS = ("| no. | what the document has | state | how |", "| 编号 | 文档内容 | 状态 | 依据 |")
TOTALS = ("| document | entries |", "| 文档 | 条目 |")
DOCUMENT, TOGETHER = ("Document", "文档"), ("together", "合计")


@dataclass(frozen=True)
class Check:
    kind: str
    argument: str

    def shown(self, language: int) -> str:
        if self.kind in STATES:
            return self.argument
        return WORKS[self.kind][language].format(self.text)

    @property
    def text(self) -> str:
        if self.kind == "page":
            return self.argument.removeprefix("docs/")
        return self.argument.removeprefix("test_").replace("_", " ") if self.kind == "test" else self.argument


@dataclass(frozen=True)
class Entry:
    number: str
    what: str
    checks: tuple[Check, ...]

    @property
    def document(self) -> str:
        return self.number[:3]

    def state(self, language: int) -> str:
        return STATES.get(self.checks[0].kind, WORKING)[language]


def read() -> tuple[dict[str, str], list[Entry]]:
    """(title of each document, entries)"""
    documents = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    entries = [
        Entry(row["id"], row["what"], tuple(parsed(text) for text in row["checks"]))
        for document in documents.values()
        for row in document["entries"]
    ]
    return {number: document["title"] for number, document in documents.items()}, entries


def parsed(text: str) -> Check:
    kind, _, argument = text.partition(" ")
    return Check(kind.removesuffix(":"), argument)


def page(language: int) -> str:
    titles, entries = read()
    states = [WORKING, *STATES.values()]
    names = [state[language] for state in states]
    lines = [HEADS[language], f"{TOTALS[language]} {' | '.join(names)} |", "| --- " * (len(names) + 2) + "|"]
    for name, of in [(number, number) for number in titles] + [(TOGETHER[language], "")]:
        found = [entry.state(language) for entry in entries if entry.number.startswith(of)]
        lines.append(f"| {name} | {len(found)} | {' | '.join(str(found.count(state)) for state in names)} |")
    for number, title in titles.items():
        lines += ["", f"## {DOCUMENT[language]} {number}: {title}", "", COLUMNS[language], "| --- " * 4 + "|"]
        lines += [row(entry, language) for entry in entries if entry.document == number]
    return "\n".join(lines) + "\n"


def row(entry: Entry, language: int) -> str:
    how = "; ".join(check.shown(language) for check in entry.checks)
    return "| " + " | ".join([entry.number, *(cell(text) for text in (entry.what, entry.state(language), how))]) + " |"


def cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(page(["en", "zh"].index(sys.argv[1])))
