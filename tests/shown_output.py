"""Output of training runs that pages show, compared in form with what a run prints: names and order, not numbers."""

import re
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.source import ROOT, files

# The run that a test makes -> the pages that show its output: NAME.md with NAME.zh.md, README.md with README_CN.md.
TRAIN_SH = "002 ./train.sh"
SHOWN = {
    TRAIN_SH: ("README.md", "docs/index.md", "docs/coming_from_verl.md", "examples/tutorial/README.md"),
    "001 bash examples/ppo_trainer/run_gemma.sh": ("examples/ppo_trainer/README.md",),
    "003 bash run_qwen2-7b.sh": ("examples/rloo_trainer/README.md",),
    "grpo_trainer/run_qwen2.5-0.5b.sh": ("examples/grpo_trainer/README.md",),
}
BLOCK = re.compile(r"^```text\n(.*?)^```", re.M | re.S)
STEP = re.compile(r"^step \d+/\d+ · ", re.M)
PATH = re.compile(r"\S*(?:checkpoints|runs)/\S*")
NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*(?:e-?\d+)?")
TIMETABLE = re.compile(r"(steps an epoch; ).*")  # its words depend on the number of steps


def form(line: str) -> str:
    return re.sub(r"\s+", "", NUMBER.sub("#", PATH.sub("PATH", TIMETABLE.sub(r"\1", line))))


def shown_lines(text: str) -> Iterator[str]:
    for block in BLOCK.findall(text):
        if STEP.search(block):
            yield from (line for line in block.splitlines() if line.strip() != "...")


def not_printed(text: str, printed: str) -> list[str]:
    """Lines that a page shows and the run does not print, or not in this order."""
    lines, missing, place = [form(line) for line in printed.splitlines()], [], 0
    for line in shown_lines(text):
        if form(line) in lines[place:]:
            place = lines.index(form(line), place) + 1
        else:
            missing.append(line)
    return missing


def pages_of(run: str) -> list[Path]:
    return [ROOT / name for page in SHOWN.get(run, ()) for name in (page, chinese_name(page))]


def chinese_name(page: str) -> str:
    return page.replace("README.md", "README_CN.md") if "README" in page else page.replace(".md", ".zh.md")


def pages_with_output() -> set[Path]:
    pages = [file for file in files() if file.suffix == ".md"]
    return {page for page in pages if any(shown_lines(page.read_text(encoding="utf-8")))}
