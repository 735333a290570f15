"""`rloom completion bash|zsh|fish`"""

import argparse
from collections.abc import Sequence

from rloom.cli.parsing import CommandParser
from rloom.console import run_safely

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
        from rloom.cli.completion_scripts import SCRIPTS
        from rloom.cli.completion_words import completion_words

        print(SCRIPTS[shell](completion_words()), end="")
        return 0

    return run_safely(run)
