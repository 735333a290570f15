"""Load a user's algorithm by `module:name` or `file.py:name`, with errors that name the fault."""

import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from rloom.errors import ConfigError
from rloom.import_path import add_folder_of


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


def load_module(key: str, reference: str, place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except Exception as error:
        raise ConfigError(
            f"{key}={reference}: the module {place!r} cannot be imported ({type_and_message(error)}); "
            "put its folder on PYTHONPATH, or name the file: ./my_file.py:my_function"
        ) from error


def load_file(key: str, reference: str, place: str) -> ModuleType:
    file = Path(place).expanduser().absolute()
    if not file.is_file():
        raise ConfigError(f"{key}={reference}: {file} does not exist; use FILE.py:NAME")
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
        raise ConfigError(
            f"{key}={reference}: {file} cannot be loaded ({type_and_message(error)}); correct it until `python {file}` "
            "runs without an error"
        ) from error
    return module


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
