"""`rloom --help`: the commands in groups, exit codes and environment variables, in English or Chinese."""

import difflib
from collections.abc import Iterator, Mapping, Sequence

Lines = Sequence[tuple[str, str, str]]  # (words, meaning in English, in Chinese)

# (title in English, in Chinese) -> commands; a command in no group is listed under the last title
GROUPS: Mapping[tuple[str, str], Sequence[str]] = {
    ("Train", "训练"): ("train", "kit", "openrlhf", "sft", "plan"),
    ("Use a checkpoint", "使用检查点"): ("eval", "export", "chat"),
    ("Look at runs", "查看训练"): ("view", "runs", "compare", "doctor"),
    ("Prepare and check", "准备与检查"): ("config", "data", "reward", "judge"),
    ("More", "其他"): ("completion", "help"),
}
EXIT_CODES: Lines = [
    ("0", "done", "完成"),
    (
        "1",
        "a check found faults, or there is no score; with a traceback: a bug",
        "检查发现问题或没有分数；有 traceback 时为程序错误",
    ),
    (
        "2",
        "an error that you can correct: a key, a file, a model, a reward",
        "可由用户修正的错误：配置、文件、模型、奖励",
    ),
    ("3", "a worker or machine was lost; the same command resumes", "worker 或机器丢失；再次运行同一条命令即可继续"),
    (
        "130",
        "interrupted (ctrl-C, SIGTERM); a run saves its last step first",
        "被中断（Ctrl-C、SIGTERM）；训练会先保存最后一步",
    ),
]
VARIABLES: Lines = [
    ("CUDA_VISIBLE_DEVICES", "the GPUs to use", "使用哪些 GPU"),
    ("HF_ENDPOINT", "a mirror of the model hub", "模型 Hub 的镜像地址"),
    ("HF_TOKEN", "token for gated models of the hub", "Hub 的访问令牌"),
    ("NO_COLOR", "any value: no colours", "设为任意值：不使用颜色"),
    ("RLOOM_SMOKE", "1: two steps with a tiny model and data, to try a command", "1：用极小的模型和数据试运行两步"),
    ("RLOOM_VIEW_TOKEN", "the token of `rloom view`, instead of a new one", "`rloom view` 的令牌，默认每次新生成"),
    (
        "TENSORBOARD_DIR",
        "folder of TensorBoard's events; else runs/PROJECT/EXPERIMENT",
        "TensorBoard 事件目录，默认 runs/PROJECT/EXPERIMENT",
    ),
    ("LANG", "zh_CN: help in Chinese", "zh_CN：中文帮助"),
]
WIDTH = 30


def render_overview(usages: Mapping[str, Lines], chinese: bool) -> str:
    """`usages`: the lines of each command."""
    grouped = {name for names in GROUPS.values() for name in names}
    others = [name for name in usages if name not in grouped]
    lines = ["rloom COMMAND [arguments]", ""]
    for number, (title, names) in enumerate(GROUPS.items(), start=1):
        members = [*others, *names] if number == len(GROUPS) else names
        lines += [f"{title[chinese]}:"]
        lines += [line for name in members for line in table(usages[name], chinese, prefix=f"{name} ")]
        lines += [""]
    lines += ["退出码：" if chinese else "Exit codes:", *table(EXIT_CODES, chinese), ""]
    lines += ["环境变量：" if chinese else "Environment variables:", *table(VARIABLES, chinese), ""]
    return "\n".join([*lines, *(MORE_CHINESE if chinese else MORE)])


MORE = (
    "Example: rloom train algorithm.adv_estimator=grpo actor_rollout_ref.model.path=FOLDER data.train_files=FILE",
    "`rloom help COMMAND` explains a command, `rloom config` the keys, `rloom help metrics` the metrics.",
)
MORE_CHINESE = (
    "示例：rloom train algorithm.adv_estimator=grpo actor_rollout_ref.model.path=FOLDER data.train_files=FILE",
    "`rloom help COMMAND` 解释命令，`rloom config` 解释配置，`rloom help metrics` 解释指标。",
)


def table(lines: Lines, chinese: bool, prefix: str = "") -> Iterator[str]:
    for words, *meanings in lines:
        yield f"  {f'{prefix}{words}'.strip():<{WIDTH}}{meanings[chinese]}"


def suggestion(unknown: str, names: Sequence[str]) -> str:
    found = difflib.get_close_matches(unknown, names, n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""
