"""The base class of configuration sections and their fields, and what every kind of training has: the run, its
machines, and which keys the user set."""

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, PrivateAttr, field_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from rloom.gpus import visible_gpus
from rloom.packing import MicroBatching
from rloom.plugins import is_own
from rloom.runtime.placement import WorkerLayout, worker_layout


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


NeedsConsent = Callable[[Any], bool]
ACTOR, CRITIC, REF = "actor_rollout_ref.actor", "critic", "actor_rollout_ref.ref"  # paths of sections
MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
EMBEDDED_NAME = "embedded"  # the name of the model and the data that are part of rloom
RAW_TEMPLATE = "{# raw_prompts #}"  # begins a chat template that no model should be saved with
GIVEN_IN_PYTHON = "<python>"  # in place of a path: the rows or the function that were given to `rloom.train`


@dataclass(frozen=True)
class Switch:
    """The key without which another key has no effect. It is in the same section as that key; that of a whole section
    is one of its keys."""

    name: str
    off: str  # the reason while it is off; completes "no effect in this run, because"
    on: str = "=True"  # what the user writes after the key to turn it on
    is_on: Callable[[Any], bool] = bool
    harmless: Sequence[Any] = ()  # values of the other key that are not reported


def key(
    default: Any,
    doc: str,
    *,
    needs_consent: NeedsConsent | None = None,
    same_run: bool | None = None,
    switch: Switch | None = None,
    **limits: Any,
) -> Any:
    """`needs_consent`: whether a value runs code, contacts a server, spends money or writes outside of the run
    directory. A checkpoint does not set such a value unless the user repeats it on the command line.

    `same_run`: with another value it is still the same run, since the key is about length, machines, memory, validation
    or output and not about what is trained. None: as its section.

    `switch`: the key that makes this one useful, if there is one; the table of effects has the others.
    """
    extra = facts(needs_consent=needs_consent, same_run=same_run, switch=switch)
    return Field(default=default, description=doc, json_schema_extra=extra, **limits)


def facts(**given: Any) -> Any:
    return {name: value for name, value in given.items() if value is not None} or None


def names_code(value: str | None) -> bool:
    return value is not None and ":" in value  # file.py:name, module:name


@dataclass(frozen=True)
class NamedIn:
    """Annotates a text: a name in a table, file.py:name or module:name, or an entry point of an installed package.

    The user's own file is not loaded when the text is validated: that of a checkpoint needs consent first.
    """

    table: Mapping[str, Any]
    group: str  # of entry points
    further: tuple[str, ...] = ()  # values that rloom writes itself

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def check(self, name: str | None) -> str | None:
        if name is not None and name not in (*self.table, *self.further) and not is_own(name, self.group):
            raise PydanticCustomError("literal_error", "there is no such entry")
        return name

    def values(self, *others: str) -> str:
        return f"{'|'.join((*self.table, *others))} or file.py:name"


def section(kind: type[Section], doc: str, *, same_run: bool | None = None, switch: Switch | None = None) -> Any:
    return Field(default_factory=kind, description=doc, json_schema_extra=facts(same_run=same_run, switch=switch))


LOGGER = Literal["console", "tensorboard", "wandb", "swanlab", "mlflow", "trackio", "file"]


def no_truth_value(given: Any) -> Any:
    """pydantic reads True as 1."""
    if isinstance(given, bool):
        raise PydanticCustomError("int_type", "input should be a valid integer")
    return given


Count = Annotated[int, Field(ge=1), BeforeValidator(no_truth_value)]
Number = Annotated[int, Field(ge=0), BeforeValidator(no_truth_value)]
Numbers = Annotated[list[Number], Field(min_length=1)]


@dataclass(frozen=True)
class PassKeys:
    """Keys of a section that divide a batch into passes."""

    size: str  # samples of all GPUs together; `size`_per_gpu: of one GPU
    dynamic: str  # fill passes by tokens
    budget: str  # tokens


class PassSection(Section):
    """The section of a model that reads a batch in passes of so many samples, or of up to so many tokens.

    Several ranks can get the same samples: `sequence_ranks` divide each sequence (Ulysses), so that together they take
    as many times more tokens; `model_ranks` divide the model (Megatron), and each of them has all tokens.
    """

    pass_keys: ClassVar[PassKeys]

    @property
    def pass_sizes(self) -> tuple[int | None, int | None]:
        """Samples of a pass: on each GPU; on all GPUs together, by the older key. Both None: by tokens."""
        return getattr(self, f"{self.pass_keys.size}_per_gpu"), getattr(self, self.pass_keys.size)

    @property
    def fills_by_tokens(self) -> bool:
        return bool(getattr(self, self.pass_keys.dynamic)) or self.pass_sizes == (None, None)

    def batching(self, ranks: int, sequence_ranks: int = 1, model_ranks: int = 1) -> MicroBatching:
        if self.fills_by_tokens:
            return MicroBatching(tokens=getattr(self, self.pass_keys.budget) * sequence_ranks)
        per_gpu, together = self.pass_sizes
        share = (together or 0) * sequence_ranks * model_ranks // ranks
        return MicroBatching(samples=per_gpu or max(1, share))


