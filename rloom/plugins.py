"""Estimators, losses, engines and strategies from outside rloom, with errors that name the fault.

A key names one as `module:name` or `file.py:name`, or by the name that an installed package registers as an entry
point. Imports no torch.
"""

import ast
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from rloom.errors import ConfigError
from rloom.import_path import add_folder_of
from rloom.written_names import Definition, bound_names, defines_unseen_names

T = TypeVar("T")
Reference = str | Callable[..., Any]  # `module:name` is imported when it is called first


def referenced(reference: Reference) -> Callable[..., Any]:
    """The function of a declaration. `module:Class.method` is accepted, too."""
    if not isinstance(reference, str):
        return reference
    module, _, name = reference.partition(":")
    return attrgetter(name)(importlib.import_module(module))  # type: ignore[no-any-return]


def is_own(name: str, group: str) -> bool:
    """Whether `name` is the user's own: file.py:name, module:name, or an entry point of an installed package."""
    return ":" in name or name in installed(group)


def resolve(key: str, name: str, table: Mapping[str, T], group: str) -> T | Any:
    """rloom's entry of that name, or the user's own object, which can be of any type. `group`: of entry points."""
    if name in table:
        return table[name]
    if ":" in name:
        return load_plugin(key, name)
    if name not in installed(group):
        raise unknown_entry(key, name, [*table, *installed(group)])
    return load_entry(key, installed(group)[name])


def resolve_kind(key: str, name: str, table: Mapping[str, T], group: str, kind: type[T]) -> T:
    """The declaration of that name. A user's own file is loaded. `key`: for error messages."""
    found = resolve(key, name, table, group)
    if isinstance(found, kind):
        return found
    raise ConfigError(f"{key}={name} is a {type(found).__name__}; use a {kind.__name__} (docs/extending.md)")


def unknown_entry(key: str, name: str, known: Iterable[str]) -> ConfigError:
    return ConfigError(
        f"{key}={name}: there is no such entry; use one of {', '.join(known)}, "
        "or your own as my_module:my_function or ./my_file.py:my_function"
    )


def installed(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of a group by name, in all packages that this process can import."""
    return entries_on(tuple(sys.path), group)


@cache  # reads a file of every installed package
def entries_on(path: tuple[str, ...], group: str) -> Mapping[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=group)}


@cache  # the loss is resolved for every micro-batch
def load_entry(key: str, entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:
        raise ConfigError(
            f"{key}={entry.name}: the entry point {entry.value}"
            f"{'' if entry.dist is None else f' of the package {entry.dist.name}'} cannot be loaded "
            f"({type_and_message(error)}); correct or remove that package"
        ) from error


@cache  # the loss is resolved for every micro-batch
def load_plugin(key: str, reference: str) -> Any:
    """The object that `reference` names. `key`: the configuration key, for error messages."""
    place, _, name = reference.rpartition(":")
    is_file = place.endswith(".py") or "/" in place
    module = load_file(key, reference, place) if is_file else load_module(key, reference, place)
    if name not in vars(module):
        own = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise ConfigError(f"{key}={reference}: {place} has no {name!r}; it has {', '.join(own) or 'no functions'}")
    return vars(module)[name]


def check_reference(key: str, reference: str) -> None:
    """The faults of a file.py:name or module:name that can be found without running it."""
    place, _, name = reference.rpartition(":")
    if not (place.endswith(".py") or "/" in place):
        if importlib.util.find_spec(place.partition(".")[0]) is None:
            raise ConfigError(
                f"{key}={reference}: there is no module {place!r}; put its folder on PYTHONPATH, or name the file: "
                f"./my_file.py:{name}"
            )
        return
    file = plugin_file(key, reference, place)
    try:
        module = ast.parse(file.read_bytes(), str(file))
    except (OSError, SyntaxError, ValueError) as error:  # ValueError: a null byte
        raise not_loaded(key, reference, file, error) from error
    bound = set(bound_names(module.body))
    if name not in bound and not defines_unseen_names(module, bound):
        shown = ", ".join(public_definitions(module)) or "no functions"
        raise ConfigError(f"{key}={reference}: {place} has no {name!r}; it has {shown}")


def public_definitions(module: ast.Module) -> list[str]:
    """The names of its functions and classes."""
    own = [node.name for node in module.body if isinstance(node, Definition | ast.ClassDef)]
    return [name for name in own if not name.startswith("_")]


def names_in_file(name: str) -> list[str]:
    """What `file.py` may be followed by. Empty: there is no such file, or it is no Python."""
    try:
        return public_definitions(ast.parse(Path(name).expanduser().read_bytes()))
    except (OSError, SyntaxError, ValueError):
        return []


def load_module(key: str, reference: str, place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except Exception as error:
        raise ConfigError(
            f"{key}={reference}: the module {place!r} cannot be imported ({type_and_message(error)}); "
            "put its folder on PYTHONPATH, or name the file: ./my_file.py:my_function"
        ) from error


def load_listed(key: str, file: str, field: str, name: str) -> Callable[..., Any]:
    """A class that an entry of a YAML file names as module.Class, or file.py:Class, in this field."""
    if ":" in name:
        beside = Path(file).expanduser().parent / name  # joined to an absolute path, that path itself
        found_beside = Path(str(beside).rpartition(":")[0]).is_file()
        listed: Callable[..., Any] = load_plugin(f"{key}={file}: {field}", str(beside) if found_beside else name)
        return listed
    module, _, attribute = name.rpartition(".")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # of the user's module
        raise ConfigError(
            f"{key}={file}: {field} {name} cannot be imported ({type_and_message(error)}); put its folder on "
            "PYTHONPATH, or its file beside the YAML file"
        ) from error
    return found


def load_file(key: str, reference: str, place: str) -> ModuleType:
    file = plugin_file(key, reference, place)
    name = f"rloom_plugin_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    loader = importlib.machinery.SourceFileLoader(name, str(file))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None  # a loader was given
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses read the module of a class from there
    add_folder_of(str(file))
    try:
        loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise not_loaded(key, reference, file, error) from error
    return module


def plugin_file(key: str, reference: str, place: str) -> Path:
    file = Path(place).expanduser().absolute()
    if not file.is_file():
        raise ConfigError(f"{key}={reference}: {file} does not exist; use FILE.py:NAME")
    return file


def not_loaded(key: str, reference: str, file: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{key}={reference}: {file} cannot be loaded ({type_and_message(error)}); correct it until `python {file}` "
        "runs without an error"
    )


def check_two_arguments(key: str, reference: str, found: Any, arguments: str, entry: str) -> None:
    if not callable(found):
        kind = type(found).__name__
        raise ConfigError(f"{key}={reference} is a {kind}; use a function of {arguments}, or {entry}")
    try:
        inspect.signature(found).bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"{key}={reference} has the signature {inspect.signature(found)} ({error}); use a function of "
            f"{arguments}, or {entry}"
        ) from error


def type_and_message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
