"""The 337 entries of the users' documents (entries.yaml), their states, and the guide to what differs.

A check is a kind and an argument: `key algorithm.lam`. `python -m tests.documents.entries en|zh` prints the guide.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).with_name("entries.yaml")

# What a check looks at. Of the first kinds something is run; of the others a test sees that they are accepted or exist.
RUN_KINDS = ("test", "run", "metric", "command")
KINDS = (*RUN_KINDS, "key", "keys", "yaml", "flag", "variable", "openrlhf", "extra", "file", "page")
STATES = {
    "works": ("works", "可用"),
    "small": ("accepted, tried small", "已接受，只小规模试过"),
    "gpus": ("needs GPUs", "需要 GPU"),
    "network": ("needs the network", "需要网络"),
    "differs": ("differs", "有差异"),
}
# What ran in place of what the document names: [small, KIND].
TRIED = {
    "stand_ins": (
        "One step, after the commands printed before it and in the same folder: small random models and a few rows of "
        "data under the printed names, at most two workers on a CPU, the native engine",
        "在同一目录里按印出的顺序依次运行，各一步：同名的随机小模型和几行数据，CPU 上最多两个 worker，native 引擎",
    ),
    "server": (
        "A server on this machine that answers by the engine's protocol",
        "用本机上按引擎协议应答的服务代替引擎",
    ),
    "workers": ("Two workers on a CPU in place of 8 or 16 GPUs", "用 CPU 上的两个 worker 代替 8 或 16 张 GPU"),
    "machines": (
        "Two nodes of Ray on one machine in place of several machines",
        "用一台机器上的两个 Ray 节点代替多台机器",
    ),
    "tensor_parallel": (
        "Two workers on a CPU that share an engine of vLLM (`make test-vllm`); numbers of engines by `rloom plan`",
        "CPU 上的两个 worker 共用一个 vLLM 引擎（`make test-vllm`）；引擎数由 `rloom plan` 计算",
    ),
    "megatron": (
        "megatron-core on up to four ranks of a CPU, with a tiny model",
        "在 CPU 的最多四个 rank 上运行 megatron-core，模型很小",
    ),
    "judge": (
        "A server on this machine that answers by the provider's protocol",
        "用本机上按服务商协议应答的服务代替服务商",
    ),
    "hub": ("A hub on this machine with a few rows of data", "用本机上只有几行数据的 hub 代替"),
    "family": ("Small random models of the family", "用该模型族的随机小模型代替"),
    "classifier": ("A small random model of the same structure", "用同样结构的随机小模型代替"),
}
GUIDE = (
    """# Coming from the documents

