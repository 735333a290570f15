"""Descriptions of the configuration: an annotated tree, single keys, and the reference in `docs/`."""

import difflib
from collections.abc import Callable
from typing import Any

import yaml

from rloom.config.frontends import trl
from rloom.config.given_keys import real_key
from rloom.config.keys import IN_SECTION, MOST_GUESSES, Key, Root, all_keys, did_you_mean, walk
from rloom.config.schema import Config, SftConfig
from rloom.config.verl_keys import unsupported_name
from rloom.errors import ConfigError
from rloom.language import translate


def whole_tree(root: Root = Config, shown: Callable[[str], str] = str) -> str:
    """YAML that a user can save and edit: every key with its default, and its description above it, as `shown`."""
    lines = []
    for found in walk(root):
        indent = "  " * found.path.count(".")
        name = found.path.rsplit(".", 1)[-1]
        if found.section is not None:
            lines += ["" if not indent else None, f"{indent}# {shown(found.doc)}", f"{indent}{name}:"]
        else:
            lines += [f"{indent}# {shown(found.doc)}", f"{indent}{name}: {as_yaml(found.default)}"]
    return "\n".join(line for line in lines if line is not None).strip()


def packaged_tree() -> str:
    """The file rloom/trainer/config/ppo_trainer.yaml."""
    return (
        "# Every key, its default and meaning, as in `rloom config`. Written by `make docs`; do not edit.\n"
        "# Your own YAML file holds only your keys and starts with `defaults: [ppo_trainer, _self_]`:\n"
        "#   rloom train --config-path DIR --config-name NAME\n\n"
        f"{whole_tree()}\n"
    )


def explain(name: str, root: Root = Config) -> str:
    """The keys and sections with this name or path; without one, the keys that have it inside of their names."""
    keys, name = all_keys(root), real_key(name, root)
    found = [key for path, key in keys.items() if f".{name}." in f".{path}."]
    if not found and (refusal := unsupported_name(name)) is not None:
        raise ConfigError(refusal)
    if not found and (field := trl.answer(name, sft=root is SftConfig)) is not None:
        if field not in keys:
            return translate(f"{name} is a field of TRL; here: {field}")
        found = [keys[field]]
    found = found or [key for path, key in keys.items() if name.lower() in path.rpartition(".")[2]]
    if not found:
        raise ConfigError(f"{name}: there is no such key{did_you_mean(name, root) or similar_names(name, root)}")
    return "\n".join(describe_key(key) for key in found)


def similar_names(name: str, root: Root) -> str:
    """Less similar ones than `did_you_mean` offers: whoever asks about a key chooses among them."""
    names = {path.rpartition(".")[2]: path for path, key in reversed(all_keys(root).items()) if key.section is None}
    similar = difflib.get_close_matches(name.rpartition(".")[2], names, n=MOST_GUESSES, cutoff=IN_SECTION)
    return f"; similar names are {', '.join(names[one] for one in similar)}" if similar else ""


def describe_key(key: Key) -> str:
    if key.section is not None:
        return f"{key.path}: {translate(key.doc)}"
    return f"{key.path} ({key.kind}, default {as_yaml(key.default)}): {translate(key.doc)}"


def reference() -> str:
    """The page docs/reference.md: one table per section, first of RL training, then of supervised fine-tuning."""
    lines = [
        "# Configuration reference",
        "",
        "Generated from the schema by `make docs`; do not edit. Set keys on the command line: `rloom train key=value`. "
        "The keys of `rloom sft` are in [the second part](#supervised-fine-tuning).",
        *section_tables(Config),
        "",
        "# Supervised fine-tuning",
        "",
        "The keys of `rloom sft key=value`.",
        *section_tables(SftConfig, title="sft: "),
    ]
    return "\n".join(lines) + "\n"


def section_tables(root: Root, title: str = "") -> list[str]:
    lines = []
    for section in (key for key in walk(root) if key.section is not None):
        own = [key for key in walk(root) if parent(key) == section.path and key.section is None]
        if not own:
            continue
        lines += [
            "",
            f"## {title}{section.path}",
            "",
            section.doc,
            "",
            "| key | default | takes | meaning |",
            "| --- | --- | --- | --- |",
        ]
        for key in own:
            name, takes = key.path.rsplit(".", 1)[-1], key.kind.replace("|", ", ")
            lines.append(f"| `{name}` | `{as_yaml(key.default)}` | {takes} | {key.doc} |")
    return lines


def parent(key: Key) -> str:
    return key.path.rpartition(".")[0]


def as_yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n...\n").strip()