class Pools(Section):
    actor: Count | None = key(None, "Workers of the actor. null: all that no other role has.")
    critic: Count | None = key(None, "Workers for the critic only. null: it shares the actor's.")
    ref: Count | None = key(None, "Workers for the reference only. null: it shares the actor's.")
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
    keep_best_checkpoint: bool = key(
        False,
        "Save a checkpoint after each validation that is the best so far, and keep it beside the newest ones; "
        "best_checkpointed_iteration.txt has its step.",
    )
    best_metric_key: str | None = key(
        None,
        "Metric of a validation that decides which is the best, such as val-core/openai/gsm8k/acc/mean@1. null: the "
        "mean of the scores over the data sources; in `rloom sft` the loss.",
    )
    best_metric_mode: Literal["max", "min"] | None = key(
        None, "Whether the largest or the smallest value is the best. null: the smallest of a loss, else the largest."
    )
    early_stopping_patience: int | None = key(
        None, "Stop after this many validations in a row without a better one. null: never.", ge=1
    )
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
    balance_batch: bool = key(
        True, "Divide a batch among workers by its work (tokens and attention) instead of in order."
    )
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
        """Workers of each role, as `Pools.by_role`."""
        return {}

    @property
    def output_folders(self) -> Mapping[str, str | None]:
        """Folders outside of the run directory that the run writes to, by their keys."""
        return {}

    @property
    def loggers(self) -> list[str]:
        return [self.logger] if isinstance(self.logger, str) else [*self.logger]


class ColocateAsync(Section):
    num_warmup_batches: int = key(
        1,
        "Batches of prompts whose answers are begun ahead of the step that trains them. 0: none, so that each step "
        "waits for all answers to its own prompts.",
        ge=0,
    )


class SeparateAsync(Section):
    num_warmup_batches: int = key(
        1,
        "Batches of prompts whose answers are begun ahead beside those of the next step, which are generated while a "
        "step trains. 0: those of the next step only.",
        ge=0,
    )
    parameter_sync_step: int | None = key(
        None,
        "Updates between two weight syncs: `data.train_batch_size` / `ppo_mini_batch_size`, since weights are sent "
        "after each step. null: that number.",
        ge=1,
    )


class OffPolicySampler(Section):
    max_off_policy_threshold: int = key(
        8,
        "Largest staleness of a group when it is trained: the updates of the weights since its oldest token was "
        "sampled. 0: answers are trained in the step that began them.",
        ge=0,
    )
    max_off_policy_strategy: Literal["drop", "wait"] = key(
        "drop",
        "What happens to a group that would become older. drop: the whole group is replaced by one of another prompt. "
        "wait: a step waits for it, and no prompt is left out.",
    )


