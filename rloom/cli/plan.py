"""`rloom plan [key=value ...]`"""

from collections.abc import Sequence

from rloom.cli.parsing import CommandParser, epilog
from rloom.config.load import load_config
from rloom.console import run_safely, split_hydra_flags


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "rloom plan",
        usage="%(prog)s [key=value ...] [--gpu_memory GIB] [--config-path DIR] [--config-name NAME]",
        description="Plan what `rloom train` does with the same keys. Starts, loads and downloads nothing.",
        allow_abbrev=False,
        **epilog("rloom plan actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct trainer.n_gpus_per_node=8"),
    )
    meaning = "memory of one GPU; not given: that of this machine's GPUs, or 80"
    parser.add_argument("--gpu_memory", type=float, metavar="GIB", help=meaning)
    given, rest = parser.parse_known_args(arguments)

    def show() -> int:
        from rloom.plan.make import make_plan
        from rloom.plan.render import render

        overrides, source = split_hydra_flags(rest)
        print(render(make_plan(load_config(overrides, **source), given.gpu_memory)))
        return 0

    return run_safely(show)
