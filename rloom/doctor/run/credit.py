"""Advantages that carry no information, or that do not reach the first tokens of an answer."""

from rloom.algos.needs import SMALLEST_WEIGHT, reach
from rloom.doctor.run.finding import Change, Fault, Finding, Severity, Text
from rloom.doctor.run.history import FEWEST_CERTAIN, FEWEST_STEPS, RESPONSE_LENGTH, ROLLOUT, SCORE, History
from rloom.doctor.run.series import FEWEST_OF_A_TREND, Series

EQUAL_SHARE = 0.9  # of the prompts: fewer than one in ten has anything to learn from
EQUAL_AT_FIRST = 0.75
EQUAL_CERTAIN = 0.97
WEIGHT_CERTAIN = 0.001

EQUAL_GROUPS = Fault(
    "equal_groups",
    Severity.ERROR,
    Text(
        "The answers to a prompt all have the same score: no advantage", "同一 prompt 的回答得分全部相同：没有优势信号"
    ),
    (),  # by the mean score
    ("rollout/equal_groups",),
)
TOO_HARD = Text("the prompts are too hard: almost no answer scores", "题目过难：几乎没有回答得分")
TOO_EASY = Text("the prompts are too easy: almost every answer scores", "题目过易：几乎所有回答都得分")
SAME_ANSWERS = Text(
    "the answers are the same: temperature, top_p or top_k leave no choice",
    "回答完全相同：temperature、top_p 或 top_k 限制过死",
)
FEW_ANSWERS = Text("too few answers to a prompt", "每个 prompt 的回答数太少")
COARSE = Text("the reward has too few levels", "奖励取值过于粗糙")
CREDIT = Fault(
    "credit_decay",
    Severity.WARNING,
    Text("The reward does not reach the first tokens of an answer", "奖励传不到回答开头的 token"),
    (
        Text(
            "gamma × lam per token is too small for answers of this length (measured on GSM8K, answers of 300 tokens: "
            "lam=0.95 gained nothing in 12 steps, lam=1.0 took 61.2 % to 70.9 % in 30)",
            "对这样长的回答，每 token 的 gamma × lam 过小（GSM8K 实测，回答约 300 token："
            "lam=0.95 在 12 步内无提升，lam=1.0 在 30 步内从 61.2 % 升到 70.9 %）",
        ),
    ),
    (RESPONSE_LENGTH,),
)


def equal_groups(history: History) -> Finding | None:
    share = history.series("rollout/equal_groups")
    if not history.compares_answers or len(share) < FEWEST_STEPS:
        return None
    # equal only at the end: it has learned the task, or it has collapsed, which other checks find
    if share.head.mean < EQUAL_AT_FIRST or share.tail.mean < EQUAL_SHARE or history.score_rises:
        return None
    equal, score = share.tail.mean, history.series(SCORE)
    evidence = [
        Text(
            f"rollout/equal_groups: {equal:.0%} of the prompts of the last {len(share.tail)} steps have answers with "
            "equal scores, whose advantage is 0",
            f"rollout/equal_groups：最后 {len(share.tail)} 步中 {equal:.0%} 的 prompt 其回答得分全部相同，优势为 0",
        )
    ]
    if len(score):
        evidence.append(
            Text(f"{SCORE}: {score.tail.mean:.3g} in these steps", f"{SCORE}：这些步平均 {score.tail.mean:.3g}")
        )
    n = int(history.number(f"{ROLLOUT}.n", 4))
    changes = [
        Change(
            "algorithm.filter_groups.enable",
            True,
            Text("generate until enough prompts differ", "持续采样直到有足够的有效 prompt"),
        ),
        Change(f"{ROLLOUT}.n", 2 * max(n, 4), Text("more answers to a prompt", "每个 prompt 生成更多回答")),
        Change(f"{ROLLOUT}.temperature", 1.0, Text("answers that differ", "使回答各不相同"), "higher"),
    ]
    certain = len(share) >= FEWEST_CERTAIN and equal >= EQUAL_CERTAIN
    return EQUAL_GROUPS.found(share.tail.span, evidence, changes, certain=certain, causes=equal_causes(history))


def equal_causes(history: History) -> list[Text]:
    high, low = history.series("critic/score/max"), history.series("critic/score/min")
    score, entropy = history.series(SCORE), history.series("actor/entropy")
    place = 0.5  # of the mean score between the lowest and the highest
    if len(score) and len(high) and len(low) and max(high.values) > min(low.values):
        place = (score.tail.mean - min(low.values)) / (max(high.values) - min(low.values))
    causes = [TOO_HARD] if place < 0.1 else [TOO_EASY] if place > 0.9 else []
    if len(entropy) and entropy.tail.mean < 0.01:
        causes.insert(0, SAME_ANSWERS)
    return [*causes, *(cause for cause in (SAME_ANSWERS, FEW_ANSWERS, COARSE) if cause not in causes)]


def credit_decay(history: History) -> Finding | None:
    gamma, lam = history.number("algorithm.gamma", 1.0), history.number("algorithm.lam", 1.0)
    needs, length = history.estimator_needs, history.series(RESPONSE_LENGTH)
    decay = needs.discount(gamma, lam)
    if decay >= 1 or len(length) < FEWEST_OF_A_TREND:
        return None
    weight = decay**length.mean
    if weight >= SMALLEST_WEIGHT or history.score_rises:
        return None
    read = [key for key in ("algorithm.gamma", "algorithm.lam") if key.rpartition(".")[2] in needs.reads]
    name = " × ".join(read)
    evidence = [
        Text(
            f"{name} = {decay:.4g}, answers of {length.mean:.0f} tokens: the first token gets {weight:.1g} of the "
            f"final reward; it reaches {reach(decay)} tokens back (5 %)",
            f"{name} = {decay:.4g}，回答平均 {length.mean:.0f} token：首个 token 只得到最终奖励的 {weight:.1g}；"
            f"奖励只能向前传 {reach(decay)} 个 token（5 %）",
        ),
        *flat_score(history.series(SCORE)),
    ]
    changes = [
        Change(key, 1.0, Text("every token gets the whole reward", "每个 token 都得到完整的奖励"))
        for key in reversed(read)
        if history.number(key, 1.0) < 1
    ]
    certain = weight < WEIGHT_CERTAIN and history.has_first_step
    return CREDIT.found(length.span, evidence, changes, certain=certain)


def flat_score(score: Series) -> list[Text]:
    trend = score.trend
    if trend is None:
        return []
    return [
        Text(
            f"{SCORE} does not rise: {trend.first:.3g} in the first third of the steps, {trend.last:.3g} in the last",
            f"{SCORE} 没有上升：前三分之一步平均 {trend.first:.3g}，后三分之一 {trend.last:.3g}",
        )
    ]
