"""`rloom --help`: the commands in groups, exit codes and environment variables, in the terminal's language."""

import difflib
from collections.abc import Iterator, Mapping, Sequence

from rloom.language import translate

Lines = Sequence[tuple[str, str]]  # (words, meaning)

# title -> commands; a command in no group is listed under the last title
GROUPS: Mapping[str, Sequence[str]] = {
    "Train:": ("train", "kit", "openrlhf", "sft", "sweep", "plan"),
    "Use a checkpoint:": ("eval", "export", "chat"),
    "Look at runs:": ("view", "runs", "compare", "doctor"),
    "Prepare and check:": ("config", "data", "reward", "judge"),
    "More:": ("completion", "help"),
}
EXIT_CODES: Lines = [
    ("0", "done"),
    ("1", "a check found faults, or there is no score; with a traceback: a bug"),
    ("2", "an error that you can correct: a key, a file, a model, a reward"),
    ("3", "a worker or machine was lost; the same command resumes"),
    ("130", "interrupted (ctrl-C, SIGTERM); a run saves its last step first"),
]
VARIABLES: Lines = [
    ("CUDA_VISIBLE_DEVICES", "the GPUs to use"),
    ("HF_ENDPOINT", "a mirror of the model hub"),
    ("HF_TOKEN", "token for gated models of the hub"),
    ("NO_COLOR", "any value: no colours"),
    ("RLOOM_SMOKE", "1: two steps with a tiny model and data, to try a command"),
    ("RLOOM_VIEW_TOKEN", "the token of `rloom view`, instead of a new one"),
    ("TENSORBOARD_DIR", "folder of TensorBoard's events; else runs/PROJECT/EXPERIMENT"),
    ("LANG", "zh_CN: all texts in Chinese"),
    ("RLOOM_LANGUAGE", "zh or en, whatever LANG is"),
]
WIDTH = 30


def render_overview(usages: Mapping[str, Lines]) -> str:
    """`usages`: the lines of each command."""
    grouped = {name for names in GROUPS.values() for name in names}
    others = [name for name in usages if name not in grouped]
    lines = ["rloom COMMAND [arguments]", ""]
    for number, (title, names) in enumerate(GROUPS.items(), start=1):
        members = [*others, *names] if number == len(GROUPS) else names
        lines += [translate(title)]
        lines += [line for name in members for line in table(usages[name], prefix=f"{name} ")]
        lines += [""]
    lines += [translate("Exit codes:"), *table(EXIT_CODES), ""]
    lines += [translate("Environment variables:"), *table(VARIABLES), ""]
    return "\n".join([*lines, translate(MORE)])


MORE = (
    "Example: rloom train algorithm.adv_estimator=grpo actor_rollout_ref.model.path=FOLDER data.train_files=FILE\n"
    "`rloom help COMMAND` explains a command, `rloom config` the keys, `rloom help metrics` the metrics."
)


def table(lines: Lines, prefix: str = "") -> Iterator[str]:
    for words, meaning in lines:
        yield f"  {f'{prefix}{words}'.strip():<{WIDTH}}{translate(meaning)}"


def suggestion(unknown: str, names: Sequence[str]) -> str:
    found = difflib.get_close_matches(unknown, names, n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""
