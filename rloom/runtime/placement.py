"""Placement: which roles share workers, and on which node each worker runs. Only computes; starts nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rloom.errors import ConfigError

ACTOR, CRITIC, REFERENCE, ROLLOUT, REWARD = "actor", "critic", "ref", "rollout", "reward"
ROLES = (ACTOR, CRITIC, REFERENCE, ROLLOUT, REWARD)


@dataclass(frozen=True)
class Pool:
    """Workers with one process group. They all hold the same roles, except those in `WorkerLayout.placed`."""

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
    placed: Mapping[str, tuple[int, ...]] = field(
        default_factory=dict
    )  # roles of the first pool that some workers hold
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

    def workers_of(self, role: str) -> tuple[int, ...]:
        """Numbers of the workers that hold the role."""
        pool = self.pool_of(role)
        return self.placed.get(role) or tuple(range(pool.first, pool.first + pool.size))

    def roles_of(self, slot: WorkerSlot) -> tuple[str, ...]:
        return tuple(role for role in slot.pool.roles if slot.number in self.workers_of(role))

    def can_shrink(self, nodes: int) -> bool:
        """Whether so many nodes have workers for every role. Nodes are numbered again, so the last ones are missing."""
        last = max((numbers[-1] for numbers in self.placed.values()), default=0)
        return self.colocated and last < nodes * self.per_node


def worker_layout(
    nodes: int, per_node: int, given: Mapping[str, int | Sequence[int]], *, gpus_per_worker: float = 1.0
) -> WorkerLayout:
    """`given`: roles with separate workers, and how many; roles on some of the actor's workers, and their numbers.

    All other roles are on all of the actor's workers: those that no role has for itself.
    """
    workers = nodes * per_node
    own = {role: size for role, size in given.items() if isinstance(size, int)}
    apart = {role: size for role, size in own.items() if role != ACTOR}
    left = workers - sum(apart.values())
    shared = tuple(role for role in ROLES if role not in apart)
    wanted = own.get(ACTOR, left)
    counted = f"trainer.nnodes × trainer.n_gpus_per_node = {nodes} × {per_node} = {workers} workers"
    if left < 1 or wanted != left:
        sizes = ", ".join(f"{role} {size}" for role, size in own.items())
        raise ConfigError(
            f"trainer.pools ({sizes}): {counted}, of which {left} are left for the actor"
            + (f", not {wanted}" if ACTOR in own else "")
            + "; change the pools or the number of workers until they add up"
        )
    placed = {role: tuple(numbers) for role, numbers in given.items() if not isinstance(numbers, int)}
    for role, numbers in placed.items():
        if numbers != tuple(sorted({*numbers} & {*range(left)})):
            raise ConfigError(
                f"trainer.pools.{role}={[*numbers]}: of {counted}, the actor has 0 to {left - 1}; name some of these, "
                "each once and in ascending order"
            )
    pools = [Pool(shared, 0, left)]
    for role, size in apart.items():
        pools.append(Pool((role,), pools[-1].first + pools[-1].size, size))
    return WorkerLayout(nodes, per_node, pools, placed, gpus_per_worker)


def named_workers(numbers: Sequence[int], noun: str = "worker") -> str:
    """`worker 3`, `workers 0 and 1`, `workers 4 to 7`, `workers 0, 2 and 5`."""
    first, last = numbers[0], numbers[-1]
    if len(numbers) == 1:
        return f"{noun} {first}"
    if len(numbers) > 2 and [*numbers] == [*range(first, last + 1)]:
        return f"{noun}s {first} to {last}"
    return f"{noun}s {', '.join(map(str, numbers[:-1]))} and {last}"
