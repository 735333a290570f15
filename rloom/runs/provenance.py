"""What a run records about its start, in its `run` event: the command, the versions of libraries, the commit.

It costs milliseconds: no program is started and no library imported. A secret of the command line is never written.
"""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

LIBRARIES = ("rloom", "torch", "transformers", "vllm", "sglang", "ray", "megatron-core", "peft", "flash-attn")
LONGEST_COMMAND = 8000  # characters
HIDDEN = "***"
NOTICE = "notice"  # kind of a `warning` event: printed about the configuration, before the first step

# names whose value is a secret: `judge.api_key`, `--hf-token`, `WANDB_PASSWORD`; not `max_tokens` or `prompt_key`
SECRET_NAME = re.compile(
    r"(?:^|[._-])(?:(?:api|access|private|secret|auth)[_-]?key|token|secret|passwd|password|credentials?|authorization)$",
    re.IGNORECASE,
)
# values that are secrets whatever their name is: keys of the usual services, web tokens, a password in an address
SECRET_VALUE = re.compile(
    r"\b(?:sk|pk|rk)-[\w-]{8,}|\bhf_\w{8,}|\bgh[opsu]_\w{8,}|\bgithub_pat_\w{8,}|\bxox\w-[\w-]{8,}|\bAIza[\w-]{16,}"
    r"|\bAKIA\w{12,}|\bglpat-[\w-]{8,}|\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*|(?<=://)[^/\s@]+(?=@)|(?<=\bBearer )\S+"
    r"|(?<=[?&])[\w-]*(?:key|token|secret|signature|password)=[^&\s]+",
    re.IGNORECASE,
)


def start_record() -> dict[str, Any]:
    """Fields of the `run` event."""
    return {"command": command_line(sys.argv), "versions": versions(), "commit": commit_of(Path.cwd())}


def command_line(arguments: Sequence[str]) -> str:
    """As it can be typed into a shell, without secrets."""
    shown, hides_next = [], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if hides_next and not argument.startswith("-"):
            shown.append(HIDDEN)
        elif equals and SECRET_NAME.search(name):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(SECRET_VALUE.sub(HIDDEN, argument))
        hides_next = not equals and argument.startswith("-") and SECRET_NAME.search(argument) is not None
    if shown and shown[0].endswith("__main__.py"):  # `python -m rloom`
        shown[0] = f"python -m {Path(shown[0]).parent.name}"
        return f"{shown[0]} {shlex.join(shown[1:])}"[:LONGEST_COMMAND]
    return shlex.join(shown)[:LONGEST_COMMAND]


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with dotted keys, as it may be shown."""
    return {name: HIDDEN if value and SECRET_NAME.search(name) else value for name, value in values.items()}


def versions() -> dict[str, str]:
    """Of Python and of the libraries that are installed."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


COMMIT = re.compile(r"[0-9a-f]{40,64}")


def commit_of(folder: Path) -> str | None:
    """The commit that is checked out in the git repository of the folder; None: there is none, or it has no commit."""
    for place in (folder, *folder.parents):
        if (place / ".git").exists():
            try:
                return _head(place / ".git")
            except (OSError, UnicodeDecodeError):
                return None
    return None


def _head(git: Path) -> str | None:
    if git.is_file():  # a worktree, or a submodule: the file names the folder
        git = git.parent / git.read_text().removeprefix("gitdir:").strip()
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref: "):
        return head if COMMIT.fullmatch(head) else None
    name = head.removeprefix("ref: ")
    shared = git / "commondir"
    folders = [git, git / shared.read_text().strip()] if shared.is_file() else [git]
    for folder in folders:
        if (folder / name).is_file():
            commit = (folder / name).read_text().strip()
            return commit if COMMIT.fullmatch(commit) else None
    for folder in folders:
        if (folder / "packed-refs").is_file():
            for line in (folder / "packed-refs").read_text().splitlines():
                commit, _, found = line.partition(" ")
                if found == name and COMMIT.fullmatch(commit):
                    return commit
    return None
