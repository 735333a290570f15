"""The help of `rloom openrlhf`: every flag with its default and its meaning."""

from collections.abc import Iterator

from rloom.config.frontends.openrlhf_flags import Flag, refused, sections

ENGLISH = (
    "rloom openrlhf [--flag VALUE ...] [key=value ...]",
    "Trains a policy with the flags of OpenRLHF's train_ppo_ray.py, classic or dotted names, and OpenRLHF's defaults.\n"
    "Every key of `rloom config` can follow as key=value and overrides the flags. The same command:\n"
    "`python3 -m rloom.cli.train_ppo_ray`. Without --pretrain and --prompt_data: the embedded model and data.\n"
    "Without a flag of the placement: one worker with all roles.",
    [
        ("--print", "print the equivalent `rloom train` command and end"),
        ("--plan", "print batches, placement, memory and time, and end; starts nothing"),
        ("-h, --help", "show this help and end"),
    ],
    "default {}",
    "Flags of OpenRLHF without a meaning here; each is refused with its reason:",
)
CHINESE = (
    "rloom openrlhf [--参数 值 ...] [key=value ...]",
    "使用 OpenRLHF train_ppo_ray.py 的参数训练策略，新旧两种参数名均可，默认值与 OpenRLHF 相同。\n"
    "其后可写 `rloom config` 中的任意 key=value，优先级最高。`python3 -m rloom.cli.train_ppo_ray` 是同一命令。\n"
    "不带 --pretrain 和 --prompt_data 时使用内置模型和数据；不带 GPU 分配参数时，一个进程包含所有角色。",
    [
        ("--print", "打印等价的 `rloom train` 命令并退出"),
        ("--plan", "打印批量、GPU 分配、显存和时间并退出；不启动训练"),
        ("-h, --help", "显示本帮助并退出"),
    ],
    "默认 {}",
    "OpenRLHF 中在此没有意义的参数；使用时会报错并说明原因：",
)
EXAMPLE = (
    "  rloom openrlhf --pretrain Qwen/Qwen2.5-0.5B-Instruct --prompt_data train.jsonl --input_key prompt \\",
    "      --label_key answer --advantage_estimator rloo --n_samples_per_prompt 4 --print",
)
COLUMN = 34


def help_text(chinese: bool) -> str:
    usage, about, own, default, without_meaning = CHINESE if chinese else ENGLISH
    lines = [usage, "", about, "", *EXAMPLE, "", *(f"  {name:<{COLUMN}}{meaning}" for name, meaning in own)]
    for section in sections():
        lines += ["", section.chinese if chinese else section.english]
        for flag in section.flags:
            lines += flag_lines(flag, chinese, default)
    return "\n".join([*lines, "", without_meaning, *wrapped([f"--{name}" for name in refused()])])


def flag_lines(flag: Flag, chinese: bool, default: str) -> Iterator[str]:
    names = ", ".join(f"--{name}" for name in flag.names)
    has_default = flag.default is not None and flag.kind != "switch"
    shown = f" ({default.format(default_text(flag))})" if has_default else ""
    yield f"  {names}"
    yield f"      {flag.meaning(chinese)}{shown}"
    if flag.keys:
        yield f"      → {', '.join(flag.keys)}"


def default_text(flag: Flag) -> str:
    return " ".join(map(str, flag.default)) if isinstance(flag.default, list) else str(flag.default)


def wrapped(words: list[str], width: int = 118) -> Iterator[str]:
    line = " "
    for word in words:
        if len(line) + len(word) + 1 > width:
            yield line
            line = " "
        line += f" {word}"
    yield line
