"""`rloom COMMAND`: the table of commands. Importing this package imports none of them, so that help is immediate."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from rloom import __version__
from rloom.cli.overview import render_overview, suggestion
from rloom.language import translate
from rloom.terminal import accept_any_text, discard_output


@dataclass(frozen=True)
class Command:
    module: str
    usage: Sequence[tuple[str, str]]  # (arguments, meaning), one for each line of the help
    function: str = "main"  # (arguments) -> exit status

    def load(self) -> Callable[[Sequence[str]], int]:
        function: Callable[[Sequence[str]], int] = getattr(import_module(self.module), self.function)
        return function


COMMANDS = {
    "train": Command(
        "rloom.trainer.main_ppo",
        [("[key=value ...]", "train a policy; without keys, the embedded model on the embedded data")],
    ),
    "sft": Command(
        "rloom.trainer.sft_trainer",
        [("[key=value ...]", "supervised fine-tuning on given answers, the step before `train`")],
    ),
    "kit": Command("rloom.cli.kit", [("[flags] [key=value ...]", "the same with train.sh's flags and files")]),
    "openrlhf": Command(
        "rloom.cli.openrlhf",
        [("[flags] [key=value]", "train with the flags of OpenRLHF's train_ppo_ray.py; --plan, --print")],
    ),
    "plan": Command(
        "rloom.cli.plan",
        [("[key=value ...]", "batches, placement, memory and time of a configuration, without starting it")],
    ),
    "sweep": Command(
        "rloom.cli.sweep", [("key=value,value ...", "train once for each combination of values, and compare the runs")]
    ),
    "eval": Command(
        "rloom.cli.checkpoints", [("CKPT [key=value ...]", "validate a checkpoint and print the metrics")], "evaluate"
    ),
    "export": Command(
        "rloom.cli.checkpoints",
        [("CKPT DIR [key=value]", "write the policy of a checkpoint as a Hugging Face folder")],
        "export",
    ),
    "chat": Command(
        "rloom.cli.chat", [("MODEL [key=value]", "talk to a checkpoint or a model; --prompt TEXT for one answer")]
    ),
    "config": Command(
        "rloom.cli.config", [("[--sft] [key]", "print the documented configuration, or explain one key")]
    ),
    "data": Command(
        "rloom.cli.data",
        [
            ("prepare NAME", "write train.parquet and test.parquet of a known data set"),
            ("check FILE ...", "check data files before training on them"),
            ("show FILE -n 3", "print rows of a data file"),
        ],
    ),
    "reward": Command(
        "rloom.cli.reward", [("try FILE --source S", "score an answer by hand and show what was extracted")]
    ),
    "judge": Command(
        "rloom.cli.judge", [("try --prompt P ...", "one call of the API judge: request, answer, score and cost")]
    ),
    "runs": Command("rloom.cli.runs", [("[DIR]", "list runs with state, step, reward and validation")]),
    "compare": Command(
        "rloom.cli.compare", [("RUN RUN ...", "compare runs: configuration, validation, metrics at equal steps")]
    ),
    "doctor": Command(
        "rloom.cli.doctor",
        [
            ("RUN ...", "what is wrong with a run, why, and which keys to change"),
            ("env", "what is installed, what works here, and what to install for the rest"),
        ],
    ),
    "view": Command(
        "rloom.cli.view",
        [("RUN ...", "runs in the browser: curves, answers token by token, validations; also while they run")],
    ),
    "completion": Command(
        "rloom.cli.completion", [("bash|zsh|fish", "print a script that completes commands, flags and keys")]
    ),
    "help": Command("rloom.cli.help", [("COMMAND|metrics", "explain a command, or the names of the metrics")]),
}


def main(arguments: Sequence[str] | None = None) -> int:
    accept_any_text()
    try:
        status = run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `rloom --help | head`
        discard_output()
        return 0
    except KeyboardInterrupt:  # while a command is imported
        print(translate("Stopped."), file=sys.stderr)
        return 130


def run(given: list[str]) -> int:
    if not given or given[0] in ("-h", "--help") or given == ["help"]:
        print(usage())
        return 0
    if given[0] in ("-V", "--version"):
        print(f"rloom {__version__}")
        return 0
    if given[0] not in COMMANDS:
        fault = f"rloom: there is no command {given[0]!r}{suggestion(given[0], list(COMMANDS))}"
        print(translate(f"{fault}\n`rloom --help` lists the commands."), file=sys.stderr)
        return 2
    status = COMMANDS[given[0]].load()(given[1:])
    assert isinstance(status, int)
    return status


def usage() -> str:
    return render_overview({name: command.usage for name, command in COMMANDS.items()})
