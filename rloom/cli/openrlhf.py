"""`rloom openrlhf [--flag VALUE ...] [key=value ...]`: `rloom train` with the flags of OpenRLHF's train_ppo_ray.py."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rloom.config.frontends.openrlhf import OpenrlhfCommand, translate
from rloom.config.frontends.openrlhf_flags import help_text
from rloom.config.load import expand, load_config
from rloom.config.schema import Config
from rloom.console import run_safely
from rloom.errors import ConfigError
from rloom.language import translate as in_language
from rloom.launch.directory import directory_of, has_files, in_directory

OWN_FLAGS = ("--print", "--plan")


def main(arguments: Sequence[str]) -> int:
    own = [flag for flag in OWN_FLAGS if flag in arguments]
    command_line = [argument for argument in arguments if argument not in OWN_FLAGS]

    def run() -> int:
        if "-h" in arguments or "--help" in arguments:
            print(help_text())
            return 0
        command = translate(command_line)
        config = load_config(command.overrides, command.values)
        if "--print" in own:
            print_command(command, config)
            return 0
        print("".join(f"{in_language(notice)}\n" for notice in command.notices), end="", file=sys.stderr, flush=True)
        if "--plan" in own:
            return print_plan(config)
        set_variables(command)
        return train(command, config)

    return run_safely(run)


def set_variables(command: OpenrlhfCommand) -> None:
    """For the trackers. The key of wandb is in the command line, which the run directory records."""
    os.environ.update(command.environment)
    if command.secret is not None:
        os.environ.setdefault("WANDB_API_KEY", command.secret)
        sys.argv = [argument.replace(command.secret, "True") for argument in sys.argv]


def print_command(command: OpenrlhfCommand, config: Config) -> None:
    print(command.rloom_command)
    if command.save_path is not None:
        step = f"{in_directory(config).trainer.default_local_dir}/global_step_N"
        print(
            shlex.join(["rloom", "export", step, command.save_path, "--dtype", "bfloat16"]),
            in_language(" # N: the last step"),
        )


def print_plan(config: Config) -> int:
    from rloom.plan.batches import scoring_passes
    from rloom.plan.make import make_plan
    from rloom.plan.render import render

    plan = make_plan(config)
    print(render(plan))
    scored = ", ".join(scoring_passes(plan.config, plan.needs, plan.batches))
    by_tokens = config.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz  # --use_dynamic_batch
    effect = f"sets the samples in a pass of: {scored}" if scored and not by_tokens else "has no effect in this run"
    notice = f"--micro_rollout_batch_size {effect}. Generation is batched continuously and has no micro-batch."
    print(f"\n{in_language(notice)}")
    return 0


def train(command: OpenrlhfCommand, config: Config) -> int:
    from rloom.trainer import main_ppo

    folder = None if command.save_path is None else expand(command.save_path)
    if folder is not None:
        check_empty(folder)
    status = main_ppo.train(config)
    if status == 0 and folder is not None and config.trainer.node_rank == 0:
        print(in_language(f"The policy is in {write_policy(config, folder)}"))
    return status


def check_empty(folder: Path) -> None:
    """Before the run, which would otherwise fail at its end."""
    if has_files(folder):
        raise ConfigError(
            f"--save_path {folder}: the folder has files; use one that does not exist yet, or leave the flag out "
            "and write the policy of a checkpoint with `rloom export`"
        )


def write_policy(config: Config, folder: Path) -> Path:
    from rloom.launch.export import export_newest

    return export_newest(directory_of(config), folder, dtype="bfloat16")
