"""`rloom help COMMAND`, `rloom help metrics`"""

import sys
from collections.abc import Sequence

from rloom.cli import COMMANDS
from rloom.cli.overview import suggestion
from rloom.language import translate
from rloom.runs.names import describe_metrics

METRICS = "metrics"
USAGE = """rloom help COMMAND
rloom help metrics

The help of a command, or the names of the metrics: on a step's line, in guides, and in metrics.jsonl."""


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(translate(USAGE))
        return 0
    name, *rest = arguments
    if name == METRICS:
        print(describe_metrics())
        return 0
    if name not in COMMANDS:
        guess = suggestion(name, [*COMMANDS, METRICS])
        print(translate(f"rloom help: there is no command {name!r}{guess}"), file=sys.stderr)
        return 2
    status = COMMANDS[name].load()([*rest, "--help"])
    assert isinstance(status, int)
    return status
