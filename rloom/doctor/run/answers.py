"""Answers that are cut off, repeat themselves, or change in length."""

from rloom.doctor.run.finding import Change, Fault, Finding, Severity, Text
from rloom.doctor.run.history import ACTOR, FEWEST_CERTAIN, FEWEST_STEPS, RESPONSE_LENGTH, SCORE, History
from rloom.doctor.run.numerics import lower_learning_rate
from rloom.doctor.run.series import Series, Trend, correlation_of_changes

CUT_SHARE, CUT_CERTAIN = 0.25, 0.5
CUT_ALMOST_ALL = 0.9  # no answer can be complete: it explains a reward of 0
REPEATED, REPEATED_CERTAIN = 0.5, 0.65  # share of the groups of four tokens that occurred before in the same answer
DRIFT = 1.5  # times the length at first
DRIFT_CERTAIN = 2.0
FOLLOWS = 0.8  # correlation of the changes of reward and length from step to step: the reward depends on the length

CUT = Fault(
    "answers_cut",
    Severity.WARNING,
    Text("Answers are cut off at the length limit", "回答在长度上限处被截断"),
    (
        Text("data.max_response_length is too small for this task", "data.max_response_length 对该任务过小"),
        Text(
            "the model does not end its answers: a base model, a wrong chat template or ignore_eos",
            "模型不输出结束符：base 模型、对话模板错误或 ignore_eos",
        ),
        Text(
            "the policy has learned to write on: the reward pays for length or does not ask for an end",
            "策略学会了不停输出：奖励鼓励长度或不要求结束",
        ),
    ),
    ("response_length/clip_ratio",),
)
DAMAGED = Text(
    "the model is damaged, or its chat template is wrong: `rloom chat MODEL` shows it",
    "模型损坏或对话模板错误：可用 `rloom chat MODEL` 检查",
)
REPETITION = Fault(
    "repetition",
    Severity.WARNING,
    Text("Answers repeat themselves", "回答不断重复"),
    (
        Text("the reward pays for repeated text (length, a counted phrase)", "奖励鼓励了重复文本（长度、计数短语）"),
        Text("updates are too large: the policy has degenerated", "更新幅度过大，策略已退化"),
        Text("the temperature is too low for this model", "采样温度对该模型过低"),
        DAMAGED,
    ),
    ("rollout/repetition",),
)
LENGTH = Fault(
    "length_drift",
    Severity.WARNING,
    Text("The length of the answers drifts, and no accuracy rises", "回答长度漂移，且没有准确率上升"),
    (
        Text(
            "the reward pays for length, in itself or through a judge that prefers it", "奖励直接或通过评分模型偏好长度"
        ),
        Text(
            "the loss gives long and short answers different weight (loss_agg_mode)",
            "损失对长短回答的权重不同（loss_agg_mode）",
        ),
        Text("a wrong short answer has a higher reward than a wrong long one", "同样答错时，短回答的奖励高于长回答"),
    ),
    (RESPONSE_LENGTH,),
)


def answers_cut(history: History) -> Finding | None:
    cut = history.series("response_length/clip_ratio")
    if len(cut) < FEWEST_STEPS or cut.tail.mean <= CUT_SHARE:
        return None
    longest = "data.max_response_length"
    limit = int(history.number(longest, 512))
    evidence = [
        Text(
            f"response_length/clip_ratio: {cut.tail.mean:.0%} of the answers of the last {len(cut.tail)} steps reach "
            f"{longest}={limit}; {cut.values[0]:.0%} in step {cut.steps[0]}",
            f"response_length/clip_ratio：最后 {len(cut.tail)} 步有 {cut.tail.mean:.0%} 的回答达到 {longest}={limit}；"
            f"第 {cut.steps[0]} 步为 {cut.values[0]:.0%}",
        )
    ]
    from_the_start = cut.head.mean > CUT_SHARE
    changes = [Change(longest, 2 * limit, Text("room for whole answers", "留出完整回答的空间"))]
    if history.config.get("actor_rollout_ref.rollout.ignore_eos") is True:
        why = Text("it is True: answers never end", "当前为 True：回答不会结束")
        changes.insert(0, Change("actor_rollout_ref.rollout.ignore_eos", False, why))
    elif not from_the_start:
        why = Text("a penalty on answers near the limit", "对接近上限的回答加惩罚")
        changes.insert(0, Change("reward_model.overlong_buffer.enable", True, why))
    return CUT.found(
        (cut.span if from_the_start else cut.tail.span),
        evidence,
        changes,
        certain=len(cut) >= FEWEST_CERTAIN and cut.tail.mean > CUT_CERTAIN,
        causes=CUT.causes if from_the_start else (CUT.causes[2], *CUT.causes[:2]),
        severity=Severity.ERROR if min(cut.head.mean, cut.tail.mean) > CUT_ALMOST_ALL else None,
    )


