"""The files beside train.sh that its users edit: two YAML files with keys, and a Python file with a reward function."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rloom.config.keys import all_keys, did_you_mean
from rloom.config.sources import Tree, entries, known
from rloom.errors import ConfigError

FOLDER_VARIABLE = "RLOOM_KIT_DIR"  # set by train.sh: its own folder
JUDGE_FILE = "api_reward_config.yaml"
REWARD_FILE = "reward_model_config.yaml"
FUNCTION_FILE = "reward_functions.py"
FUNCTION = "compute_score"
JUDGE = "reward_model.api"
REWARD_SECTIONS = ("composite_reward", "reward_model", "custom_reward_function")


@dataclass(frozen=True)
class KeyFile:
    path: Path
    values: Mapping[str, Any]  # dotted keys


def find(name: str, folders: Sequence[str], environment: Mapping[str, str]) -> Path | None:
    """In `folders` of the current directory, then in those of train.sh."""
    kit = environment.get(FOLDER_VARIABLE)
    places = [Path(folder, name) for folder in folders]
    places += [Path(kit, folder, name) for folder in folders if not folder.startswith("..")] if kit else []
    return next((place for place in places if place.is_file()), None)


def judge_file(environment: Mapping[str, str]) -> KeyFile | None:
    """api_reward_config.yaml: keys of the section `reward_model.api`."""
    path = find(JUDGE_FILE, ["."], environment)
    return None if path is None else KeyFile(path, checked_values(path, {"reward_model": {"api": read_tree(path)}}))


def reward_file(environment: Mapping[str, str]) -> KeyFile | None:
    """reward_model_config.yaml: keys of the sections REWARD_SECTIONS."""
    path = find(REWARD_FILE, ["."], environment)
    if path is None:
        return None
    tree = read_tree(path)
    others = [name for name in tree if name.split(".")[0] not in REWARD_SECTIONS]
    if others:
        raise ConfigError(
            f"{path}: {others[0]}: this file takes the sections {', '.join(REWARD_SECTIONS)}; set other keys on the "
            f"command line{did_you_mean(others[0])}"
        )
    return KeyFile(path, checked_values(path, tree))


def function_file(environment: Mapping[str, str]) -> Path | None:
    """common/reward_functions.py, if it defines compute_score. It is parsed and not imported."""
    path = find(FUNCTION_FILE, ["common", "../common"], environment)
    if path is None:
        return None
    try:
        module = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except (SyntaxError, ValueError) as error:  # ValueError: not UTF-8, or a null byte
        raise ConfigError(f"{path}: it is not valid Python: {error}") from error
    return path if FUNCTION in defined_names(module) else None


def defined_names(module: ast.Module) -> Iterator[str]:
    for node in module.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name for alias in names)


def read_tree(path: Path) -> Tree:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: it cannot be read: {' '.join(str(error).split())}") from error
    if tree is None:  # only comments
        return {}
    if not isinstance(tree, dict) or not all(isinstance(name, str) for name in tree):
        raise ConfigError(f"{path}: it holds no keys; write `key: value` lines")
    return tree


def checked_values(path: Path, tree: Tree) -> dict[str, Any]:
    """The keys of `tree` with their values. The values are not in the error: one of them may be a secret."""
    values = {}
    for entry in entries(tree):
        if known([entry.path]):
            values[entry.path] = entry.value
        elif entry.path not in all_keys():
            raise ConfigError(f"{path}: {unknown_key(entry.path)}")
        elif entry.value:  # not a section whose keys are all comments
            raise ConfigError(f"{path}: {entry.path} is a section of keys; write them below it")
    return values


def unknown_key(path: str) -> str:
    if path in (f"{JUDGE}.api_key", f"{JUDGE}.key"):
        return f"{path}: keys are not written to files; put it into an environment variable, such as DASHSCOPE_API_KEY"
    return f"{path}: there is no such key{did_you_mean(path)} (`rloom config` lists them all)"
