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

# Words that end the name of a secret: `judge.api_key`, `--hf-token`, `WANDB_PASSWORD`, `accessToken`.
SECRET_WORD = re.compile(
    r"token|secrets?|passwd|passwords?|pwd|passphrases?|credentials?|authorization|(?:api|access|secret|private)keys?|sig"
)
KEY_OF = frozenset({"api", "access", "private", "secret", "auth", "wandb", "hf", "openai", "account", "signing", "ssh"})
TOKENS_OF = KEY_OF | {"bearer", "refresh"}  # not `max_tokens`
TEXT_TOKENS = frozenset({"pad", "eos", "bos", "unk", "sep", "cls", "mask", "stop", "special", "image", "per"})
WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
# values that are secrets whatever their name is: keys of the usual services, web tokens, a password in an address
SECRET_VALUE = re.compile(
    r"\b(?:sk|pk|rk)-[\w-]{8,}|\bhf_[a-z0-9]{12,}|\bgh[opsu]_\w{8,}|\bgithub_pat_\w{8,}|\bxox\w-[\w-]{8,}"
    r"|\bAIza[\w-]{16,}|\bAKIA\w{12,}|\bglpat-[\w-]{8,}|\bgsk_\w{8,}|\bxai-[\w-]{8,}|\br8_[a-z0-9]{16,}"
    r"|\beyJ[\w-]{8,}\.[\w-]+\.[\w-]*|(?<=://)[^/\s?#]+(?=@)|(?<=\bBearer )\S+"
    r"|(?<=hooks\.slack\.com/services/)[\w/-]+|(?<=/api/webhooks/)[\w/-]+"
    r"|(?<=[?&])[\w-]*(?:key|token|secret|sig|signature|password|pwd)=[^&\s]+",
    re.IGNORECASE,
)
# `api_key: abc` and `api_key=abc` inside of a text: YAML, JSON, headers. A word is tried once, from its start: one long
# word takes time in proportion to its length.
NAMED = re.compile(r"(?<![\w.-])(?P<name>[\w.-]++)[\"']?\s*[:=]\s*")
NAMED_VALUE = re.compile(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|\[[^\]]*\]|\{[^}]*\}|[^,}\]&\n]+")


def start_record() -> dict[str, Any]:
    """Fields of the `run` event."""
    return {"command": command_line(sys.argv), "versions": versions(), "commit": commit_of(Path.cwd())}


def command_line(arguments: Sequence[str]) -> str:
    """As it can be typed into a shell, without secrets."""
    shown, hides_next = [], False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if hides_next:
            shown.append(HIDDEN)
        elif equals and is_secret(name):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(text_without_secrets(argument))
        hides_next = not hides_next and not equals and argument.startswith("-") and is_secret(argument)
    if shown and shown[0].endswith("__main__.py"):  # `python -m rloom`
        shown[0] = f"python -m {Path(shown[0]).parent.name}"
        return f"{shown[0]} {shlex.join(shown[1:])}"[:LONGEST_COMMAND]
    return shlex.join(shown)[:LONGEST_COMMAND]


def is_secret(name: str) -> bool:
    """Whether the value of this name, or of a section of it, is a secret. Not that of `max_tokens`, `prompt_key`,
    `api_key_env`."""
    return any(map(_is_secret_part, name.split(".")))


def _is_secret_part(name: str) -> bool:
    *before, last = [""] + [word.lower() for word in WORDS.findall(name)]
    owner = before[-1] if before else ""
    if last in ("key", "keys"):
        return owner in KEY_OF or (bool(owner) and name.isupper())  # `WANDB_KEY`
    if last == "tokens":
        return owner in TOKENS_OF
    return SECRET_WORD.fullmatch(last) is not None and not (last == "token" and owner in TEXT_TOKENS)


def text_without_secrets(text: str) -> str:
    text = SECRET_VALUE.sub(HIDDEN, text)
    shown, end = "", 0
    while (found := NAMED.search(text, end)) is not None:
        shown += text[end : found.end()]
        end = found.end()
        if is_secret(found["name"]) and (value := NAMED_VALUE.match(text, end)) is not None:
            shown += HIDDEN
            end = value.end()
    return shown + text[end:]


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as it may be shown; its keys may be dotted."""
    return {name: shown_value(name, value) for name, value in values.items()}


def shown_value(name: str, value: Any) -> Any:
    """The value of a key, without secrets."""
    if value and is_secret(str(name)):
        return HIDDEN
    if isinstance(value, str):
        return text_without_secrets(value)
    if isinstance(value, Mapping):
        return without_secrets(value)
    return [shown_value("", one) for one in value] if isinstance(value, list | tuple) else value


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
