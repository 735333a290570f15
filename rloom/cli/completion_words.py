"""The words that a shell completes: commands, their sub-commands and flags, the keys and the values of a key."""

import argparse
import contextlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, NoReturn, get_args, get_origin

from rloom.algos.needs import ESTIMATORS, LOSSES
from rloom.cli import COMMANDS
from rloom.config.keys import Key, all_keys
from rloom.console import HYDRA_FLAGS

READS_YAML = ("train", "plan", "sft")  # commands with Hydra's flags
TAKES_KEYS = "key=value"  # in the usage of a command whose arguments are keys
BOOLEAN = ("True", "False")
NAMED = {  # text for the schema, because a user's own file is a value too
    "algorithm.adv_estimator": list(ESTIMATORS),
    "actor_rollout_ref.actor.policy_loss.loss_mode": list(LOSSES),
}


@dataclass(frozen=True)
class CommandWords:
    """What can follow a command: `words`; after a sub-command, its own."""

    words: Sequence[str]  # flags, sub-commands and fixed arguments
    below: Mapping[str, Sequence[str]]  # sub-command -> its flags
    takes_keys: bool


@dataclass(frozen=True)
class CompletionWords:
    commands: Mapping[str, CommandWords]
    keys: Mapping[str, Sequence[str]]  # key -> its values, if they are known


class ParserCaptured(Exception):
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def completion_words() -> CompletionWords:
    commands = {name: words_of(name, command.module) for name, command in COMMANDS.items()}
    keys = {path: values_of(key) for path, key in all_keys().items() if key.section is None}
    return CompletionWords(commands, keys)


def words_of(name: str, module: str) -> CommandWords:
    parser = parser_of(import_module(module).main)
    takes_keys = any(TAKES_KEYS in arguments for arguments, *_ in COMMANDS[name].usage)
    hydra = [flag for flag in HYDRA_FLAGS if flag.startswith("--")] if name in READS_YAML else []
    if parser is None:
        others = [*COMMANDS, "metrics"] if name == "help" else []
        return CommandWords([*others, "--help", *hydra], {}, takes_keys)
    below = {sub: list(flags(found)) for sub, found in subparsers(parser).items()}
    return CommandWords([*below, *positional_choices(parser), *flags(parser), *hydra], below, takes_keys)


def parser_of(main: Callable[[Sequence[str]], int]) -> argparse.ArgumentParser | None:
    """The argparse parser of a command, taken when it parses `--help`. None: the command has no parser."""

    def capture(self: argparse.ArgumentParser, *given: Any, **named: Any) -> NoReturn:
        raise ParserCaptured(self)

    methods = ("parse_known_args", "parse_known_intermixed_args")
    before = {name: getattr(argparse.ArgumentParser, name) for name in methods}
    try:
        for name in methods:
            setattr(argparse.ArgumentParser, name, capture)
        with contextlib.redirect_stdout(io.StringIO()):
            main(["--help"])
    except ParserCaptured as found:
        return found.parser
    finally:
        for name, method in before.items():
            setattr(argparse.ArgumentParser, name, method)
    return None


def subparsers(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    return {
        name: found
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, found in action.choices.items()
    }


def positional_choices(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if not action.option_strings and action.choices and not isinstance(action, argparse._SubParsersAction):
            yield from map(str, action.choices)


def flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from (flag for flag in action.option_strings if flag.startswith("--"))


def values_of(key: Key) -> Sequence[str]:
    """The values of a key with fixed choices or of a boolean one, and the names in the table of a key."""
    named = NAMED.get(key.path) or ([] if key.named_in is None else list(key.named_in.table))
    return named or list(dict.fromkeys(choices(key.field.annotation)))


def choices(annotation: Any) -> Iterator[str]:
    if annotation is bool:
        yield from BOOLEAN
    elif get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    else:
        for inner in get_args(annotation):
            yield from choices(inner)
