"""The README.md of an exported model: base model, data, algorithm, settings, validation and command."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rloom.errors import DataError
from rloom.runs.measures import shown
from rloom.runs.records import EVENTS_FILE, METRICS_FILE
from rloom.runs.run_folder import Accuracy, accuracies, last_events, read_ends, recorded_measures

# sections whose keys are in the card; the others name machines, servers, folders and trackers
SHOWN = ("data.", "actor_rollout_ref.", "critic.", "algorithm.", "model.", "optim.", "trainer.total_")
HIDDEN = re.compile(r"url|token|secret|password|(?:^|[._])key$|address|server|engine_kwargs|_dir$|custom_chat_template")
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class CardFacts:
    name: str  # of the model
    version: str  # of rloom
    changed: Mapping[str, Any]  # dotted keys whose values are not the defaults
    command: str  # train or sft
    step: int
    base: str
    algorithm: str
    data: Any  # files
    adapter: bool


def model_card(facts: CardFacts, run: Path) -> str:
    """`run`: the run directory, whose metrics are read if it still has them."""
    base = without_folder(facts.base)
    front = [
        "---",
        *([f"base_model: {base}"] if HUB_NAME.fullmatch(facts.base) and not Path(facts.base).exists() else []),
        f"library_name: {'peft' if facts.adapter else 'transformers'}",
        "pipeline_tag: text-generation",
        f"tags: [rloom, {facts.algorithm}{', reinforcement-learning' if facts.command == 'train' else ''}]",
        "---",
    ]
    keys = {key: shown for key, value in facts.changed.items() if (shown := shown_value(key, value)) is not None}
    settings = [f"| `{key}` | `{value}` |" for key, value in keys.items()]
    command = shlex.join(["rloom", facts.command, *(f"{key}={value}" for key, value in keys.items())])
    return "\n".join(
        [
            *front,
            "",
            f"# {facts.name}",
            "",
            f"`{base}`, trained for {facts.step} steps with {facts.algorithm} on {data_names(facts.data)}, by rloom "
            f"{facts.version}.{' This is a LoRA adapter.' if facts.adapter else ''}",
            "",
            *validation_table(run, facts.step),
            "## Settings",
            "",
            "Keys with another value than the default:",
            "",
            "| key | value |",
            "| --- | --- |",
            *settings,
            "",
            "```bash",
            command,
            "```",
            "",
        ]
    )


def validation_table(run: Path, step: int) -> list[str]:
    try:
        _, validations = read_ends(run / METRICS_FILE)
        recorded = recorded_measures(last_events(run / EVENTS_FILE))
    except (OSError, ValueError, DataError):
        return []
    found = accuracies({number: metrics for number, metrics in validations.items() if number <= step}, recorded)
    rows = [f"| {source} | {one.measure} | {row(one)} |" for source, one in found.items()]
    lines = ["## Validation", "", "| data | measure | first | last |", "| --- | --- | --- | --- |", *rows, ""]
    return lines if rows else []


def row(found: Accuracy) -> str:
    first, last = shown(found.first, found.measure), shown(found.last, found.measure)
    return f"{first} (step {found.first_step}) | {last} (step {found.last_step})"


def shown_value(key: str, value: Any) -> str | None:
    """None: it is not part of a published card."""
    if not key.startswith(SHOWN) or HIDDEN.search(key) or value is None or value == "<python>":
        return None
    return shown_text(value)


def shown_text(value: Any) -> str:
    """As an override has it, without the folders of this machine."""
    if isinstance(value, Mapping):
        entries = ((name, one) for name, one in value.items() if not HIDDEN.search(str(name)))
        return f"{{{','.join(f'{without_folder(str(name))}:{shown_text(one)}' for name, one in entries)}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(shown_text, value))}]"
    return without_folder(value) if isinstance(value, str) else str(value)


def data_names(files: Any) -> str:
    names = [files] if isinstance(files, str) else list(files or [])
    own = {"<python>": "rows of a Python program", "embedded": "the embedded data of rloom"}
    return ", ".join(own.get(name) or f"`{without_folder(name)}`" for name in names)


def without_folder(text: str) -> str:
    """A hub name or a short text as it is; of a path, its last two parts, or of an absolute one its last."""
    path = PurePosixPath(text.replace("\\", "/"))
    if path.is_absolute() or text.startswith(("~", ".")) or re.match(r"[A-Za-z]:", text):
        return path.name
    return "/".join(path.parts[-2:]) if len(path.parts) > 2 else text
