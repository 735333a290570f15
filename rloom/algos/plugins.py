"""Loading a user's algorithm by `module:name` or `file.py:name`, and saying what is wrong with it."""

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


@cache  # a loss is looked up for every micro-batch
def load_plugin(key: str, reference: str) -> Any:
    """What `reference` names. `key` is the configuration key that messages speak of."""
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
            f"{key}={reference}: the module {place!r} cannot be imported ({describe(error)}); "
            "put its folder on PYTHONPATH, or name the file: ./my_file.py:my_function"
        ) from error


def load_file(key: str, reference: str, place: str) -> ModuleType:
    file = Path(place).expanduser().absolute()
    if not file.is_file():
        raise ConfigError(f"{key}={reference}: there is no file {file}; give a Python file, then a colon and a name")
    name = f"rloom_outside_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    loader = importlib.machinery.SourceFileLoader(name, str(file))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None  # there is a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look a class's module up there
    try:
        loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(
            f"{key}={reference}: {file} cannot be loaded ({describe(error)}); `python` on it must run without an error"
        ) from error
    return module


def check_two_arguments(key: str, reference: str, found: Any, arguments: str, entry: str) -> None:
    if not callable(found):
        kind = type(found).__name__
        raise ConfigError(f"{key}={reference}: that is a {kind}; give a function of {arguments}, or {entry}")
    try:
        inspect.signature(found).bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"{key}={reference}: {inspect.signature(found)} does not take {arguments} ({error}); "
            f"give a function that does, or {entry}"
        ) from error


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
