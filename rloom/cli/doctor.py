"""`rloom doctor RUN ...`, `rloom doctor env` and `rloom doctor gpus`"""

from collections.abc import Sequence
from pathlib import Path

from rloom.cli.parsing import CommandParser, epilog
from rloom.console import run_safely

ENVIRONMENT, GPUS = "env", "gpus"


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "rloom doctor",
        description="What is wrong with a run and what to try; `rloom doctor env` checks this machine's installation, "
        "`rloom doctor gpus` whether its GPUs compute together what one computes.",
        **epilog(
            "rloom doctor checkpoints/rloom_examples/embedded_gae_embedded",
            "0 nothing wrong · 1 findings, or something does not work here · 2 not a run directory, or no GPUs",
        ),
    )
    what = f"run directory, of a finished or a running run; or {ENVIRONMENT}; or {GPUS}"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=what)
    parser.add_argument(
        "--backend",
        choices=("nccl", "gloo"),
        help=f"of {GPUS}: nccl, the default with two GPUs or more, or gloo, in processes on the CPU",
    )
    parser.add_argument("--json", action="store_true", help="print JSON: one object, or a list for several runs")
    given = parser.parse_args(arguments)
    if given.backend is not None and given.runs != [GPUS]:
        parser.error(f"--backend is a flag of `rloom doctor {GPUS}`")

    def run() -> int:
        if given.runs == [ENVIRONMENT]:
            from rloom.doctor.machine import env

            return env.run(as_json=given.json)
        if given.runs == [GPUS]:
            from rloom.doctor.machine import gpus

            return gpus.run(given.backend, as_json=given.json)
        from rloom.doctor.run import report

        return report.run([Path(name).expanduser() for name in given.runs], as_json=given.json)

    return run_safely(run)
