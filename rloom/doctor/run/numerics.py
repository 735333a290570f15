"""Updates that are not finite, gradients that grow, a learning rate of 0, a run that ended with an error."""

from rloom.doctor.run.finding import Change, Fault, Finding, Severity, Text
from rloom.doctor.run.history import ACTOR, FEWEST_CERTAIN, FEWEST_STEPS, History, figures, rounded

NOT_FINITE, OUT_OF_MEMORY = "not finite", "ran out of memory"  # in the message of a TrainingError
GROWTH = 10.0  # times the gradient norm of the first steps
FAR_ABOVE_CLIP = 10.0  # times grad_clip
ALWAYS_LARGE = 100.0  # times grad_clip, whatever it was at first
LR_ZERO = 1e-12
RARE = 0.01  # of the steps: one update that is skipped among hundreds costs nothing
LATELY = 100  # steps; more than one skipped update in them is not rare

LOWER_LR = Text("half the learning rate", "学习率减半")
NONFINITE = Fault(
    "nonfinite",
    Severity.ERROR,
    Text("Updates are not finite (NaN)", "更新出现 NaN 或无穷大"),
    (
        Text("the learning rate is too high", "学习率过高"),
        Text(
            "your own loss or estimator divides by 0 or takes the log of 0", "自定义损失或优势估计中出现除以 0 或 log 0"
        ),
        Text("activations overflow in the model's data type", "激活值在模型的数据类型中溢出"),
        Text(
            "the weights of the model contain NaN: `rloom chat MODEL` shows it",
            "模型权重本身含 NaN：可用 `rloom chat MODEL` 检查",
        ),
    ),
    ("actor/nonfinite_updates", "train/nonfinite_updates"),
)
FAILED = Fault(
    "run_failed",
    Severity.ERROR,
    Text("The run ended with an error", "训练因错误结束"),
    (
        Text(
            "the message names it; docs/troubleshooting.md has the known ones",
            "见错误信息；已知问题见 docs/troubleshooting.md",
        ),
    ),
    (),
)
MEMORY_ERROR = Fault(
    "out_of_memory",
    Severity.ERROR,
    Text("The GPU ran out of memory", "显存不足"),
    (
        Text("a micro-batch has too many tokens", "一个 micro-batch 的 token 过多"),
        Text("the rollout engine's cache is too large beside the models", "推理引擎的 KV cache 过大"),
        Text(
            "the models are too large for these GPUs: `rloom plan` counts each part",
            "模型对这些 GPU 过大：`rloom plan` 列出各部分显存",
        ),
    ),
    (),
)
GRADIENT = Fault(
    "gradient_explosion",
    Severity.WARNING,
    Text("The gradient norm is far too large", "梯度范数过大"),
    (
        Text(
            "rewards are far outside of -1 to 1, and the advantages are not normalised",
            "奖励远超 -1 到 1，且优势未归一化",
        ),
        Text("the learning rate is too high", "学习率过高"),
        Text("many updates on one batch", "同一批数据更新次数过多"),
    ),
    ("actor/grad_norm", "train/grad_norm"),
)
SFT_GRADIENT_CAUSES = (
    Text("the learning rate is too high", "学习率过高"),
    Text("some rows are damaged or very long: `rloom data check FILE`", "部分数据损坏或过长：`rloom data check FILE`"),
    Text("the weights of the model are damaged", "模型权重损坏"),
)
LEARNING_RATE = Fault(
    "learning_rate_zero",
    Severity.ERROR,
    Text("The learning rate is 0", "学习率为 0"),
    (
        Text("the key is 0", "配置中的学习率为 0"),
        Text(
            "the schedule ends at 0 before the run ends, or the warm-up is longer than the run",
            "学习率调度过早降为 0，或预热步数超过总步数",
        ),
    ),
    ("actor/lr", "train/lr"),
)


def learning_rate_key(history: History) -> str:
    return "optim.lr" if history.is_supervised else f"{ACTOR}.optim.lr"


def grad_clip_key(history: History) -> str:
    return "optim.clip_grad" if history.is_supervised else f"{ACTOR}.grad_clip"


def lower_learning_rate(history: History, factor: float = 2.0) -> Change:
    key = learning_rate_key(history)
    why = LOWER_LR if factor == 2.0 else Text(f"a learning rate {factor:g} times lower", f"学习率降为 1/{factor:g}")
    return Change(key, rounded(history.number(key, 1e-6) / factor), why)