def repetition(history: History) -> Finding | None:
    repeated = history.series("rollout/repetition")
    if len(repeated) < FEWEST_STEPS or repeated.tail.mean <= REPEATED:
        return None
    evidence = [
        Text(
            f"rollout/repetition: {repeated.tail.mean:.0%} of the groups of four tokens occurred before in the same "
            f"answer in the last {len(repeated.tail)} steps; {repeated.values[0]:.0%} in step {repeated.steps[0]}",
            f"rollout/repetition：最后 {len(repeated.tail)} 步中 {repeated.tail.mean:.0%} 的四 token 片段"
            f"在同一回答中已出现过；"
            f"第 {repeated.steps[0]} 步为 {repeated.values[0]:.0%}",
        )
    ]
    changes = [
        Change("trainer.log_val_generations", 5, Text("look at the answers", "查看回答内容"), "higher"),
        lower_learning_rate(history),
        Change(f"{ACTOR}.use_kl_loss", True, Text("stay closer to the reference", "约束在参考模型附近")),
    ]
    certain = len(repeated) >= FEWEST_CERTAIN and repeated.tail.mean > REPEATED_CERTAIN
    from_the_start = repeated.head.mean > REPEATED
    return REPETITION.found(
        repeated.span if from_the_start else repeated.tail.span,
        evidence,
        changes,
        certain=certain,
        causes=(DAMAGED, *REPETITION.causes[:-1]) if from_the_start else None,
        severity=Severity.ERROR if from_the_start else None,
    )


def length_drift(history: History) -> Finding | None:
    length = history.series(RESPONSE_LENGTH)
    trend = length.trend
    if trend is None or not (trend.rises or trend.falls):
        return None
    factor = max(trend.last, 1e-9) / max(trend.first, 1e-9)
    if 1 / DRIFT < factor < DRIFT:
        return None
    quality = no_better(history, length)
    if quality is None:
        return None
    evidence = [
        Text(
            f"{RESPONSE_LENGTH}: {trend.first:.0f} tokens in the first third of the steps, "
            f"{trend.last:.0f} in the last",
            f"{RESPONSE_LENGTH}：前三分之一步平均 {trend.first:.0f} token，后三分之一 {trend.last:.0f}",
        ),
        quality,
    ]
    grows = factor > 1
    changes = (
        [
            Change(
                "reward_model.overlong_buffer.enable",
                True,
                Text("a penalty on answers near the limit", "对接近上限的回答加惩罚"),
            ),
        ]
        if grows
        else [
            Change(
                f"{ACTOR}.loss_agg_mode", "token-mean", Text("the same weight for each token", "每个 token 权重相同")
            ),
        ]
    )
    changes.append(Change(f"{ACTOR}.use_kl_loss", True, Text("stay closer to the reference", "约束在参考模型附近")))
    certain = max(factor, 1 / factor) > DRIFT_CERTAIN
    return LENGTH.found(length.span, evidence, changes, certain=certain)


def no_better(history: History, length: Series) -> Text | None:
    """Evidence that the answers become no better; None: they do, or it is not known.

    A reward that rises without an accuracy says nothing, unless it changes with the length in each step: then the
    reward is what changes the length.
    """
    accuracy, score = accuracy_of(history), history.series(SCORE).trend
    if accuracy is not None:
        name, trend = accuracy
        words = f"{name}: {trend.first:.3g} at first, {trend.last:.3g} at last"
        return None if trend.rises else Text(words, f"{name}：开始 {trend.first:.3g}，最后 {trend.last:.3g}")
    if score is None or not score.rises:
        return Text("no accuracy is measured, and the reward does not rise", "没有准确率指标，奖励也没有上升")
    follows = correlation_of_changes(history.series(SCORE), length)
    grows = length.tail.mean > length.head.mean
    if (follows if grows else -follows) < FOLLOWS:
        return None
    return Text(
        f"no accuracy is measured, and {SCORE} changes with the length from step to step (correlation {follows:.2f})",
        f"没有准确率指标，且 {SCORE} 逐步随长度变化（相关系数 {follows:.2f}）",
    )


def accuracy_of(history: History) -> tuple[str, Trend] | None:
    """Of validation, else of training."""
    validation = history.validation
    if len(validation) >= 2:
        return "validation accuracy", Trend(validation.values[0], max(validation.values[1:]), 0.0)
    trend = history.series("reward/acc").trend
    return None if trend is None else ("reward/acc", trend)
