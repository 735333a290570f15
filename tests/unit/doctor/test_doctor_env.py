"""`rloom doctor env`: installations with one fault each, and the report of this one."""

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from rich.console import Console

from rloom import cli
from rloom.doctor.machine import env, features, packages
from rloom.doctor.machine.features import (
    Feature,
    FeatureState,
    Installation,
    engine,
    gpu_training,
    library,
    native,
    training,
    vllm,
)
from rloom.doctor.machine.hardware import HostMachine, nvidia_gpus
from rloom.doctor.machine.packages import Imports, Probe, conflicts, required_by

CPU = HostMachine("3.11.7", "Linux", cpus=2, gpus=(), driver=None, driver_fault=None, compiler="/usr/bin/cc")
H200 = replace(CPU, gpus=("NVIDIA H200, 143771 MiB",), driver="570.1")
SEEN = Probe(facts={"torch": {"cuda": "13.0", "gpus": ["NVIDIA H200, 140 GiB"], "bfloat16": True}})
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Write a distribution into a site-packages folder that comes first, here and in probes."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder))

    def write(name: str, version: str, *requirements: str, code: str = "") -> None:
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {line}" for line in requirements), ""]))
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(code)

    return write


def installation(machine: HostMachine = CPU, **probes: Probe) -> Installation:
    return Installation(machine, {"training": Probe(), **probes})


def test_a_requirement_of_another_package_is_compared_with_the_installed_version(install: Install) -> None:
    install("torch", "2.13.0+cpu")
    install("vllm", "0.32.0", "torch==2.13.0", "numpy", 'ray>=99; extra == "more"', "transformers[x]<5.20,>=5.16")
    assert conflicts("vllm", required_by("vllm"), missing=False) == []  # a local version fits, extras are not asked for
    install("vllm_old", "0.26.0", "torch==2.11.0")
    [found] = conflicts("vllm_old 0.26.0", required_by("vllm_old"))
    assert str(found) == "vllm_old 0.26.0 requires torch==2.11.0; 2.13.0+cpu is installed"


def test_a_vllm_for_another_torch_does_not_fit(install: Install) -> None:
    install("torch", "2.13.0")
    install("vllm", "0.30.0", "torch==2.12.1")
    found = vllm(installation(H200))
    assert (found.state, found.detail) == (
        FeatureState.WRONG_VERSION,
        "vllm 0.30.0 requires torch==2.12.1; 2.13.0 is installed",
    )


def test_a_version_outside_the_extra_does_not_fit(install: Install) -> None:
    install("ray", "2.40.0")
    found = library(installation(), "several machines (Ray)", "ray", "ray")
    assert (found.state, found.detail) == (FeatureState.WRONG_VERSION, "rloom requires ray>=2.52; 2.40.0 is installed")
    assert shlex.split(found.way_out)[-1].endswith("[ray]")


def test_an_sglang_that_pins_another_torch_gets_an_environment_of_its_own(install: Install) -> None:
    install("torch", "2.13.0")
    assert engine(installation(H200), "sglang").state is FeatureState.WORKS  # by HTTP: nothing is needed here
    assert engine(installation(CPU), "sglang").state is FeatureState.LIMITED
    assert engine(installation(CPU), "trtllm").state is FeatureState.IMPOSSIBLE  # weights go to it on the trainer's GPU
    install("tensorrt_llm", "1.4.0")
    assert engine(installation(H200), "trtllm").detail == "rloom starts its server: tensorrt_llm 1.4.0"
    install("sglang", "0.5.23", "torch==2.14.1")
    found = engine(installation(H200), "sglang")
    assert found.state is FeatureState.WRONG_VERSION and "environment of its own" in found.way_out


def test_tensorrt_llm_without_ray_cannot_be_started(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("tensorrt_llm", "1.4.0")
    found = features.installed_version
    monkeypatch.setattr(features, "installed_version", lambda name: None if name == "ray" else found(name))
    feature = engine(installation(H200), "trtllm")
    assert (feature.state, feature.detail) == (FeatureState.MISSING, "ray is not installed")
    assert shlex.split(feature.way_out)[-1].endswith("[ray]")


def test_a_torchvision_for_another_torch_is_found_and_named(install: Install) -> None:
    install(
        "torch", "2.13.0+cpu", code="def register(): raise RuntimeError('operator torchvision::nms does not exist')"
    )
    install("torchvision", "0.28.0", code="import torch\ntorch.register()")
    wrapped = (
        "try:\n    import torchvision\nexcept Exception as error:\n    raise ImportError('cannot import') from error"
    )
    install("transformers", "5.19.0", code=wrapped)
    probe = Imports({"training": ["transformers"]}).results()["training"]
    assert (probe.failed, probe.packages) == ("transformers", ["transformers", "torchvision", "torch"])
    found = training(installation(training=probe))
    assert found.state is FeatureState.BROKEN
    assert found.detail == (
        "`import transformers` fails: RuntimeError: operator torchvision::nms does not exist "
        "(in torchvision 0.28.0, which does not fit torch 2.13.0+cpu)"
    )
    assert found.way_out.startswith("python -m pip uninstall torchvision ")


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("import os; os._exit(3)", "the importing process ended with 3"),
        ("import time; time.sleep(600)", "the import did not end within 1 s"),
    ],
)
def test_an_import_that_ends_or_stops_its_process_is_a_fault(
    install: Install, monkeypatch: pytest.MonkeyPatch, code: str, fault: str
) -> None:
    install("hostile", "1.0", code=code)
    if "sleep" in code:
        monkeypatch.setattr(packages, "IMPORT_LIMIT_S", 1.0)
    probe = Imports({"hostile": ["hostile"]}).results()["hostile"]
    assert probe.failed == "hostile" and probe.error.startswith(fault)


