"""Placement: which roles share workers, and on which node each worker runs. Only computes; starts nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rloom.errors import ConfigError

ACTOR, CRITIC, REFERENCE, ROLLOUT, REWARD = "actor", "critic", "ref", "rollout", "reward"
ROLES = (ACTOR, CRITIC, REFERENCE, ROLLOUT, REWARD)


@dataclass(frozen=True)
class Pool:
    """Workers that all hold the same roles."""

    roles: tuple[str, ...]
    first: int  # number of its first worker among all workers of the run
    size: int

    @property
    def name(self) -> str:
        return "+".join(self.roles)


@dataclass(frozen=True)
class WorkerSlot:
    """The position of one worker in its pool."""

    pool: Pool
    rank: int  # within the pool

    @property
    def number(self) -> int:
        return self.pool.first + self.rank

    @property
    def alone(self) -> bool:
        return self.pool.size == 1


@dataclass(frozen=True)
class WorkerLayout:
    nodes: int
    per_node: int  # workers per node
    pools: Sequence[Pool]
    gpus_per_worker: float = 1.0  # below 1 only in tests, where the workers of a machine share its GPU

    @property
    def workers(self) -> int:
        return self.nodes * self.per_node

    @property
    def devices(self) -> int:
        return max(1, round(self.workers * self.gpus_per_worker))

    @property
    def colocated(self) -> bool:
        return len(self.pools) == 1

    def slots(self) -> list[WorkerSlot]:
        return [WorkerSlot(pool, rank) for pool in self.pools for rank in range(pool.size)]

    def node_of(self, slot: WorkerSlot) -> int:
        return slot.number // self.per_node

    def pool_of(self, role: str) -> Pool:
        return next(pool for pool in self.pools if role in pool.roles)


def worker_layout(nodes: int, per_node: int, own: Mapping[str, int], *, gpus_per_worker: float = 1.0) -> WorkerLayout:
    """`own`: roles with separate workers, and how many. The other roles share the remaining workers with the actor."""
    workers = nodes * per_node
    apart = {role: size for role, size in own.items() if role != ACTOR}
    left = workers - sum(apart.values())
    shared = tuple(role for role in ROLES if role not in apart)
    wanted = own.get(ACTOR, left)
    if left < 1 or wanted != left:
        sizes = ", ".join(f"{role} {size}" for role, size in own.items())
        raise ConfigError(
            f"trainer.pools ({sizes}): trainer.nnodes × trainer.n_gpus_per_node = {nodes} × {per_node} = {workers} "
            f"workers, of which {left} are left for the actor"
            + (f", not {wanted}" if ACTOR in own else "")
            + "; change the pools or the number of workers until they add up"
        )
    pools = [Pool(shared, 0, left)]
    for role, size in apart.items():
        pools.append(Pool((role,), pools[-1].first + pools[-1].size, size))
    return WorkerLayout(nodes, per_node, pools, gpus_per_worker)
