"""Commands that install the optional libraries into the current Python environment."""

import shlex
import sys
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

CLONE = Path(__file__).parents[1]


TRACKERS = ("wandb", "swanlab", "mlflow", "trackio")  # values of trainer.logger: each is a module and an extra
UNPINNED = {"vllm"}  # pins torch and others itself, and other versions than constraints.txt


def install_command(*extras: str) -> str:
    """In a clone: the extras of its pyproject.toml, with the tested versions. Otherwise: the libraries of the extras.

    Without an extra: rloom itself, with what every run needs.
    """
    python = shlex.quote(sys.executable)
    if (CLONE / "pyproject.toml").is_file():
        wanted = shlex.quote(f"{CLONE}[{','.join(extras)}]" if extras else str(CLONE))
        pins = "" if UNPINNED.intersection(extras) else f"--constraint {shlex.quote(str(CLONE / 'constraints.txt'))} "
        return f"{python} -m pip install {pins}--editable {wanted}"
    wanted = " ".join(shlex.quote(name) for extra in extras for name in requirements(extra)) if extras else "rloom"
    return f"{python} -m pip install {wanted}"


def requirements(extra: str) -> list[str]:
    try:
        declared = requires("rloom") or []
    except PackageNotFoundError:
        declared = []
    marked = [line.partition(";") for line in declared]
    return [name.strip() for name, _, marker in marked if marker.replace("'", '"').strip() == f'extra == "{extra}"']
