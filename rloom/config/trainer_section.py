"""The keys of a run: length, machines, output."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, field_validator

from rloom.config.section import Section, key, section

LOGGER = Literal["console", "tensorboard", "wandb", "swanlab", "mlflow", "trackio", "file"]


Count = Annotated[int, Field(ge=1)]
Numbers = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class Pools(Section):
    actor: int | None = key(None, "Workers of the actor. null: all that no other role has.", ge=1)
    critic: int | None = key(None, "Workers for the critic only. null: it shares the actor's.", ge=1)
    ref: int | None = key(None, "Workers for the reference only. null: it shares the actor's.", ge=1)
    rollout: Count | Numbers | None = key(
        None,
        "N: workers for the rollout engines only. [0,1]: engines on these of the actor's workers only, which keep "
        "their other roles. null: on all of the actor's.",
    )
    reward: Count | Numbers | None = key(
        None,
        "N: workers for the reward model only, which then scores during generation. [2,3]: it is on these of the "
        "actor's workers only, which keep their other roles. null: on all of the actor's.",
    )

    @property
    def by_role(self) -> dict[str, int | list[int]]:
        """Roles with separate workers, and how many; roles on some of the actor's workers, and their numbers."""
        return {name: workers for name, workers in self.model_dump().items() if workers is not None}

    @property
    def own(self) -> dict[str, int]:
        """Roles with separate workers, and how many."""
        return {name: workers for name, workers in self.by_role.items() if isinstance(workers, int)}

    @property
    def placed(self) -> dict[str, list[int]]:
        """Roles on some of the actor's workers, and the numbers of these."""
        return {name: workers for name, workers in self.by_role.items() if isinstance(workers, list)}


class RunTrainer(Section):
    """The keys that every kind of training has."""

    nnodes: int = key(1, "Machines.", ge=1)
    n_gpus_per_node: int | None = key(
        None,
        "GPUs per machine; on a CPU, processes. null: all GPUs that this machine shows (CUDA_VISIBLE_DEVICES); 1 for "
        "the embedded model and without a GPU.",
        ge=1,
    )
    backend: Literal["auto", "processes", "ray"] = key(
        "auto",
        "What starts more than one worker. processes: this machine, without Ray. ray: Ray, also on one machine. auto: "
        "Ray for several machines or an existing cluster (`ray_kwargs.ray_init.address`, RAY_ADDRESS), else processes.",
    )
    node_rank: int = key(
        0, "Rank of this machine, below `nnodes`. Machine 0 runs the training loop; the others only run workers.", ge=0
    )
    master_addr: str | None = key(None, "Address of machine 0, reachable from the others. Required with `node_rank`.")
    master_port: int = key(6379, "Port of machine 0.", ge=1, le=65535)
    start_timeout_s: float = key(
        300.0, "Time limit for machines and workers to start; after it the run ends and names the missing ones.", gt=0
    )
    max_restarts: int = key(3, "Maximum number of restarts from the last checkpoint after the death of a worker.", ge=0)
    total_epochs: int = key(30, "Passes over the training data.", ge=1)
    total_training_steps: int | None = key(None, "Steps in all; overrides `total_epochs`.", ge=1)
    save_freq: int = key(
        -1,
        "Save a checkpoint every N steps, and at the end. -1: only at the end. A step (轮 in some guides) is one "
        "rollout and update of `train_batch_size` prompts, not an epoch.",
        ge=-1,
    )
    test_freq: int = key(
        -1,
        "Validate every N steps, and at the end. -1: never. Counted in steps like `save_freq`, not in epochs.",
        ge=-1,
    )
    val_before_train: bool = key(True, "Validate before the first step, if there is validation data.")
    logger: LOGGER | list[LOGGER] = key(
        ["console"],
        "Trackers of metrics, one or a list. metrics.jsonl is always on.",
        needs_consent=lambda loggers: loggers != ["console"],
    )
    project_name: str = key("rloom_examples", "Project, for trackers and the default directory.")
    experiment_name: str = key(
        "${experiment_name:actor_rollout_ref.model.path,algorithm.adv_estimator,data.train_files}",
        "Experiment, for trackers and the default directory. The default is the model, the algorithm and the data: "
        "qwen2.5-0.5b-instruct_gae_gsm8k.",
    )
    default_local_dir: str = key(
        "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
        "The run directory: checkpoints, metrics, plots.",
    )
    number_runs: bool | None = key(
        None,
        "Where the run directory DIR holds a run that trains something else: use DIR-2, DIR-3, ... null: if neither "
        "`experiment_name` nor `default_local_dir` is given. False: continue that run, or stop if it is another one.",
    )
    resume_mode: Literal["auto", "disable", "resume_path"] = key(
        "auto",
        "auto: resume from the newest checkpoint in the run directory, if any. resume_path: from `resume_from_path`.",
    )
    resume_from_path: str | None = key(None, "A `global_step_N` folder.")
    balance_batch: bool = key(True, "Divide a batch among workers by tokens instead of by samples.")
    max_nonfinite_updates: int = key(3, "Stop after this many consecutive updates with a non-finite gradient.", ge=1)
    diagnose: bool = key(
        True, "Warn on the console when a fault of the run is certain; `rloom doctor RUN` has the rest. False: never."
    )
    device: Literal["auto", "cpu", "cuda"] = key("auto", "Device. auto: a GPU if there is one.")

    @field_validator("logger", mode="before")
    @classmethod
    def read_list(cls, given: Any) -> Any:
        """`'["console","wandb"]'` is a string in a YAML file and a list on the command line."""
        return yaml.safe_load(given) if isinstance(given, str) and given.startswith("[") else given

    @property
    def head(self) -> str:
        return f"{self.master_addr}:{self.master_port}"

    @property
    def workers_by_role(self) -> Mapping[str, int | list[int]]:
        """As `Pools.by_role`."""
        return {}

    @property
    def output_folders(self) -> Mapping[str, str | None]:
        """Folders outside of the run directory that the run writes to, by their keys."""
        return {}

    @property
    def loggers(self) -> list[str]:
        return [self.logger] if isinstance(self.logger, str) else [*self.logger]


