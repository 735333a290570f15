"""A program: runs commands one after the other in one process and one folder.

The commands are JSON on stdin: [program, arguments, environment variables]. huggingface_hub reads the environment
when it is imported, so the caller sets it.
"""

import json
import sys

import pytest

from rloom.cli import kit, openrlhf
from rloom.trainer import main_ppo

BEGIN, END = "=== begin", "=== end"
PROGRAMS = {"kit": kit.main, "openrlhf": openrlhf.main, "train": main_ppo.main}


def main() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rloom.launch.run.draw_learning_curve", lambda metrics_file, picture: picture)
        for program, arguments, variables in json.load(sys.stdin):
            with pytest.MonkeyPatch.context() as environment:
                for name, value in variables.items():
                    environment.setenv(name, value)
                print(BEGIN, flush=True)
                status = PROGRAMS[program](arguments)
                print(END, status, flush=True)


if __name__ == "__main__":
    main()
