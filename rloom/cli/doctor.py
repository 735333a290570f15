"""`rloom doctor RUN ...` and `rloom doctor env`"""

from collections.abc import Sequence
from pathlib import Path

from rloom.cli.parsing import CommandParser, epilog
from rloom.console import run_safely

ENVIRONMENT = "env"


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "rloom doctor",
        description="What is wrong with a run and what to try; `rloom doctor env` checks this machine's installation.",
        **epilog(
            "rloom doctor checkpoints/rloom_examples/embedded_gae_embedded",
            "0 nothing wrong · 1 findings, or training does not work here · 2 not a run directory",
        ),
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help=f"run directory, of a finished or a running run; or {ENVIRONMENT}"
    )
    parser.add_argument("--json", action="store_true", help="print JSON: one object, or a list for several runs")
    given = parser.parse_args(arguments)

    def run() -> int:
        if given.runs == [ENVIRONMENT]:
            from rloom.doctor.machine import env

            return env.run(as_json=given.json)
        from rloom.doctor.run import report

        return report.run([Path(name).expanduser() for name in given.runs], as_json=given.json)

    return run_safely(run)
