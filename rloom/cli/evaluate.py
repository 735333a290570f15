"""`rloom eval CKPT [key=value ...]`"""

from collections.abc import Sequence
from pathlib import Path

from rloom import __version__
from rloom.cli.parsing import CommandParser, epilog
from rloom.console import announce, run_safely
from rloom.language import translate
from rloom.launch.early_checks import check_checkpoint, loading
from rloom.runs.measures import TITLES, shown, validation_accuracies
from rloom.terminal import printable


def main(arguments: Sequence[str]) -> int:
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
