"""What a run did when: stages and generation of some steps on one time axis, and idle shares of engines and trainer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rloom.runs.records import Event
from rloom.runs.run_folder import flat_config
from rloom.view.http_errors import BadRequest
from rloom.view.query import Json, Query
from rloom.view.run_cache import RunHandle

USUAL_STEPS, MOST_STEPS = 5, 200  # of one request
GENERATION, WAITING, TRAINING, SYNC, OTHER = "generation", "waiting", "training", "sync", "other"  # rows
GEN, WHOLE, VALIDATION, SAVING = "gen", "step", "testing", "save_checkpoint"  # stages; the second has those of a step
ROW_OF = {
    GEN: GENERATION,  # of a run that generates ahead of training: in it a step waits for its groups
    "gen_greedy": GENERATION,
    "reward": WAITING,
    "update_weights": SYNC,
    VALIDATION: OTHER,
    SAVING: OTHER,
    **dict.fromkeys(
        ("probe", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_sft"), TRAINING
    ),
}


@dataclass(frozen=True)
class Span:
    stage: str
    step: int
    start: float  # seconds of training, over all processes of the run
    end: float | None = None  # None: it has not ended
    row: str = OTHER

    def within(self, begin: float, end: float) -> "Span":
        return replace(self, start=max(self.start, begin), end=end if self.end is None else min(self.end, end))


def timeline(run: RunHandle, query: Query) -> Json:
    """Steps `first` to `last`, by default the last completed ones."""
    with run.folder() as folder:
        last = query.integer("last")
        last = folder.state.step if last is None else last
        first = query.integer("first")
        first = max(min(1, last), last - USUAL_STEPS + 1) if first is None else first
        spans, generated, now = recorded(folder.events)
        is_ahead = flat_config(folder.config).get("trainer.v1.trainer_mode", "sync") != "sync"
    if not first <= last < first + MOST_STEPS:
        raise BadRequest(
            f"first={first} and last={last}: use a first step up to the last, and at most {MOST_STEPS} steps"
        )
    chosen = [span for span in spans if first <= span.step <= last]
    begin = min((span.start for span in chosen), default=0.0)
    end = max((now if span.end is None else span.end for span in chosen), default=0.0)
    placed = [replace(span, row=row_of(span.stage, is_ahead)) for span in chosen if span.stage != WHOLE]
    shown = sorted(
        (span.within(begin, end) for span in (*placed, *generated) if span.start < end), key=lambda span: span.start
    )
    shown = [span for span in shown if span.end is not None and span.end > span.start]
    starts = {step: min(span.start for span in chosen if span.step == step) for step in {span.step for span in chosen}}
    return {
        "first": first,
        "last": last,
        "seconds": round(end - begin, 6),
        "steps": [[step, round(starts[step] - begin, 6)] for step in sorted(starts)],
        "spans": [
            {
                "row": span.row,
                "stage": span.stage,
                "step": span.step,
                "start": round(span.start - begin, 6),
                "seconds": round((span.end or end) - span.start, 6),
            }
            for span in shown
        ],
        "idle": idle_shares(shown, begin, end, is_recorded=bool(generated) or not is_ahead),
    }


def row_of(stage: str, is_ahead: bool) -> str:
    return WAITING if is_ahead and stage == GEN else ROW_OF.get(stage, OTHER)


def idle_shares(spans: Sequence[Span], begin: float, end: float, *, is_recorded: bool) -> Mapping[str, float | None]:
    """Shares of the time in which the engines generated nothing, the models of the trainer computed and sent nothing,
    and neither did anything. `is_recorded`: whether it is known when the engines generated."""
    engines = [span for span in spans if span.row == GENERATION or span.stage == VALIDATION]
    trainer = [span for span in spans if span.row in (TRAINING, SYNC) or span.stage == SAVING]
    used = {"engines": engines, "trainer": trainer, "both": [*engines, *trainer]}
    shares = {name: 1 - covered(found) / (end - begin) if end > begin else None for name, found in used.items()}
    return shares if is_recorded else {**shares, "engines": None, "both": None}


def covered(spans: Iterable[Span]) -> float:
    """Seconds in which at least one of them runs."""
    total, until = 0.0, -1.0
    for span in sorted(spans, key=lambda span: span.start):
        assert span.end is not None  # within the range
        total += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return total


def recorded(events: Sequence[Event]) -> tuple[list[Span], list[Span], float]:
    """Stages, generation ahead of training, and the time of the last event. The time between two processes is left
    out."""
    found: list[Span] = []
    generated: list[Span] = []
    running: list[int] = []  # places in `found`
    gap = 0.0
    for before, event in pairwise((events[0], *events) if events else ()):
        if event["event"] == "run":  # another process: what the one before had begun has no end
            gap += max(0.0, event["time"] - before["time"])
            found = [span for span in found if span.end is not None and event["step"] > 0]
            running = []
        elif event["event"] == "stage_begin":
            running.append(len(found))
            found.append(Span(event["stage"], event["step"], event["time"] - gap))
        elif event["event"] == "stage_end":
            place = next((at for at in reversed(running) if found[at].stage == event["stage"]), None)
            if place is not None:
                found[place] = replace(found[place], end=found[place].start + event["seconds"])
                running.remove(place)
        elif event["event"] == "generation":
            spans = [Span(GEN, event["step"], begin - gap, end - gap, GENERATION) for begin, end in event["spans"]]
            generated += spans
    return found, generated, events[-1]["time"] - gap if events else 0.0
