"""Updates that are not finite, gradients that grow, a learning rate of 0, a run that ended with an error."""

from rloom.doctor.run.finding import Change, Fault, Finding, Severity
from rloom.doctor.run.history import ACTOR, FEWEST_CERTAIN, FEWEST_STEPS, History, figures, rounded

NOT_FINITE, OUT_OF_MEMORY = "not finite", "ran out of memory"  # in the message of a TrainingError
GROWTH = 10.0  # times the gradient norm of the first steps
FAR_ABOVE_CLIP = 10.0  # times grad_clip
ALWAYS_LARGE = 100.0  # times grad_clip, whatever it was at first
LR_ZERO = 1e-12
RARE = 0.01  # of the steps: one update that is skipped among hundreds costs nothing
LATELY = 100  # steps; more than one skipped update in them is not rare

LOWER_LR = "half the learning rate"
NONFINITE = Fault(
    "nonfinite",
    Severity.ERROR,
    "Updates are not finite (NaN)",
    (
        "the learning rate is too high",
        "your own loss or estimator divides by 0 or takes the log of 0",
        "activations overflow in the model's data type",
        "the weights of the model contain NaN: `rloom chat MODEL` shows it",
    ),
    ("actor/nonfinite_updates", "train/nonfinite_updates"),
)
FAILED = Fault(
    "run_failed",
    Severity.ERROR,
    "The run ended with an error",
    ("the message names it; docs/troubleshooting.md has the known ones",),
    (),
)
MEMORY_ERROR = Fault(
    "out_of_memory",
    Severity.ERROR,
    "The GPU ran out of memory",
    (
        "a micro-batch has too many tokens",
        "the rollout engine's cache is too large beside the models",
        "the models are too large for these GPUs: `rloom plan` counts each part",
    ),
    (),
)
GRADIENT = Fault(
    "gradient_explosion",
    Severity.WARNING,
    "The gradient norm is far too large",
    (
        "rewards are far outside of -1 to 1, and the advantages are not normalised",
        "the learning rate is too high",
        "many updates on one batch",
    ),
    ("actor/grad_norm", "train/grad_norm"),
)
SFT_GRADIENT_CAUSES = (
    "the learning rate is too high",
    "some rows are damaged or very long: `rloom data check FILE`",
    "the weights of the model are damaged",
)
LEARNING_RATE = Fault(
    "learning_rate_zero",
    Severity.ERROR,
    "The learning rate is 0",
    (
        "the key is 0",
        "the schedule ends at 0 before the run ends, or the warm-up is longer than the run",
    ),
    ("actor/lr", "train/lr"),
)


def learning_rate_key(history: History) -> str:
    return "optim.lr" if history.is_supervised else f"{ACTOR}.optim.lr"


def grad_clip_key(history: History) -> str:
    return "optim.clip_grad" if history.is_supervised else f"{ACTOR}.grad_clip"


def lower_learning_rate(history: History, factor: float = 2.0) -> Change:
    key = learning_rate_key(history)
    why = LOWER_LR if factor == 2.0 else f"a learning rate {factor:g} times lower"
    return Change(key, rounded(history.number(key, 1e-6) / factor), why)


def nonfinite(history: History) -> Finding | None:
    evidence: list[str] = []
    steps: list[int] = []
    for name, series in history.matching("", "/nonfinite_updates").items():
        wrong = [(step, int(value)) for step, value in zip(series.steps, series.values, strict=True) if value > 0]
        if wrong:
            steps += [step for step, _ in wrong]
            total, first = sum(number for _, number in wrong), wrong[0][0]
            evidence.append(f"{name}: {total} updates in {len(wrong)} steps were skipped, the first in step {first}")
    if is_error_about(history, NOT_FINITE):
        last = max(history.steps, default=0) + 1
        steps.append(last)
        evidence.append(ending(history, last))
    if not evidence:
        return None
    dtype = "engine.dtype" if history.is_supervised else f"{ACTOR}.fsdp_config.dtype"
    changes = [
        lower_learning_rate(history),
        Change(grad_clip_key(history), 1.0, "clip gradients", "lower"),
        Change(dtype, "float32", "a wider range of numbers"),
    ]
    ended = is_error_about(history, NOT_FINITE)
    rare = not ended and is_rare(set(steps), history)
    return NONFINITE.found(
        (min(steps), max(steps)),
        evidence,
        changes,
        certain=ended or (not rare and len(set(steps)) > 1),
        severity=Severity.WARNING if rare else None,
    )


def is_rare(steps: set[int], history: History) -> bool:
    """By the numbers of the steps: a running run keeps only some of them."""
    first, last = history.steps[0], history.steps[-1]
    lately = [step for step in steps if step > last - LATELY]
    return len(steps) <= RARE * (last - first + 1) and len(lately) <= 1