def test_without_torch_the_report_says_so_and_the_status_is_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = packages.version

    def version(name: str) -> str:
        if name in ("torch", "transformers", *env.PROBED):
            raise packages.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(packages, "version", version)
    assert cli.main(["doctor", "env", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["works"], report["packages"]["torch"]) == (False, None)
    [feature] = report["features"]
    assert feature["state"] == "not installed"
    assert feature["detail"] == "torch<2.14,>=2.11, transformers<5.20,>=5.16"
    assert "-m pip install" in feature["way_out"]


@pytest.mark.parametrize(
    ("machine", "probe", "state", "words"),
    [
        (CPU, Probe(), FeatureState.IMPOSSIBLE, "no NVIDIA GPU"),
        (H200, Probe(), FeatureState.WRONG_VERSION, "driver 570.1 lists 1 GPUs, and torch"),
        (replace(CPU, driver_fault="nvidia-smi: no device"), Probe(), FeatureState.IMPOSSIBLE, "nvidia-smi: no device"),
        (H200, SEEN, FeatureState.WORKS, "1 visible to torch, driver 570.1"),
    ],
)
def test_a_gpu_needs_a_driver_and_a_torch_that_sees_it(
    machine: HostMachine, probe: Probe, state: FeatureState, words: str
) -> None:
    found = gpu_training(installation(machine, training=probe))
    assert found.state is state and words in found.detail


def test_cuda_graphs_need_a_gpu_and_a_compiler() -> None:
    assert native(installation(CPU)).detail == "eager on the CPU; CUDA graphs need a GPU"
    assert native(installation(replace(H200, compiler=None), training=SEEN)).state is FeatureState.LIMITED


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            "echo 'NVIDIA H200, 143771 MiB, 570.1'; echo 'NVIDIA H200, 143771 MiB, 570.1'",
            (("NVIDIA H200, 143771 MiB",) * 2, "570.1", None),
        ),
        ("echo 'Failed to initialize NVML'; exit 9", ((), None, "nvidia-smi: Failed to initialize NVML")),
    ],
)
def test_gpus_are_those_that_the_driver_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, expected: object
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert nvidia_gpus() == expected


def test_a_command_is_printed_on_one_line() -> None:
    way = "python -m pip install " + " ".join(f"package-{number}" for number in range(30))
    console = Console(file=StringIO(), width=60)
    features = [
        Feature("training with the defaults", FeatureState.WORKS),
        Feature("vllm", FeatureState.MISSING, "gone", way),
    ]
    env.render(env.MachineReport(CPU, None, {"torch": "2.13.0+cpu", "vllm": None}, features), console)
    assert isinstance(console.file, StringIO)
    printed = console.file.getvalue()
    assert f"\n  vllm: {way}\n" in printed
    assert "torch          2.13.0+cpu, built without CUDA" in printed and "not installed  vllm" in printed


@pytest.mark.slow
def test_this_installation_trains() -> None:
    command = [sys.executable, "-m", "rloom", "doctor", "env", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    report = json.loads(done.stdout)
    assert (done.returncode, report["works"]) == (0, True), report["features"][0]
    states = {feature["name"]: feature["state"] for feature in report["features"]}
    assert states["rollout.name=native"] == states["rollout.name=hf"] == states["several machines (Ray)"] == "works"
    assert states["strategy=megatron"] == "works"


def test_what_rloom_declares_is_read_from_its_project_file() -> None:
    assert Requirement("torch>=2.11,<2.14") in packages.declared()
    assert [each.name for each in packages.declared("sglang")] == ["h11"]


def test_a_registered_package_that_raises_has_a_row_and_the_others_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(here: Installation) -> Feature:
        raise KeyError("torch")

    monkeypatch.setattr(features, "rollout_kind", lambda name: SimpleNamespace(diagnose=fails))
    found = engine(installation(), "own")
    assert (found.name, found.state, found.detail) == ("rollout.name=own", FeatureState.BROKEN, "KeyError: 'torch'")
    assert found.way_out == "correct the package that registers it, or remove it"
