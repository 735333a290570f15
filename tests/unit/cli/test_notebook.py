"""A notebook, as far as rich detects one: no Jupyter is installed for the tests, so its kernel's names are emulated."""

import re
import subprocess
import sys

from tests.architecture.source import ROOT

CELL = """
import builtins, sys, types, warnings

class ZMQInteractiveShell:
    pass

shown = []
builtins.get_ipython = ZMQInteractiveShell
sys.modules["IPython"] = types.ModuleType("IPython")
sys.modules["IPython.display"] = types.ModuleType("IPython.display")
sys.modules["IPython.display"].display = lambda output: shown.append(output._repr_mimebundle_([], [])["text/plain"])
warnings.simplefilter("error")

from rloom.runs.display import Display

display = Display(total_steps=2)
display.begin("gen")
display.advance("gen", 3, 4)
display.step(1, {"critic/score/mean": 0.5})
display.message("Stopped after step 1")
sys.stdout.write(repr(shown))
"""


def test_a_step_is_a_line_in_the_cell_and_no_widget_is_needed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CELL],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    done.stdout = re.sub(r"\\x1b\[\d*m", "", done.stdout)
    assert done.stderr == "" and done.stdout == repr(["step 1/2 · reward_mean 0.500\n", "Stopped after step 1\n"])
