"""Which keys the user set, and keys in another spelling: with dots in a YAML file, or by another name."""

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from rloom.config.keys import Key, Root, all_keys
from rloom.config.schema import Config
from rloom.config.verl_keys import TARGET
from rloom.errors import ConfigError

UNSET = "???"  # OmegaConf's marker of a missing value
Tree = dict[str, Any]


@dataclass(frozen=True)
class KeyEntry:
    path: str
    value: Any
    respelled: bool  # written with dots, as `kl_ctrl.kl_coef: 0.001`, or by another name


def default_tree(root: Root = Config) -> Tree:
    """Every key with its default."""
    return nested({path: key.default for path, key in leaf_keys(root).items()})


def unset_tree(root: Root = Config) -> Tree:
    """Every key without a value: values composed on top of it were given. Free dictionaries are empty, since entries
    are added to them."""
    return nested({path: {} if key.takes_any_entry else UNSET for path, key in leaf_keys(root).items()})


@cache
def leaf_keys(root: Root = Config) -> dict[str, Key]:
    return {path: key for path, key in all_keys(root).items() if key.section is None}


def default_of(path: str, root: Root) -> Any:
    """Of an entry of a free dictionary: None."""
    key = leaf_keys(root).get(path)
    return None if key is None else key.default


def known(paths: Iterable[str], root: Root = Config) -> frozenset[str]:
    """The paths that are keys; for an entry of a free dictionary, the key of the dictionary."""
    keys = leaf_keys(root)
    return frozenset(key for path in paths for key in keys if f"{path}.".startswith(f"{key}."))


@cache
def free_dictionaries(root: Root) -> frozenset[str]:
    return frozenset(path for path, key in leaf_keys(root).items() if key.takes_any_entry)


def nested(values: Mapping[str, Any]) -> Tree:
    tree: Tree = {}
    for path, value in values.items():
        put(tree, path, value)
    return tree


def real_key(path: str, root: Root = Config) -> str:
    """The key that a path names: itself, unless it or a section of it has another name."""
    for other, real in root.other_names.items():
        if f"{path}.".startswith(f"{other}."):
            return real + path.removeprefix(other)
    return path


def put(tree: Tree, path: str, value: Any) -> None:
    *sections, name = path.split(".")
    for depth, section in enumerate(sections, start=1):
        below: Any = tree.setdefault(section, {})
        if not isinstance(below, dict):
            above = ".".join(sections[:depth])
            raise ConfigError(f"{path}: {above} is also set, to {below!r}; keep one of the two")
        tree = below
    tree[name] = value


def entries(
    tree: Mapping[Any, Any], prefix: str = "", respelled: bool = False, root: Root = Config
) -> Iterator[KeyEntry]:
    for name, value in tree.items():
        written = f"{prefix}{name}"
        path = real_key(written, root)
        other = respelled or "." in str(name) or path != written
        if isinstance(value, dict) and value and path not in free_dictionaries(root):
            yield from entries(value, f"{path}.", other, root)
        else:
            yield KeyEntry(path, value, other)


def in_real_spelling(tree: Tree, stronger: Collection[str], root: Root = Config) -> Tree:
    """Keys with dots or by another name as nested keys. Keys in `stronger`, those of the command line, keep their
    value, or their entries if it is a free dictionary."""
    respelled = [entry for entry in entries(tree, root=root) if entry.respelled]
    if not respelled:
        return tree
    written = [entry for entry in entries(tree, root=root) if not entry.respelled]
    typed = {entry.path: entry.value for entry in written if entry.path in stronger}
    tree = drop_respelled(tree, root)
    for entry in respelled:
        if entry.path not in stronger:
            put(tree, entry.path, entry.value)
        elif isinstance(entry.value, dict):
            put(tree, entry.path, {**entry.value, **typed[entry.path]})
    return tree


def drop_respelled(tree: Tree, root: Root, prefix: str = "") -> Tree:
    kept: Tree = {}
    for name, value in tree.items():
        if "." in str(name) or f"{prefix}{name}" in root.other_names:
            continue
        inner = drop_respelled(value, root, f"{prefix}{name}.") if isinstance(value, dict) else value
        if inner != {} or value == {}:  # a section that had nothing else is not a key
            kept[name] = inner
    return kept


def given_in_files(tree: Tree, root: Root = Config) -> frozenset[str]:
    """The keys that YAML files set. `tree`: the files composed on top of `unset_tree`."""
    written = [entry for entry in entries(tree, root=root) if entry.value not in (UNSET, {})]
    spelled = {entry.path: entry.value for entry in written if not entry.respelled}
    respelled = [entry for entry in written if entry.respelled and entry.path in spelled]
    # verl's own files have some keys under two names: with one value, one naming the other (${...}), or two defaults
    twice = [
        one.path
        for one in respelled
        if spelled[one.path] not in (one.value, default_of(one.path, root)) and not str(one.value).startswith("${")
    ]
    if twice:
        raise ConfigError(f"{', '.join(twice)}: written twice, in two spellings; keep one")
    return known((entry.path for entry in written), root) - copied_defaults(written, root)


def copied_defaults(written: Collection[KeyEntry], root: Root) -> frozenset[str]:
    """Keys with their default value in a section that a file writes completely, as `rloom config` or verl prints it."""
    keys, sections = leaf_keys(root), defaultdict(set)
    for path, key in keys.items():
        if not key.takes_any_entry:  # an empty dictionary and a missing one look the same
            sections[path.rpartition(".")[0]].add(path)
    paths = {entry.path for entry in written}
    whole = {path for name, own in sections.items() if own <= paths or f"{name}.{TARGET}" in paths for path in own}
    changed = {entry.path for entry in written if entry.path in whole and entry.value != keys[entry.path].default}
    return frozenset((whole & paths) - changed)


def override_value(value: Any) -> str:
    """A value in the grammar of `key=value`."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {override_value(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(override_value(inner) for inner in value) + "]"
    if isinstance(value, str):
        return value if re.fullmatch(r"[\w./][\w./:-]*", value) else "'" + value.replace("'", r"\'") + "'"
    return json.dumps(value)
