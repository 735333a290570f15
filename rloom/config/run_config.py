"""What the configuration of every kind of training has: the run, its machines, and which keys the user set."""

import os
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import PrivateAttr

from rloom.config.section import EMBEDDED, Section
from rloom.gpus import visible_gpus
from rloom.runtime.placement import WorkerLayout, worker_layout

if TYPE_CHECKING:
    from rloom.config.trainer_section import RayKwargs, RunTrainer


class RunConfig(Section):
    other_names: ClassVar[Mapping[str, str]] = {}  # key or section in another spelling -> the key or section it is
    listing: ClassVar[str] = "rloom config"  # the command that prints the tree

    if TYPE_CHECKING:  # declared by each kind of training, after its own sections
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
    @abstractmethod
    def model_path(self) -> str:
        """Folder or name of the model that is trained."""

    @property
    def takes_visible_gpus(self) -> bool:
        """No number of GPUs is given. The embedded model is too small for more than one."""
        trainer = self.trainer
        return trainer.n_gpus_per_node is None and trainer.device != "cpu" and self.model_path != EMBEDDED

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
