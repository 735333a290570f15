"""Answers that are cut off, repeat themselves, or change in length."""

from rloom.diagnosis.finding import Change, Fault, Finding, Severity, Text
from rloom.diagnosis.history import ACTOR, FEWEST_CERTAIN, FEWEST_STEPS, RESPONSE_LENGTH, History
from rloom.diagnosis.numerics import lower_learning_rate

CUT_SHARE, CUT_CERTAIN = 0.25, 0.5
CUT_ALMOST_ALL = 0.9  # no answer can be complete: it explains a reward of 0
REPEATED, REPEATED_CERTAIN = 0.5, 0.65  # share of the groups of four tokens that occurred before in the same answer
DRIFT = 1.5  # times the length at first
DRIFT_CERTAIN = 2.0

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
    Text("The length of the answers drifts, and they become no better", "回答长度漂移，但质量没有提高"),
    (
        Text(
            "the reward pays for length, in itself or through a judge that prefers it", "奖励直接或通过评分模型偏好长度"
        ),
        Text(
            "the loss gives long and short answers different weight (loss_agg_mode)",
            "损失对长短回答的权重不同（loss_agg_mode）",
        ),
        Text("the policy avoids the task: shorter answers lose less", "策略回避任务：更短的回答损失更小"),
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
        Change("trainer.log_val_generations", 5, Text("look at the answers", "查看回答内容")),
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
    if 1 / DRIFT < factor < DRIFT or becomes_better(history):
        return None
    evidence = [
        Text(
            f"{RESPONSE_LENGTH}: {trend.first:.0f} tokens in the first third of the steps, "
            f"{trend.last:.0f} in the last",
            f"{RESPONSE_LENGTH}：前三分之一步平均 {trend.first:.0f} token，后三分之一 {trend.last:.0f}",
        )
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


def becomes_better(history: History) -> bool:
    """By an accuracy: longer answers may be better. A reward says nothing here, it may be what changes the length."""
    validation = history.validation
    if len(validation) >= 2:
        return max(validation.values[1:]) > validation.values[0]
    accuracy = history.series("reward/acc").trend
    return accuracy is not None and accuracy.rises