class V1(Section):
    trainer_mode: Literal["sync", "colocate_async", "separate_async"] = key(
        "sync",
        "sync: a step generates its answers, then trains them. colocate_async: a step trains the first groups that are "
        "complete and scored; unfinished answers go on in the next step, with its weights. separate_async: likewise, "
        "and workers of their own (`trainer.pools.rollout`) generate while a step trains.",
    )
    kv_on_update: Literal["refill", "keep"] = key(
        "refill",
        "What happens to the key-value cache of an unfinished answer when the weights change. refill: it is computed "
        "again from the answer's tokens, with the new weights. keep: it stays, and the answer goes on at once.",
    )
    colocate_async: ColocateAsync = section(ColocateAsync, "Generation ahead of training on the same workers.")
    separate_async: SeparateAsync = section(SeparateAsync, "Generation on workers of its own, while a step trains.")
    sampler: OffPolicySampler = section(OffPolicySampler, "How old the answers may be that a step trains.")

    @property
    def is_colocated(self) -> bool:
        return self.trainer_mode == "colocate_async"

    @property
    def is_separate(self) -> bool:
        return self.trainer_mode == "separate_async"

    @property
    def batches_ahead(self) -> int:
        return (self.separate_async if self.is_separate else self.colocate_async).num_warmup_batches

    @property
    def begins_ahead(self) -> bool:
        """Whether answers may be begun before the step that trains them, as far as the sampler allows it."""
        return self.is_separate or (self.is_colocated and self.batches_ahead > 0)

    @property
    def max_staleness(self) -> int:
        """Updates of the weights between an answer's oldest token and its training."""
        return self.sampler.max_off_policy_threshold if self.begins_ahead else 0

    @property
    def keeps_cache(self) -> bool:
        """Of unfinished answers, when the weights change."""
        return self.kv_on_update == "keep" and self.max_staleness > 0


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
    v1: V1 = section(V1, "When answers are generated and trained.", same_run=False)
    replay: str | None = key(
        None,
        "Directory of a run that generated ahead of training with the native engine. This run makes each of its "
        "decisions again, from its `schedule.jsonl`, and computes the same bit for bit on the same kind of machine.",
        same_run=False,
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
        "run. Of a step that could have more than a 32nd of it, only the answers to some prompts are written, drawn at "
        "random. null: no limit.",
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


class RunConfig(Section):
    other_names: ClassVar[Mapping[str, str]] = {}  # key or section in another spelling -> the key or section it is
    listing: ClassVar[str] = "rloom config"  # the command that prints the tree

    if TYPE_CHECKING:  # declared by each kind of training, after its own sections
        data: Any
        trainer: RunTrainer
        ray_kwargs: RayKwargs

    _given: frozenset[str] = PrivateAttr(default=frozenset())
    _visible_gpus: int = PrivateAttr(default=0)
    _one_behaviour: tuple[str, ...] = PrivateAttr(default=())

    def model_post_init(self, context: Any) -> None:
        self._given = frozenset((context or {}).get("given", ()))
        # counted once: a worker, which sees one GPU, gets the number with the configuration
        self._visible_gpus = len(visible_gpus(os.environ)) if self.takes_visible_gpus else 0
        self._one_behaviour = tuple((context or {}).get("one_behaviour", ()))

    @property
    def given(self) -> frozenset[str]:
        """The keys that the user set, on the command line or in a YAML file, without defaults and presets."""
        return self._given

    @property
    def one_behaviour(self) -> tuple[str, ...]:
        """Notices about verl's keys that the user set, and that rloom accepts without an effect."""
        return self._one_behaviour

    def is_given(self, name: str) -> bool:
        """Whether the user set that key, or a key of that section."""
        return any(f"{path}.".startswith(f"{name}.") for path in self._given)

    @property
    def numbers_runs(self) -> bool:
        """A run that trains something else gets a directory of its own."""
        chosen = self.trainer.number_runs
        named = self.is_given("trainer.experiment_name") or self.is_given("trainer.default_local_dir")
        return not named if chosen is None else chosen

    @property
    def only_validates(self) -> bool:
        return False

    @property
    def has_held_out_prompts(self) -> bool:
        """Whether there is validation data."""
        return bool(self.data.val_files) or self.data.train_files == EMBEDDED_NAME

    @property
    @abstractmethod
    def model_path(self) -> str:
        """Folder or name of the model that is trained."""

    @property
    def takes_visible_gpus(self) -> bool:
        """No number of GPUs is given. The embedded model is too small for more than one."""
        trainer = self.trainer
        return trainer.n_gpus_per_node is None and trainer.device != "cpu" and self.model_path != EMBEDDED_NAME

    @property
    def gpus_per_node(self) -> int:
        """Workers of each machine: one for each GPU; without a GPU, one."""
        return self.trainer.n_gpus_per_node or max(1, self._visible_gpus)

    @property
    def lacks_gpus(self) -> bool:
        """The run would take all visible GPUs, and there is none."""
        return self.takes_visible_gpus and not self._visible_gpus

    @property
    def all_visible(self) -> str:
        """Where the number of workers comes from, if it is not `trainer.n_gpus_per_node` and not 1."""
        if not self.takes_visible_gpus or self.gpus_per_node == 1:
            return ""
        return f"{self.gpus_per_node} GPUs (all visible; trainer.n_gpus_per_node sets another number)"

    @property
    def workers(self) -> int:
        return self.trainer.nnodes * self.gpus_per_node

    def layout(self, gpus_per_worker: float = 1.0) -> WorkerLayout:
        """The roles of each worker."""
        trainer = self.trainer
        return worker_layout(
            trainer.nnodes, self.gpus_per_node, trainer.workers_by_role, gpus_per_worker=gpus_per_worker
        )

    @property
    def uses_ray(self) -> bool:
        """Several machines, an existing cluster, or the user's choice; one machine needs no Ray."""
        return self.trainer.nnodes > 1 or self.joins_a_cluster or self.trainer.backend == "ray"

    @property
    def uses_processes(self) -> bool:
        """Several workers on this machine, without Ray."""
        return self.workers > 1 and not self.uses_ray

    @property
    def has_workers(self) -> bool:
        """The models are in other processes than the training loop."""
        return self.uses_processes or self.uses_ray

    @property
    def starts_a_cluster(self) -> bool:
        """Several machines without an existing cluster start one."""
        return self.trainer.nnodes > 1 and not self.joins_a_cluster

    @property
    def joins_a_cluster(self) -> bool:
        return "address" in self.ray_kwargs.ray_init or bool(os.environ.get("RAY_ADDRESS"))