class Trainer(RunTrainer):
    memory_check: bool = key(
        True,
        "Before the models are loaded on GPUs: move to the host what certainly does not fit and may be moved, stop if "
        "that is not enough, and warn if answers of full length would not fit. `rloom plan` has the figures.",
    )
    pools: Pools = section(
        Pools,
        "Workers of single roles. By default every worker holds all roles. Workers are numbered from 0 over all "
        "machines: machine × `n_gpus_per_node` + GPU.",
    )
    val_only: bool = key(False, "Validate and end.")
    critic_warmup: int = key(0, "Initial steps in which only the critic is trained.", ge=0, same_run=False)
    max_actor_ckpt_to_keep: int | None = key(None, "Number of checkpoints that keep the actor. null: all.", ge=1)
    max_critic_ckpt_to_keep: int | None = key(None, "Number of checkpoints that keep the critic. null: all.", ge=1)
    rollout_data_dir: str | None = key(
        None, "Folder for training answers and scores, one jsonl file per step.", needs_consent=bool
    )
    validation_data_dir: str | None = key(
        None, "Folder for validation answers and scores, likewise.", needs_consent=bool
    )
    log_rollouts: bool = key(
        True,
        "Write every answer with its score, tokens, log-probs, advantages, entropies and ratios to `rollouts/` in the "
        "run directory, for `rloom view`.",
    )
    log_rollouts_gb: float | None = key(
        2.0,
        "GiB that `rollouts/` may have. Beyond that, steps in between are removed: the rest is spread evenly over the "
        "run. null: no limit.",
        gt=0,
    )
    log_val_generations: int = key(
        0, "Number of answers to print after each validation, and to record as a table in the trackers.", ge=0
    )
    rollout_mismatch_warning: float | None = key(
        0.01,
        "Warn if `rollout_corr/k3_kl`, the KL per token of rollout engine and trainer, is above this. null: never.",
        gt=0,
    )

    @property
    def workers_by_role(self) -> Mapping[str, int | list[int]]:
        return self.pools.by_role

    @property
    def output_folders(self) -> Mapping[str, str | None]:
        return {
            "trainer.rollout_data_dir": self.rollout_data_dir,
            "trainer.validation_data_dir": self.validation_data_dir,
        }


class RayKwargs(Section):
    ray_init: dict[str, Any] = key(
        {},
        "Arguments of ray.init; `address`, or RAY_ADDRESS in the environment, joins an existing cluster.",
        needs_consent=bool,
    )
