"""`rloom eval CKPT [key=value ...]` and `rloom export CKPT DIR [key=value ...]`"""

from collections.abc import Sequence
from pathlib import Path

from rloom import __version__
from rloom.cli.parsing import CommandParser, epilog
from rloom.console import announce, run_safely
from rloom.errors import ConfigError
from rloom.language import translate
from rloom.launch.early_checks import check_checkpoint, loading
from rloom.runs.measures import TITLES, shown, validation_accuracies
from rloom.terminal import printable


def evaluate(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "rloom eval",
        description="Answer the validation prompts with the policy of a checkpoint, and print the metrics.",
        **epilog("rloom eval checkpoints/rloom_examples/embedded_gae_embedded/global_step_32 data.val_max_samples=64"),
    )
    parser.add_argument("checkpoint", type=Path, help="a global_step_N folder")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the run's configuration")
    given = parser.parse_args(arguments)

    def run() -> int:
        check_checkpoint(given.checkpoint)
        announce(f"rloom {__version__} · validating {given.checkpoint} · {loading()}")
        from rloom.launch.build import evaluate_checkpoint

        found = evaluate_checkpoint(given.checkpoint, given.overrides)
        for source, value in validation_accuracies(found.metrics).items():
            measure = found.measures[source]
            print(printable(translate(f"{TITLES[measure]} {source}: {shown(value, measure)}")))
        for name, value in found.metrics.items():
            print(printable(f"{name}: {value:.4g}"))
        return 0

    return run_safely(run)


def export(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "rloom export",
        description="Write the policy of a checkpoint as a Hugging Face folder, and print its path.",
        **epilog("rloom export checkpoints/rloom_examples/embedded_gae_embedded/global_step_32 my_model"),
    )
    parser.add_argument("checkpoint", type=Path, help="a global_step_N folder")
    parser.add_argument("folder", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--adapter", action="store_true", help="write the LoRA adapter instead of merging it")
    parser.add_argument("--push_to_hub", metavar="NAME", help="also send the folder to the hub, as OWNER/NAME")
    parser.add_argument("--private", action="store_true", help="with --push_to_hub: a new repository is private")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the run's configuration")
    given = parser.parse_intermixed_args(arguments)

    def run() -> int:
        check_checkpoint(given.checkpoint)
        if given.private and given.push_to_hub is None:
            raise ConfigError("--private: no effect without --push_to_hub NAME; add it")
        if given.push_to_hub is not None:
            from rloom.hub import check_push

            check_push(given.push_to_hub)
        announce(f"rloom {__version__} · exporting {given.checkpoint} · {loading()}")
        from rloom.launch.export import export as write
        from rloom.launch.export import push

        print(write(given.checkpoint, given.folder, given.overrides, adapter=given.adapter, dtype=given.dtype))
        if given.push_to_hub is not None:
            print(push(given.folder, given.push_to_hub, private=given.private))
        return 0

    return run_safely(run)