Five documents describe how users train: 000 to 004. rloom has an entry for each command, key, flag, variable, file,
metric and answer in them. Replace `verl` with `rloom` in a command and run it; `RLOOM_SMOKE=1` in front of it
[tries it](commands.md#a-smoke-run) for two steps, without GPU, model and data. This page lists what differs from the
documents and what was tried only on a small scale. It is generated (`make docs`) from the list of all entries,
`tests/documents/entries.yaml`; a test looks at the proof of each.

{counts}

- **works**: a test runs what the document promises ({run} entries; offload and the share of the cache on one GPU), or
  it is a single key or a file, which a test sees accepted as printed or finds ({accepted} entries).
- **accepted, tried small**: accepted as printed; what was run is smaller than what the document names.
- **needs GPUs**, **needs the network**: not run as the document describes.
- **differs**: another default, name, meaning or output, with the reason.

## What differs

{differs}

## Accepted, tried small

{small}

## Needs GPUs or the network

{needs}
""",
    "# 从文档出发\n\n"
    "五份文档（000 到 004）说明用户如何训练。rloom 为其中的每条命令、配置项、参数、环境变量、文件、指标和问答各列一项。"
    "把命令中的 `verl` 换成 `rloom` 即可运行；前面加上 `RLOOM_SMOKE=1`，会先[试运行](commands.zh.md#a-smoke-run)两步，"
    "不需要 GPU、模型和数据。本页列出与文档不同之处，以及只在小规模上试过的内容。"
    "本页由 `make docs` 根据全部条目的列表 `tests/documents/entries.yaml` 生成；每一项的依据都有测试核对。\n\n"
    "{counts}\n\n"
    "- **可用**：有测试运行了文档所说的内容（{run} 项；其中卸载和缓存占比在一张 GPU 上运行）；"
    "或者是单个配置项或文件，测试确认它按原文被接受，或确实存在（{accepted} 项）。\n"
    "- **已接受，只小规模试过**：按原文被接受，但实际运行的规模小于文档所说的。\n"
    "- **需要 GPU**、**需要网络**：没有按文档描述的方式运行过。\n"
    "- **有差异**：默认值、名称、含义或输出不同，并写明原因。"
    """

## 有差异的内容

{differs}

## 已接受、只小规模试过的内容

{small}

## 需要 GPU 或网络的内容

{needs}
""",
)
HEADS = {
    "counts": ("| document | entries |", "| 文档 | 条目 |"),
    "differs": ("| no. | the document | rloom |", "| 编号 | 文档 | rloom |"),
    "needs": ("| no. | the document | state |", "| 编号 | 文档 | 状态 |"),
}
TOGETHER = ("together", "合计")
SEPARATORS = (": ", "：")


@dataclass(frozen=True)
class Check:
    kind: str
    argument: str


@dataclass(frozen=True)
class Entry:
    number: str
    what: tuple[str, str]  # in English and Chinese
    state: str
    reason: tuple[str, ...]  # in English and Chinese, or what was tried
    checks: tuple[Check, ...]

    @property
    def ran(self) -> bool:
        """Whether a test runs it in full; a command with small models is not that."""
        return any(check.kind in RUN_KINDS and check.kind != "command" for check in self.checks)


def read() -> tuple[dict[str, list[str]], list[Entry]]:
    """(titles of each document, entries)"""
    documents = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    entries = [entry_of(row) for document in documents.values() for row in document["entries"]]
    return {number: document["title"] for number, document in documents.items()}, entries


def entry_of(row: dict[str, Any]) -> Entry:
    state, *reason = row.get("state", ["works"])
    checks = tuple(Check(*text.split(" ", 1)) for text in row["checks"])
    return Entry(row["id"], (row["what"], row.get("zh", row["what"])), state, tuple(reason), checks)


def has_words(what: str) -> bool:
    """Whether there is something to translate outside of code."""
    return bool(re.search(r"[a-z]{2}", re.sub(r"`[^`]*`", "", what)))


def page(language: int) -> str:
    titles, entries = read()
    works = [entry for entry in entries if entry.state == "works"]
    return GUIDE[language].format(
        counts=counts(titles, entries, language),
        run=sum(entry.ran for entry in works),
        accepted=sum(not entry.ran for entry in works),
        differs=table("differs", [(e, e.reason[language]) for e in entries if e.state == "differs"], language),
        small=tried_small(entries, language),
        needs=table(
            "needs",
            [
                (e, STATES[e.state][language] + SEPARATORS[language] + e.reason[language])
                for state in ("gpus", "network")
                for e in entries
                if e.state == state
            ],
            language,
        ),
    )


def counts(titles: dict[str, list[str]], entries: list[Entry], language: int) -> str:
    names = " | ".join(name[language] for name in STATES.values())
    lines = [f"{HEADS['counts'][language]} {names} |", "| --- " * (len(STATES) + 2) + "|"]
    rows = [(f"{number} {title[language]}", number) for number, title in titles.items()]
    for name, number in [*rows, (TOGETHER[language], "")]:
        states = [entry.state for entry in entries if entry.number.startswith(number)]
        lines.append(f"| {name} | {len(states)} | {' | '.join(str(states.count(state)) for state in STATES)} |")
    return "\n".join(lines)


def table(name: str, rows: list[tuple[Entry, str]], language: int) -> str:
    lines = [HEADS[name][language], "| --- | --- | --- |"]
    for entry, last in rows:
        lines.append(f"| {entry.number} | {cell(entry.what[language])} | {cell(last)} |")
    return "\n".join(lines)


def tried_small(entries: list[Entry], language: int) -> str:
    parts = []
    for kind, texts in TRIED.items():
        found = [entry for entry in entries if entry.state == "small" and entry.reason == (kind,)]
        if found:
            items = "\n".join(f"- {entry.number} {entry.what[language]}" for entry in found)
            parts.append(f"{texts[language]}{SEPARATORS[language].strip()}\n\n{items}")
    return "\n\n".join(parts)


def cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(page(["en", "zh"].index(sys.argv[1])))
