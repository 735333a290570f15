"""The files for Slurm and Kubernetes start the run that they say."""

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from rloom.config.checks import check
from rloom.config.derived import declared_needs
from rloom.config.load import load_config
from rloom.config.schema import Config

FOLDER = Path(__file__).parents[3] / "examples" / "cluster"
COMMANDS = {  # in place of Slurm's: a job of two machines, on whose second one the task runs
    "scontrol": 'echo "$*" >> "$CALLS"; [[ $1 != show ]] || printf "node7\\nnode8\\n"',
    "getent": '[[ $2 == node7 ]] && echo "10.0.0.7 STREAM node7"',
    "srun": 'shift; SLURM_NODEID=1 "$@"',
    "python": 'printf "%s\\n" "$@" > "$ARGUMENTS"; exit "$STATUS"',
}
VARIABLES = {
    "SLURM_JOB_NODELIST": "node[7-8]",
    "SLURM_NNODES": "2",
    "SLURM_GPUS_PER_NODE": "h100:8",
    "SLURM_JOB_ID": "42",
    "SLURM_JOB_NAME": "rloom",
}


def checked(command: list[str]) -> Config:
    assert command[:3] == ["-m", "rloom", "train"]
    config = load_config(command[3:])
    check(config, declared_needs(config))
    return config


@pytest.mark.parametrize(("status", "again"), [(0, False), (1, False), (3, True), (130, True)])
def test_the_slurm_script_starts_one_machine_of_the_run_and_begins_again_after_sigterm_or_a_loss(
    tmp_path: Path, status: int, again: bool
) -> None:
    for name, text in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    files = {"CALLS": str(tmp_path / "calls"), "ARGUMENTS": str(tmp_path / "arguments")}
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(tmp_path / "python"), "STATUS": str(status)}
    done = subprocess.run(
        ["bash", FOLDER / "slurm.sbatch", "algorithm.adv_estimator=grpo", "data.train_files=/a folder/train.parquet"],
        env=VARIABLES | files | own, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == status
    trainer = checked((tmp_path / "arguments").read_text().splitlines()).trainer
    assert (trainer.nnodes, trainer.node_rank, trainer.n_gpus_per_node) == (2, 1, 8)
    assert (trainer.master_addr, trainer.default_local_dir) == ("10.0.0.7", f"{tmp_path}/checkpoints/rloom")
    assert ("requeue 42" in (tmp_path / "calls").read_text()) == again


def test_the_ray_job_has_the_machines_and_gpus_that_its_command_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # as Ray sets it for a job
    job: dict[str, Any] = yaml.safe_load((FOLDER / "rayjob.yaml").read_text())
    config = checked(shlex.split(job["spec"]["entrypoint"])[1:])
    cluster = job["spec"]["rayClusterSpec"]
    [workers] = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == config.trainer.nnodes
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], workers)]
    gpus = [pod["containers"][0]["resources"]["limits"].get("nvidia.com/gpu") for pod in pods]
    assert gpus == [None, str(config.trainer.n_gpus_per_node)]
    paths = [str(config.actor_rollout_ref.model.path), str(config.trainer.default_local_dir)]
    paths.append(str(config.data.train_files))
    for pod in pods:
        [mount] = [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == "shared"]
        assert all(path.startswith(f"{mount}/") for path in paths)
