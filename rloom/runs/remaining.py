"""How long a run will still take: what is left of it, and how long such parts took."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

# Parts of a run, by the names of their spans. A step's time has what is between the others, too.
STEP, VALIDATION, SAVE = "step", "testing", "save_checkpoint"
PARTS = (STEP, VALIDATION, SAVE)
RECENT = 10  # answers become longer: older times say less


@dataclass(frozen=True)
class Schedule:
    total_steps: int
    validate_every: int | None = None  # steps; None: never
    save_every: int | None = None  # None: only after the last step, which is always saved

    def left(self, part: str, after: int) -> int:
        """How often the part still occurs after the one of step `after`."""
        if after >= self.total_steps:
            return 0
        every = {STEP: 1, VALIDATION: self.validate_every, SAVE: self.save_every or self.total_steps}[part]
        if every is None:
            return 0
        return self.total_steps // every - after // every + bool(self.total_steps % every)


@dataclass
class RemainingTime:
    """Times are those of this process; until a part was measured, those of the run before it was resumed."""

    schedule: Schedule
    clock: Callable[[], float]
    seconds: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    before: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    done: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))  # the step of the last of each part
    step: int = 0  # under way
    _begun: dict[str, float] = field(default_factory=dict)  # parts under way
    _apart: float = 0.0  # validation and save since the step began

    def add_history(self, records: Sequence[Mapping[str, float]], last_step: int) -> None:
        """`records`: metrics of the steps before this process. `last_step`: the one that it continues from."""
        for part in PARTS:
            name = f"timing_s/{part}"
            self.before[part] = [record[name] for record in records if name in record]
        self.step, self.done = last_step, dict.fromkeys(PARTS, last_step)

    def begin_step(self, step: int) -> None:
        """What was due with the step before is over."""
        now = self.clock()
        if STEP in self._begun:
            self.seconds[STEP].append(now - self._begun[STEP] - self._apart)
        self.step, self.done = step, dict.fromkeys(PARTS, step - 1)
        self._begun, self._apart = {STEP: now}, 0.0

    def complete_step(self) -> None:
        """Its validation and its checkpoint may still come."""
        self.done[STEP] = self.step

    def begin(self, part: str) -> None:
        self._begun.setdefault(part, self.clock())

    def end(self, part: str) -> None:
        took = self.clock() - self._begun.pop(part)
        self.seconds[part].append(took)
        self._apart += took
        self.done[part] = self.step

    def left_s(self) -> float | None:
        """None: no step was measured yet."""
        if not (self.seconds[STEP] or self.before[STEP]):
            return None
        now, left = self.clock(), 0.0
        for part in PARTS:
            usual = self.usual_s(part)
            left += self.schedule.left(part, self.done[part]) * usual
            begun = self._begun.get(part)  # it may end meanwhile: a thread asks, too
            if begun is not None and self.done[part] < self.step:  # it is one of those that are left
                left -= min(now - begun, usual)
        return max(left, 0.0)

    def usual_s(self, part: str) -> float:
        """0 if it was never measured."""
        own = self.seconds[part]
        # the first one of a process also allocates and compiles
        times = own[1:][-RECENT:] or own or self.before[part][-RECENT:]
        return sum(times) / len(times) if times else 0.0


def clock_time(seconds: float) -> str:
    """9:05, 1:02:30"""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