def nonfinite(history: History) -> Finding | None:
    evidence: list[Text] = []
    steps: list[int] = []
    for name, series in history.matching("", "/nonfinite_updates").items():
        wrong = [(step, int(value)) for step, value in zip(series.steps, series.values, strict=True) if value > 0]
        if wrong:
            steps += [step for step, _ in wrong]
            total, first = sum(number for _, number in wrong), wrong[0][0]
            evidence.append(
                Text(
                    f"{name}: {total} updates in {len(wrong)} steps were skipped, the first in step {first}",
                    f"{name}：{len(wrong)} 步中共跳过 {total} 次更新，首次在第 {first} 步",
                )
            )
    if is_error_about(history, NOT_FINITE):
        last = max(history.steps, default=0) + 1
        steps.append(last)
        evidence.append(ending(history, last))
    if not evidence:
        return None
    dtype = "engine.dtype" if history.is_supervised else f"{ACTOR}.fsdp_config.dtype"
    changes = [
        lower_learning_rate(history),
        Change(grad_clip_key(history), 1.0, Text("clip gradients", "梯度裁剪"), "lower"),
        Change(dtype, "float32", Text("a wider range of numbers", "更大的数值范围")),
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
        Change(tokens, int(history.number(tokens, 16384) / 2), Text("smaller passes", "减小每次前向的 token 数")),
        Change(share, rounded(history.number(share, 0.5) * 0.8), Text("a smaller cache", "减小 KV cache")),
        Change(f"{ACTOR}.fsdp_config.optimizer_offload", True, Text("moments on the host", "优化器状态放到内存")),
    ]
    return MEMORY_ERROR.found((last, last), [ending(history, last)], changes, certain=True)


def is_error_about(history: History, words: str) -> bool:
    end = history.end
    return end is not None and words in str(end.get("message", ""))


def ending(history: History, step: int) -> Text:
    assert history.end is not None  # the caller has looked
    error = f"{history.end.get('status')}: {history.end.get('message', '')}".strip(": ")
    return Text(f"after step {step}: {error}", f"第 {step} 步后：{error}")


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
    evidence = [
        Text(
            f"{name} before clipping: median {first:.3g} at first, {last:.3g} at last; {limit} is {clip:g}",
            f"裁剪前的 {name}：开始时中位数 {first:.3g}，最后 {last:.3g}；{limit} 为 {clip:g}",
        )
    ]
    score = history.series("critic/score/std")
    if len(score):
        evidence.append(
            Text(
                f"critic/score/std: {score.tail.mean:.3g} in the last steps",
                f"critic/score/std：最后几步为 {score.tail.mean:.3g}",
            )
        )
    changes = [
        Change("reward_model.normalize", True, Text("divide rewards by their own spread", "用奖励自身的标准差归一化")),
        lower_learning_rate(history),
        Change(f"{ACTOR}.clip_ratio", 0.1, Text("smaller updates", "减小单次更新幅度"), "lower"),
    ]
    causes = SFT_GRADIENT_CAUSES if history.is_supervised else None
    return GRADIENT.found(span, evidence, changes, certain=len(norm) >= FEWEST_CERTAIN, causes=causes)


def learning_rate_zero(history: History) -> Finding | None:
    rate = history.series("actor/lr", "train/lr")
    zero = [step for step, value in zip(rate.steps, rate.values, strict=True) if value <= LR_ZERO]
    if len(rate) < FEWEST_STEPS or len(zero) <= len(rate) / 2:
        return None
    key = learning_rate_key(history)
    evidence = [
        Text(
            f"the learning rate is 0 in {len(zero)} of {len(rate)} steps: {figures(rate)}",
            f"{len(rate)} 步中有 {len(zero)} 步学习率为 0：{figures(rate)}",
        )
    ]
    usual = 1e-5 if history.is_supervised else 1e-6
    changes = [
        Change(key, usual, Text("the usual rate for all weights", "全参数训练的常用值"), "higher"),
        Change(f"{key.removesuffix('lr')}lr_scheduler_type", "constant", Text("no decay to 0", "不衰减到 0")),
    ]
    return LEARNING_RATE.found((zero[0], zero[-1]), evidence, changes, certain=len(zero) >= FEWEST_CERTAIN)


SFT_LOSS = Fault(
    "loss_not_falling",
    Severity.WARNING,
    Text("The loss of supervised fine-tuning does not fall", "监督微调的损失不下降"),
    (
        Text("the learning rate is too low", "学习率过低"),
        Text("the learning rate is so high that the loss jumps", "学习率过高，损失来回跳动"),
        Text("the answers in the data cannot be predicted from the prompts", "数据中的回答无法由 prompt 预测"),
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
    evidence = [
        Text(
            f"train/loss: {trend.first:.3g} in the first third of the steps, {trend.last:.3g} in the last",
            f"train/loss：前三分之一步平均 {trend.first:.3g}，后三分之一 {trend.last:.3g}",
        )
    ]
    key = learning_rate_key(history)
    grown = trend.rises
    factor, why = (0.2, "five times lower") if grown else (5.0, "five times higher")
    change = Change(
        key,
        rounded(history.number(key, 1e-5) * factor),
        Text(f"a learning rate {why}", f"学习率{'降为五分之一' if grown else '提高到五倍'}"),
    )
    certain = trend.change > max(LOSS_ERRORS * trend.error, LOSS_RISE * abs(trend.first))
    causes = (SFT_LOSS.causes[1], SFT_LOSS.causes[0], SFT_LOSS.causes[2]) if grown else None
    return SFT_LOSS.found(loss.span, evidence, [change], certain=certain, causes=causes)