def run_failed(history: History) -> Finding | None:
    end = history.end
    if end is None or end.get("status") in ("finished", "interrupted"):
        return None
    known = is_error_about(history, NOT_FINITE) or is_error_about(history, OUT_OF_MEMORY)
    if known or end.get("status") == "RewardError":
        return None  # findings of their own
    last = max(history.steps, default=0)
    return FAILED.found((last, last), [ending(history, last)], [], certain=True)


def out_of_memory(history: History) -> Finding | None:
    if not is_error_about(history, OUT_OF_MEMORY):
        return None
    last = max(history.steps, default=0) + 1
    tokens, share = f"{ACTOR}.ppo_max_token_len_per_gpu", "actor_rollout_ref.rollout.gpu_memory_utilization"
    changes = [
        Change(tokens, int(history.number(tokens, 16384) / 2), "smaller passes"),
        Change(share, rounded(history.number(share, 0.5) * 0.8), "a smaller cache"),
        Change(f"{ACTOR}.fsdp_config.optimizer_offload", True, "moments on the host"),
    ]
    return MEMORY_ERROR.found((last, last), [ending(history, last)], changes, certain=True)


def is_error_about(history: History, words: str) -> bool:
    end = history.end
    return end is not None and words in str(end.get("message", ""))


def ending(history: History, step: int) -> str:
    assert history.end is not None  # the caller has looked
    error = f"{history.end.get('status')}: {history.end.get('message', '')}".strip(": ")
    return f"after step {step}: {error}"


def gradient_explosion(history: History) -> Finding | None:
    norm = history.series(*GRADIENT.metrics)
    if len(norm) < FEWEST_STEPS:
        return None
    name = next(name for name in GRADIENT.metrics if name in history.columns)
    clip = history.number(grad_clip_key(history), 1.0)
    first, last = norm.head.median, norm.tail.median
    grown = last > GROWTH * first and last > FAR_ABOVE_CLIP * clip
    if not (grown or last > ALWAYS_LARGE * clip):
        return None
    span = (norm.head if grown else norm.tail).span[0], norm.span[1]
    limit = grad_clip_key(history).rpartition(".")[2]
    evidence = [f"{name} before clipping: median {first:.3g} at first, {last:.3g} at last; {limit} is {clip:g}"]
    score = history.series("critic/score/std")
    if len(score):
        evidence.append(f"critic/score/std: {score.tail.mean:.3g} in the last steps")
    changes = [
        Change("reward_model.normalize", True, "divide rewards by their own spread"),
        lower_learning_rate(history),
        Change(f"{ACTOR}.clip_ratio", 0.1, "smaller updates", "lower"),
    ]
    causes = SFT_GRADIENT_CAUSES if history.is_supervised else None
    return GRADIENT.found(span, evidence, changes, certain=len(norm) >= FEWEST_CERTAIN, causes=causes)


def learning_rate_zero(history: History) -> Finding | None:
    rate = history.series("actor/lr", "train/lr")
    zero = [step for step, value in zip(rate.steps, rate.values, strict=True) if value <= LR_ZERO]
    if len(rate) < FEWEST_STEPS or len(zero) <= len(rate) / 2:
        return None
    key = learning_rate_key(history)
    evidence = [f"the learning rate is 0 in {len(zero)} of {len(rate)} steps: {figures(rate)}"]
    usual = 1e-5 if history.is_supervised else 1e-6
    changes = [
        Change(key, usual, "the usual rate for all weights", "higher"),
        Change(f"{key.removesuffix('lr')}lr_scheduler_type", "constant", "no decay to 0"),
    ]
    return LEARNING_RATE.found((zero[0], zero[-1]), evidence, changes, certain=len(zero) >= FEWEST_CERTAIN)


SFT_LOSS = Fault(
    "loss_not_falling",
    Severity.WARNING,
    "The loss of supervised fine-tuning does not fall",
    (
        "the learning rate is too low",
        "the learning rate is so high that the loss jumps",
        "the answers in the data cannot be predicted from the prompts",
    ),
    ("train/loss",),
)
FEWEST_OF_SFT = 20  # batches differ, so that a few steps say nothing
LOSS_ERRORS = 5.0  # standard errors: a running run repeats the comparison every few steps
LOSS_RISE = 0.05  # of the loss at first


def loss_not_falling(history: History) -> Finding | None:
    loss = history.series("train/loss")
    trend = loss.trend
    if len(loss) < FEWEST_OF_SFT or trend is None or trend.change < 0:
        return None
    evidence = [f"train/loss: {trend.first:.3g} in the first third of the steps, {trend.last:.3g} in the last"]
    key = learning_rate_key(history)
    grown = trend.rises
    factor, why = (0.2, "five times lower") if grown else (5.0, "five times higher")
    change = Change(key, rounded(history.number(key, 1e-5) * factor), f"a learning rate {why}")
    certain = trend.change > max(LOSS_ERRORS * trend.error, LOSS_RISE * abs(trend.first))
    causes = (SFT_LOSS.causes[1], SFT_LOSS.causes[0], SFT_LOSS.causes[2]) if grown else None
    return SFT_LOSS.found(loss.span, evidence, [change], certain=certain, causes=causes)
