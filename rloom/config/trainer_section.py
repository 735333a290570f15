"""The keys of a run: how long it is, where it leaves what it finds, on which machines."""

from typing import Any, Literal

import yaml
from pydantic import field_validator

from rloom.config.section import Section, key, section

LOGGER = Literal["console", "tensorboard", "wandb", "file"]


class Pools(Section):
    actor: int | None = key(None, "Workers of the actor. null: those that no other role has.", ge=1)
    critic: int | None = key(None, "Workers of the critic alone. null: it lives with the actor.", ge=1)
    ref: int | None = key(None, "Workers of the reference alone. null: it lives with the actor.", ge=1)
    rollout: int | None = key(None, "Workers of the rollout engines alone. null: they live with the actor.", ge=1)

    @property
    def own(self) -> dict[str, int]:
        """Roles that have workers of their own, and how many."""
        return {name: size for name, size in self.model_dump().items() if size is not None}


class Trainer(Section):
    nnodes: int = key(1, "Machines.", ge=1)
    n_gpus_per_node: int = key(1, "GPUs a machine; on a CPU, processes. More than one worker in all: Ray.", ge=1)
    node_rank: int = key(
        0, "Which of `nnodes` machines this is. 0 drives the run; the others lend their workers until it ends.", ge=0
    )
    master_addr: str | None = key(None, "Address of machine 0, as the others reach it. Needed with `node_rank`.")
    master_port: int = key(6379, "Port of machine 0 at which they meet.", ge=1, le=65535)
    pools: Pools = section(Pools, "Workers for one role alone. By default every worker holds all roles.")
    start_timeout_s: float = key(
        300.0, "Wait so long for machines and workers; then say which are missing and end.", gt=0
    )
    max_restarts: int = key(
        3, "Go on from the last checkpoint when a worker dies, at most so many times in a run.", ge=0
    )
    total_epochs: int = key(30, "Passes over the training prompts.", ge=1)
    total_training_steps: int | None = key(None, "Steps in all; wins over `total_epochs`.", ge=1)
    save_freq: int = key(-1, "Save a checkpoint every so many steps, and at the end. -1: at the end alone.", ge=-1)
    test_freq: int = key(-1, "Validate every so many steps, and at the end. -1: never.", ge=-1)
    val_before_train: bool = key(True, "Validate before the first step, when there are validation prompts.")
    val_only: bool = key(False, "Validate and end.")
    critic_warmup: int = key(0, "Steps in which only the critic learns.", ge=0)
    logger: LOGGER | list[LOGGER] = key(["console"], "Where metrics go, beside the run's own file: one or a list.")
    project_name: str = key("rloom_examples", "Project, for trackers and the default directory.")
    experiment_name: str = key("default", "Experiment, likewise.")
    default_local_dir: str = key(
        "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
        "The run directory: checkpoints, metrics, pictures.",
    )
    resume_mode: Literal["auto", "disable", "resume_path"] = key(
        "auto",
        "auto: go on from the newest checkpoint in the run directory, if any. resume_path: from `resume_from_path`.",
    )
    resume_from_path: str | None = key(None, "A `global_step_N` folder.")
    max_actor_ckpt_to_keep: int | None = key(None, "Newest checkpoints kept with the actor's weights. null: all.", ge=1)
    max_critic_ckpt_to_keep: int | None = key(None, "Newest checkpoints kept with the critic's. null: all.", ge=1)
    balance_batch: bool = key(True, "Share a batch among workers by tokens instead of by samples.")
    rollout_data_dir: str | None = key(None, "Write every training answer with its score here, a jsonl file a step.")
    validation_data_dir: str | None = key(None, "Likewise for validation.")
    log_val_generations: int = key(0, "Print so many validation answers each time.", ge=0)
    max_nonfinite_updates: int = key(3, "Stop after so many updates in a row whose gradient was not finite.", ge=1)
    device: Literal["auto", "cpu", "cuda"] = key("auto", "Where to compute. auto: a GPU if there is one.")

    @field_validator("logger", mode="before")
    @classmethod
    def read_list(cls, given: Any) -> Any:
        """`'["console","wandb"]'` in a YAML file is text, where on a command line it is a list."""
        return yaml.safe_load(given) if isinstance(given, str) and given.startswith("[") else given

    @property
    def head(self) -> str:
        return f"{self.master_addr}:{self.master_port}"

    @property
    def loggers(self) -> list[str]:
        return [self.logger] if isinstance(self.logger, str) else [*self.logger]


class RayKwargs(Section):
    ray_init: dict[str, Any] = key(
        {}, "Arguments of ray.init; `address` joins a cluster that is there, as does RAY_ADDRESS in the environment."
    )
