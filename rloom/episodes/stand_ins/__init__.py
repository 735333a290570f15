"""Modules of other packages that users' code imports, where those packages are not installed.

Code written for verl, OpenRLHF or SkyRL imports base classes and small functions from there. In the processes that run
such code, rloom's own modules are found under those names. A package that is installed is never replaced: these are
found after everything else.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

# module of the other package -> module of rloom whose public names it has
STAND_INS = {
    "verl.experimental.agent_loop": "rloom.episodes.stand_ins.verl_agent_loops",
    "verl.experimental.agent_loop.agent_loop": "rloom.episodes.stand_ins.verl_agent_loops",
    "verl.experimental.agent_loop.tool_parser": "rloom.episodes.stand_ins.verl_agent_loops",
    "verl.utils.profiler": "rloom.episodes.stand_ins.verl_agent_loops",
    "verl.utils.ray_utils": "rloom.episodes.stand_ins.verl_agent_loops",
    "verl.utils.rollout_trace": "rloom.episodes.stand_ins.verl_agent_loops",
    "verl.workers.rollout.replica": "rloom.episodes.stand_ins.verl_agent_loops",
    "verl.tools.base_tool": "rloom.episodes.stand_ins.verl_tools",
    "verl.tools.schemas": "rloom.episodes.stand_ins.verl_tools",
    "verl.tools.function_tool": "rloom.episodes.stand_ins.verl_tools",
    "verl.tools.gsm8k_tool": "rloom.episodes.stand_ins.verl_tools",
    "verl.tools.utils.tool_registry": "rloom.episodes.contracts.verl",
    "verl.interactions.base": "rloom.episodes.stand_ins.verl_tools",
    "verl.utils.reward_score.gsm8k": "rloom.episodes.stand_ins.verl_tools",
    "skyrl_gym": "rloom.episodes.stand_ins.skyrl",
    "skyrl_gym.envs.base_text_env": "rloom.episodes.stand_ins.skyrl",
    "skyrl_gym.envs.registration": "rloom.episodes.stand_ins.skyrl",
    "skyrl_gym.tools.core": "rloom.episodes.stand_ins.skyrl",
    "openrlhf.utils.agent": "rloom.episodes.stand_ins.openrlhf",
    "openrlhf.utils.logging_utils": "rloom.episodes.stand_ins.openrlhf",
}


def install_stand_ins() -> None:
    """Call once in a process, before the user's code is imported."""
    sys.meta_path.append(StandInFinder())


class StandInFinder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.replaced: set[str] = set()  # packages that are not installed

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, inner = fullname.partition(".")
        if not is_known(package):
            return None
        if not inner:
            self.replaced.add(package)
        if package not in self.replaced:
            return None
        if not is_known(fullname):
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: {package} is not installed, and rloom has no stand-in for this module; "
                f"install {package}",
                name=fullname,
            )
        return importlib.machinery.ModuleSpec(fullname, StandInLoader(), is_package=True)


class StandInLoader(importlib.abc.Loader):
    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name in STAND_INS:
            found = vars(importlib.import_module(STAND_INS[name]))
            vars(module).update({key: value for key, value in found.items() if not key.startswith("_")})

        def missing(wanted: str) -> Any:
            if wanted.startswith("_"):
                raise AttributeError(wanted)
            if is_known(f"{name}.{wanted}"):
                return importlib.import_module(f"{name}.{wanted}")
            package = name.partition(".")[0]
            raise ImportError(
                f"cannot import {wanted!r} from {name}: {package} is not installed, and rloom has no stand-in for this "
                f"name; install {package}"
            )

        vars(module)["__getattr__"] = missing


def is_known(fullname: str) -> bool:
    """Whether it is in the table, or a package above one that is."""
    return any(f"{name}.".startswith(f"{fullname}.") for name in STAND_INS)
