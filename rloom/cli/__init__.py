"""`rloom COMMAND`: the table of commands. Importing this package imports none of them, so that help is immediate."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from rloom import __version__
from rloom.cli.overview import render_overview, suggestion
from rloom.language import is_chinese
from rloom.terminal import discard_output


@dataclass(frozen=True)
class Command:
    module: str  # with `main(arguments) -> exit status`
    usage: Sequence[tuple[str, str, str]]  # (arguments, meaning in English, in Chinese), one for each line of the help


COMMANDS = {
    "train": Command(
        "rloom.trainer.main_ppo",
        [
            (
                "[key=value ...]",
                "train a policy; without keys, the embedded model on the embedded data",
                "训练策略；不带参数时，在内置数据上训练内置模型",
            )
        ],
    ),
    "sft": Command(
        "rloom.trainer.sft_trainer",
        [
            (
                "[key=value ...]",
                "supervised fine-tuning on given answers, the step before `train`",
                "监督微调（SFT），强化学习之前的一步",
            )
        ],
    ),
    "kit": Command(
        "rloom.cli.kit",
        [("[flags] [key=value ...]", "the same with train.sh's flags and files", "同上，使用 train.sh 的参数和文件")],
    ),
    "openrlhf": Command(
        "rloom.cli.openrlhf",
        [
            (
                "[flags] [key=value]",
                "train with the flags of OpenRLHF's train_ppo_ray.py; --plan, --print",
                "使用 OpenRLHF train_ppo_ray.py 的参数训练；另有 --plan、--print",
            )
        ],
    ),
    "plan": Command(
        "rloom.cli.plan",
        [
            (
                "[key=value ...]",
                "batches, placement, memory and time of a configuration, without starting it",
                "不启动训练，给出批量、GPU 分配、显存和时间",
            )
        ],
    ),
    "eval": Command(
        "rloom.cli.evaluate",
        [("CKPT [key=value ...]", "validate a checkpoint and print the metrics", "在验证集上评测检查点")],
    ),
    "export": Command(
        "rloom.cli.export",
        [
            (
                "CKPT DIR [key=value]",
                "write the policy of a checkpoint as a Hugging Face folder",
                "把检查点的策略导出为 Hugging Face 目录",
            )
        ],
    ),
    "chat": Command(
        "rloom.cli.chat",
        [
            (
                "MODEL [key=value]",
                "talk to a checkpoint or a model; --prompt TEXT for one answer",
                "与检查点或模型对话；--prompt TEXT 只回答一次",
            )
        ],
    ),
    "config": Command(
        "rloom.cli.config",
        [
            (
                "[--sft] [key]",
                "print the documented configuration, or explain one key",
                "打印带说明的全部配置，或解释一个配置项",
            )
        ],
    ),
    "data": Command(
        "rloom.cli.data",
        [
            (
                "prepare NAME",
                "write train.parquet and test.parquet of a known data set",
                "生成已知数据集的 train.parquet 和 test.parquet",
            ),
            ("check FILE ...", "check data files before training on them", "训练前检查数据文件"),
            ("show FILE -n 3", "print rows of a data file", "打印数据文件的若干行"),
        ],
    ),
    "reward": Command(
        "rloom.cli.reward",
        [
            (
                "try FILE --source S",
                "score an answer by hand and show what was extracted",
                "手动给一个回答打分，并显示提取到的答案",
            )
        ],
    ),
    "judge": Command(
        "rloom.cli.judge",
        [
            (
                "try --prompt P ...",
                "one call of the API judge: request, answer, score and cost",
                "调用一次 API 评分模型：请求、回答、分数和费用",
            )
        ],
    ),
    "runs": Command(
        "rloom.cli.runs",
        [
            (
                "[DIR]",
                "list runs with state, step, reward and accuracy",
                "列出各次训练的状态、步数、奖励和准确率",
            )
        ],
    ),
    "compare": Command(
        "rloom.cli.compare",
        [
            (
                "RUN RUN ...",
                "compare runs: configuration, accuracy, metrics at equal steps",
                "比较多次训练：配置、准确率、相同步数的指标",
            )
        ],
    ),
    "doctor": Command(
        "rloom.cli.doctor",
        [
            (
                "RUN ...",
                "what is wrong with a run, why, and which keys to change",
                "诊断一次训练：问题、原因和应修改的配置",
            ),
            (
                "env",
                "what is installed, what works here, and what to install for the rest",
                "检查已安装的依赖和本机可用的功能",
            ),
        ],
    ),
    "view": Command(
        "rloom.cli.view",
        [
            (
                "RUN ...",
                "runs in the browser: curves, answers token by token, validations; also while they run",
                "在浏览器中查看训练：曲线、逐 token 的回答、验证结果；训练进行中也可查看",
            )
        ],
    ),
    "completion": Command(
        "rloom.cli.completion",
        [("bash|zsh|fish", "print a script that completes commands, flags and keys", "打印 shell 自动补全脚本")],
    ),
    "help": Command(
        "rloom.cli.help",
        [("COMMAND|metrics", "explain a command, or the names of the metrics", "解释一个命令，或各指标的名称")],
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        status = run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `rloom --help | head`
        discard_output()
        return 0


def run(given: list[str]) -> int:
    if not given or given[0] in ("-h", "--help") or given == ["help"]:
        print(usage(is_chinese(os.environ)))
        return 0
    if given[0] in ("-V", "--version"):
        print(f"rloom {__version__}")
        return 0
    if given[0] not in COMMANDS:
        print(f"rloom: there is no command {given[0]!r}{suggestion(given[0], list(COMMANDS))}", file=sys.stderr)
        print("`rloom --help` lists the commands.", file=sys.stderr)
        return 2
    status = import_module(COMMANDS[given[0]].module).main(given[1:])
    assert isinstance(status, int)
    return status


def usage(chinese: bool) -> str:
    return render_overview({name: command.usage for name, command in COMMANDS.items()}, chinese)
