"""Completion scripts for bash, zsh and fish. All words are in the script: a completion starts no Python."""

import shlex
from collections.abc import Callable, Mapping, Sequence

from rloom.cli.completion_words import CompletionWords

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
