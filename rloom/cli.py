"""`rloom COMMAND`. Each command imports its modules when it runs, so that help and errors do not wait for torch."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from rloom import __version__
from rloom.config.load import load_config
from rloom.console import run_safely, split_hydra_flags
from rloom.trainer import main_ppo

USAGE = """rloom COMMAND

  train [key=value ...]        train a policy; without keys, the embedded model on the embedded data
  kit [flags] [key=value ...]  the same with train.sh's flags (`rloom kit --help`) and files
  plan [key=value ...]         batches, placement, memory and time of a configuration, without starting it
  eval CKPT [key=value ...]    validate a checkpoint and print the metrics
  export CKPT DIR [key=value]  write the policy of a checkpoint as a Hugging Face folder
  config [key]                 print the documented configuration, or explain one key
  data prepare NAME            write train.parquet and test.parquet of a known data set
  data check FILE              check a data file before training on it
  reward try FILE --source S   score an answer by hand and show what was extracted
  judge try --prompt P ...     one call of the API judge: request, answer, score and cost
  doctor env                   what is installed, what works here, and what to install for the rest

`rloom COMMAND --help` prints more. `rloom config` lists the keys."""


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    commands = {
        "train": main_ppo.main,
        "kit": train_with_kit_flags,
        "plan": plan,
        "eval": evaluate,
        "export": export,
        "config": show_config,
        "data": data,
        "reward": reward,
        "judge": judge,
        "doctor": doctor,
    }
    if not given or given[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if given[0] == "--version":
        print(f"rloom {__version__}")
        return 0
    if given[0] not in commands:
        print(f"rloom: there is no command {given[0]!r}\n\n{USAGE}", file=sys.stderr)
        return 2
    return commands[given[0]](given[1:])


def train_with_kit_flags(arguments: Sequence[str]) -> int:
    from rloom.config.dialects.kit import translate

    def run() -> int:
        command = translate(arguments, os.environ)
        config = load_config(command.overrides, command.values)
        print(command.reward, flush=True)
        return main_ppo.train(config)

    return run_safely(run)


def plan(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "rloom plan",
        usage="%(prog)s [key=value ...] [--gpu_memory GIB] [--config-path DIR] [--config-name NAME]",
        description="Plan what `rloom train` does with the same keys. Starts, loads and downloads nothing.",
        allow_abbrev=False,
    )
    parser.add_argument("--gpu_memory", type=float, metavar="GIB", help="memory of one GPU; 80 if not given")
    given, rest = parser.parse_known_args(arguments)

    def show() -> int:
        from rloom.plan.make import USUAL_GPU_GIB, make_plan
        from rloom.plan.render import render

        overrides, source = split_hydra_flags(rest)
        memory = USUAL_GPU_GIB if given.gpu_memory is None else given.gpu_memory
        print(render(make_plan(load_config(overrides, **source), memory), assumed_gpu=given.gpu_memory is None))
        return 0

    return run_safely(show)


def show_config(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("rloom config", description="Print the configuration, or explain one key.")
    parser.add_argument("key", nargs="?", help="a dotted key, or part of one")
    name = parser.parse_args(arguments).key

    def show() -> int:
        from rloom.config.describe import explain, whole_tree

        print(explain(name) if name else whole_tree())
        return 0

    return run_safely(show)


def evaluate(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("rloom eval", description="Validate a checkpoint.")
    parser.add_argument("checkpoint", type=Path, help="a global_step_N folder")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the run's configuration")
    given = parser.parse_args(arguments)

    def run() -> int:
        from rloom.trainer.evaluate_checkpoint import evaluate_checkpoint

        for name, value in evaluate_checkpoint(given.checkpoint, given.overrides).items():
            print(f"{name}: {value:.4g}")
        return 0

    return run_safely(run)


def export(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("rloom export", description="Write a policy as a Hugging Face folder.")
    parser.add_argument("checkpoint", type=Path, help="a global_step_N folder")
    parser.add_argument("folder", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--adapter", action="store_true", help="write the LoRA adapter instead of merging it")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the run's configuration")
    given = parser.parse_intermixed_args(arguments)

    def run() -> int:
        from rloom.trainer import export

        print(export.export(given.checkpoint, given.folder, given.overrides, adapter=given.adapter, dtype=given.dtype))
        return 0

    return run_safely(run)


def data(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("rloom data", description="Prepare and check data files.")
    commands = parser.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser("prepare", help="write train.parquet and test.parquet of a known data set")
    prepare.add_argument("name", help="gsm8k, math or arithmetic")
    prepare.add_argument("--local_save_dir", "--local_dir", required=True, type=Path)
    prepare.add_argument("--source", type=Path, help="a folder with the raw files, instead of a download")
    check = commands.add_parser("check", help="rows, faults, duplicates, unknown data sources; exit 1 on faults")
    check.add_argument("file")
    check.add_argument("--tokenizer", help="a model folder or hub name: adds a histogram of prompt lengths")
    check.add_argument("--own_reward", action="store_true", help="your own reward function scores every data source")
    given = parser.parse_args(arguments)
    return run_safely(lambda: prepare_data(given) if given.command == "prepare" else check_data(given))


def reward(arguments: Sequence[str]) -> int:
    from rloom.rewards import try_command

    parser = argparse.ArgumentParser("rloom reward", description="Rules and your own reward functions.")
    commands = parser.add_subparsers(dest="command", required=True)
    try_command.add_arguments(commands.add_parser("try", help="score an answer by hand"))
    given = parser.parse_args(arguments)
    return run_safely(lambda: try_command.run(given))


def prepare_data(given: argparse.Namespace) -> int:
    from rloom.data.prepare import prepare

    for file in prepare(given.name, given.local_save_dir, given.source):
        print(file)
    return 0


def check_data(given: argparse.Namespace) -> int:
    from rloom.data.check import check_file, render_report

    tokenizer = None
    if given.tokenizer:
        from rloom.models.load import ModelSource, load_tokenizer

        tokenizer = load_tokenizer(ModelSource(given.tokenizer, key="--tokenizer"))
    report = check_file(given.file, tokenizer=tokenizer, own_reward=given.own_reward)
    print(render_report(report))
    return 0 if report.ok else 1


def judge(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("rloom judge", description="The API judge of reward_model.api.")
    commands = parser.add_subparsers(dest="command", required=True)
    attempt = commands.add_parser(
        "try",
        usage="%(prog)s --prompt TEXT --response TEXT [--ground_truth TEXT] [key=value ...]",
        help="score one answer; exit 1 without a score",
        description="One call of the judge, without the cache: request, answer, score, tokens and cost.",
        allow_abbrev=False,
    )
    attempt.add_argument("--prompt", required=True)
    attempt.add_argument(
        "--response", required=True, action="append", help="several with reward_model.api.mode=groupwise"
    )
    attempt.add_argument("--ground_truth")
    given, rest = parser.parse_known_args(arguments)

    def run() -> int:
        from rloom.config.judge_section import check_judge
        from rloom.rewards.judge.try_judge import try_judge

        overrides, source = split_hydra_flags(rest)
        settings = check_judge(load_config(overrides, **source).reward_model.api, responses=len(given.response))
        without_cache = settings.model_copy(update={"cache_dir": None, "budget": None})
        return 0 if try_judge(without_cache, given.prompt, given.response, given.ground_truth) else 1

    return run_safely(run)


def doctor(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("rloom doctor", description="Check this machine's installation.")
    commands = parser.add_subparsers(dest="command", required=True)
    environment = commands.add_parser(
        "env",
        help="what is installed, and what works here",
        description="Exit 0 if training with the defaults works, 1 otherwise.",
    )
    environment.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args(arguments)

    def run() -> int:
        from rloom.config.rollout_section import RolloutSection
        from rloom.doctor import env

        return env.run(get_args(RolloutSection.model_fields["name"].annotation), as_json=given.json)

    return run_safely(run)


if __name__ == "__main__":
    sys.exit(main())
