"""One run from beginning to end: build, go on from where it stopped, train, say what came of it."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

import torch

from rloom.atomic import replace_text
from rloom.config.algorithm_needs import brings_own_algorithm
from rloom.config.checks import late_notices, notices_on_a_cpu, verify
from rloom.config.saved import CONFIG_FILE
from rloom.config.schema import Config
from rloom.errors import WorkerError
from rloom.observe.curve import draw_learning_curve
from rloom.observe.display import validation_accuracies
from rloom.observe.events import EVENTS_FILE, metrics_by_step, read_events
from rloom.observe.runlog import RunLog
from rloom.runtime.nodes import check_head_address
from rloom.runtime.placement import WorkerLayout
from rloom.runtime.secret import new_secret
from rloom.startup import announce
from rloom.trainer.assemble.components import Components, config_text, open_components, prepare, resolved_needs
from rloom.trainer.assemble.models import needs_critic
from rloom.trainer.assemble.worker_groups import layout_of
from rloom.trainer.checkpoint import Checkpoints
from rloom.trainer.directory import last_of_this_run, locked, run_directory, set_aside_later, starting_point
from rloom.trainer.identity import IDENTITY_FILE, Continuation, compare, describe
from rloom.trainer.loop import Training

logger = logging.getLogger(__name__)
CURVE = "learning_curve.png"
LOGS = "logs"


def run(config: Config) -> int:
    needs = resolved_needs(config)
    if brings_own_algorithm(config):
        verify(config, needs)
    trainer = config.trainer
    if trainer.device == "auto" and not config.uses_ray and not torch.cuda.is_available():
        for notice in notices_on_a_cpu(config, needs):
            logger.warning(f"Note: {notice}")
    directory = run_directory(config)
    with machines(config, directory):
        return attempts(config, directory)


def attempts(config: Config, directory: Path) -> int:
    """Go on from the last checkpoint when a worker is lost, as often as is allowed."""
    layout = layout_of(config)
    for restarts in count():
        try:
            return run_once(config, directory, layout, again=restarts > 0)
        except WorkerError as error:
            if not error.lost:
                raise
            if restarts == config.trainer.max_restarts:
                error.add_note(f"trainer.max_restarts={restarts}: the run does not begin again.")
                raise
            print(
                error, *getattr(error, "__notes__", []), f"Restart {restarts + 1} of {config.trainer.max_restarts}",
                sep="\n", flush=True,
            )  # fmt: skip
            layout = remaining_layout(config, layout)
    raise AssertionError("unreachable")


def run_once(config: Config, directory: Path, layout: WorkerLayout, *, again: bool) -> int:
    """Locked and compared with what is there before a model is loaded."""
    with locked(directory):
        inputs = prepare(config)
        identity = describe(config, inputs)
        checkpoints = Checkpoints(
            directory,
            keep={"actor": config.trainer.max_actor_ckpt_to_keep}
            | ({"critic": config.trainer.max_critic_ckpt_to_keep} if needs_critic(config) else {}),
        )
        start = last_of_this_run(config, checkpoints) if again else starting_point(config, checkpoints)
        trainer = config.trainer
        chosen = trainer.resume_mode == "resume_path" or trainer.val_only
        how = None if start is None else compare(start, config, identity, chosen=chosen)
        with open_components(config, layout, inputs, identity, directory / LOGS) as parts:
            if not trainer.val_only:
                set_aside_later(checkpoints, start)
                replace_text(directory / CONFIG_FILE, config_text(config))
                replace_text(directory / IDENTITY_FILE, json.dumps(identity, indent=1))
            with RunLog.open(
                directory,
                loggers=trainer.loggers,
                project=trainer.project_name,
                experiment=trainer.experiment_name,
                config=config.model_dump(mode="json"),
                total_steps=parts.settings.total_steps,
                total_epochs=-(-parts.settings.total_steps // parts.stream.steps_per_epoch),
            ) as log:
                return train(config, parts, log, checkpoints, start, how)


@contextmanager
def machines(config: Config, directory: Path) -> Iterator[None]:
    if not config.uses_ray:
        yield
        return
    with ExitStack() as stack:
        if config.starts_a_cluster:
            check_head_address(config.trainer.head)
            stack.enter_context(new_secret(directory, config.trainer.head))
        from rloom.trainer.assemble.ray_workers import open_cluster  # Ray is an extra

        stack.enter_context(open_cluster(config))
        yield


def remaining_layout(config: Config, layout: WorkerLayout) -> WorkerLayout:
    from rloom.trainer.assemble.ray_workers import shrink_layout

    return shrink_layout(config, layout)


def train(
    config: Config,
    parts: Components,
    log: RunLog,
    checkpoints: Checkpoints,
    start: Path | None,
    how: Continuation | None,
) -> int:
    training = Training(
        parts.settings,
        parts.roles,
        parts.stream,
        parts.kl,
        log,
        checkpoints,
        parts.write_checkpoint,
        parts.load_checkpoint,
    )
    if start is not None and how is not None:
        training.resume(start, keep_position=how.keeps_position)
        log.message(f"Going on from {start}")
        if how.notice:
            log.message(how.notice)
    if config.trainer.val_only:
        training.validate(training.state.step)
        return 0
    log.truncate_after(training.state.step if start is not None else -1)
    if training.state.step >= parts.settings.total_steps:
        log.message(
            f"This run has already ended, at step {training.state.step}. Train on with a larger "
            "trainer.total_training_steps, or anew with trainer.resume_mode=disable"
        )
        return 0
    for notice in late_notices(config, parts.settings.total_steps):
        logger.warning(f"Note: {notice}")
    announce("Starting training ...")
    log.message(opening(config, parts))
    try:
        training.run()
    except KeyboardInterrupt:
        log.message(training.save_last_step())
        raise
    log.message(summary(log, checkpoints))
    return 0


def opening(config: Config, parts: Components) -> str:
    model, n, steps = (
        config.actor_rollout_ref.model.path,
        config.actor_rollout_ref.rollout.n,
        parts.settings.total_steps,
    )
    return (
        f"{config.algorithm.adv_estimator} on {model} ({parts.settings.device}): {len(parts.stream)} prompts, "
        f"{config.data.train_batch_size} × {n} answers a step, {steps} step{'s' if steps != 1 else ''}, "
        f"{use_of_reference(config)}"
    )


def use_of_reference(config: Config) -> str:
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    places = [f"in the reward ({algorithm.kl_penalty} × {algorithm.kl_ctrl.kl_coef})"] if config.kl_in_reward else []
    places += [f"in the loss ({actor.kl_loss_type} × {actor.kl_loss_coef})"] if actor.use_kl_loss else []
    return f"KL to the reference {' and '.join(places)}" if places else "no reference"


def summary(log: RunLog, checkpoints: Checkpoints) -> str:
    lines = accuracy_lines(metrics_by_step(read_events(log.run_dir / EVENTS_FILE)))
    picture = draw_learning_curve(log.metrics_file, log.run_dir / CURVE)
    lines.append(f"Learning curve: {picture}")
    newest = checkpoints.path(checkpoints.steps()[-1])  # the last step is always saved
    lines.append(f"Model: {newest}; as a Hugging Face folder: rloom export {newest} DIR")
    return "\n".join(lines)


def accuracy_lines(records: Sequence[Mapping[str, float]]) -> list[str]:
    """The first validation and the last, each with its step: there need not have been one before the first step."""
    found = [(int(record["step"]), values) for record in records if (values := validation_accuracies(record))]
    if not found:
        return []
    lines = []
    last_step, last = found[-1]
    for source, accuracy in last.items():
        step, first = next((step, values[source]) for step, values in found if source in values)
        when = "at the start" if step == 0 else f"after step {step}"
        now = f", {accuracy:.1%} now" if step < last_step else ""
        lines.append(f"Held-out accuracy on {source}: {first:.1%} {when}{now}")
    return lines
