"""What has to be in place before vLLM is imported: the package and its environment variables. Imports no vLLM."""

import logging
import os
from importlib.util import find_spec

from rloom.errors import ConfigError
from rloom.extras import install_command

ENGINE_KEY = "actor_rollout_ref.rollout.name=vllm"


def is_installed() -> bool:
    """A folder of that name in the current directory is found, too, but has no file to import."""
    spec = find_spec("vllm")
    return spec is not None and spec.origin is not None


def check_installed() -> None:
    if not is_installed():
        raise ConfigError(
            f"{ENGINE_KEY}: the package vllm is not installed; install it with\n  {install_command('vllm')}\n"
            "(without a GPU see docs/rollout.md), or use actor_rollout_ref.rollout.name=native"
        )


def set_environment() -> None:
    """Before the first import of vLLM. A variable that the user has set is kept, except the one rloom depends on."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights are loaded from tensors of this process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its warnings are about settings of rloom
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # of what it logs before it reads the variable
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the trainer uses the same threads
