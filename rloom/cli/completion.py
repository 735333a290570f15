"""`rloom completion bash|zsh|fish`: a script with all words in it, so that a completion starts no Python."""

import argparse
import contextlib
import io
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args, get_origin

from rloom.algos.needs import ESTIMATORS, LOSSES
from rloom.cli import COMMANDS
from rloom.cli.parsing import CommandParser
from rloom.config.keys import Key, all_keys
from rloom.console import HYDRA_FLAGS, run_safely

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
    commands = {name: words_of(name, command.load()) for name, command in COMMANDS.items()}
    keys = {path: values_of(key) for path, key in all_keys().items() if key.section is None}
    return CompletionWords(commands, keys)


def words_of(name: str, main: Callable[[Sequence[str]], int]) -> CommandWords:
    parser = parser_of(main)
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


# Bash splits a word at `=`, so the word under the cursor is taken from the line itself.
BASH = r"""# completion of rloom for bash
_rloom() {
    local line="${COMP_LINE:0:COMP_POINT}" word command="" sub="" other words="" keys=""
    word="${line##*[[:space:]]}"
    set -- $line
    [[ -n "$word" ]] && set -- "${@:1:$#-1}"
    shift
    for other in "$@"; do
        [[ "$other" == -* || "$other" == *=* ]] && continue
        if [[ -z "$command" ]]; then command="$other"; elif [[ -z "$sub" ]]; then sub="$other"; fi
    done
    if [[ "$word" == *=* ]]; then
        case "${word%%=*}" in
@VALUES@
            *) compopt -o filenames 2>/dev/null; COMPREPLY=($(compgen -f -- "${word#*=}")); return ;;
        esac
        COMPREPLY=($(compgen -W "$words" -- "${word#*=}"))
        return
    fi
    case "$command" in
        "") words="@COMMANDS@ --help --version" ;;
@WORDS@
    esac
    case "$command $sub" in
@BELOW@
    esac
    case "$command" in
        @KEYED@) keys="$_rloom_keys" ;;
    esac
    COMPREPLY=($(compgen -W "$words $keys" -- "$word"))
    if [[ ${#COMPREPLY[@]} -eq 0 ]]; then
        compopt -o filenames 2>/dev/null
        COMPREPLY=($(compgen -f -- "$word"))
    elif [[ "${COMPREPLY[0]}" == *= ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
_rloom_keys="@KEYS@"
complete -F _rloom rloom
"""

ZSH = r"""#compdef rloom
# completion of rloom for zsh
_rloom() {
    local word="${words[CURRENT]}" name="" sub="" other
    local -a found keys
    for other in "${(@)words[2,CURRENT-1]}"; do
        [[ "$other" == -* || "$other" == *=* ]] && continue
        if [[ -z "$name" ]]; then name="$other"; elif [[ -z "$sub" ]]; then sub="$other"; fi
    done
    if [[ "$word" == *=* ]]; then
        compset -P '*='
        case "${word%%=*}" in
@VALUES@
            *) _files; return ;;
        esac
        compadd -- $found
        return
    fi
    case "$name" in
        "") found=(@COMMANDS@ --help --version) ;;
@WORDS@
    esac
    case "$name $sub" in
@BELOW@
    esac
    case "$name" in
        @KEYED@) keys=(@KEYS@) ;;
    esac
    compadd -S '' -- $keys
    compadd -- $found
    _files
}
if [[ "$funcstack[1]" == _rloom ]]; then _rloom "$@"; else compdef _rloom rloom; fi
"""


def bash_script(found: CompletionWords) -> str:
    return filled(BASH, found, lambda words: f"words={shlex.quote(' '.join(words))}", " ".join(keys_of(found)))


def zsh_script(found: CompletionWords) -> str:
    return filled(ZSH, found, lambda words: f"found=({' '.join(words)})", " ".join(map(shlex.quote, keys_of(found))))


def keys_of(found: CompletionWords) -> list[str]:
    return [f"{key}=" for key in found.keys]


def filled(script: str, found: CompletionWords, assignment: Callable[[Sequence[str]], str], keys: str) -> str:
    """The script with a `case` branch for each command, sub-command and key with known values."""
    words = {name: command.words for name, command in found.commands.items() if command.words}
    below = {f"{name} {sub}": words for name, command in found.commands.items() for sub, words in command.below.items()}
    values = {key: choices for key, choices in found.keys.items() if choices}

    def branches(cases: Mapping[str, Sequence[str]], indent: int) -> str:
        return "\n".join(f'{" " * indent}"{case}") {assignment(chosen)} ;;' for case, chosen in cases.items())

    parts = {
        "@COMMANDS@": " ".join(found.commands),
        "@WORDS@": branches(words, 8),
        "@BELOW@": branches(below, 8),
        "@VALUES@": branches(values, 12),
        "@KEYED@": "|".join(name for name, command in found.commands.items() if command.takes_keys),
        "@KEYS@": keys,
    }
    for mark, text in parts.items():
        script = script.replace(mark, text)
    return script


def fish_script(found: CompletionWords) -> str:
    lines = ["# completion of rloom for fish", "complete -c rloom -n __fish_use_subcommand -f"]
    lines += [f"complete -c rloom -n __fish_use_subcommand -a {name}" for name in [*found.commands, "--help"]]
    for name, command in found.commands.items():
        seen = f"-n '__fish_seen_subcommand_from {name}'"
        lines += [f"complete -c rloom {seen} -a '{' '.join(command.words)}'"] if command.words else []
        for sub, words in command.below.items():
            both = f"-n '__fish_seen_subcommand_from {name}; and __fish_seen_subcommand_from {sub}'"
            lines.append(f"complete -c rloom {both} -a '{' '.join(words)}'")
    keyed = " ".join(name for name, command in found.commands.items() if command.takes_keys)
    values = [f"{key}={value}" for key, choices in found.keys.items() for value in choices]
    lines += [f"set -g __rloom_keys {' '.join([*keys_of(found), *values])}"]
    lines += [f"complete -c rloom -n '__fish_seen_subcommand_from {keyed}' -a '$__rloom_keys'"]
    return "\n".join(lines) + "\n"


SCRIPTS = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}


EXAMPLES = """install it (open a new shell after it):
  bash  rloom completion bash > ~/.local/share/bash-completion/completions/rloom
        (without the package bash-completion: source that file in ~/.bashrc)
  zsh   rloom completion zsh > ~/.zfunc/_rloom     (~/.zshrc: fpath+=~/.zfunc; autoload -Uz compinit; compinit)
  fish  rloom completion fish > ~/.config/fish/completions/rloom.fish

The script holds the commands, flags and keys of this version; write it again after an update."""


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "rloom completion",
        description="Print a shell script that completes commands, flags, keys and their values.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    shell = parser.parse_args(arguments).shell

    def run() -> int:
        print(SCRIPTS[shell](completion_words()), end="")
        return 0

    return run_safely(run)
