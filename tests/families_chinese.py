"""docs/models.zh.md, from the generated docs/models.md: `python -m tests.families_chinese`. Imports no torch."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "models.md"

HEAD = """# 模型族

transformers {version} 的每个因果语言模型族，都用一个随机的小模型试过：把 rloom 对两个不同长度样本算出的 logits \
和 log-prob，与模型自己的前向（每次一个样本）对比。本页由 `make docs` 生成；\
有测试把每一行与计算结果核对。算得不对的组合会在训练\
启动时、读取权重之前被拒绝，并给出原因和替代办法：每次训练都会用同样的方法检查自己的模型。

- **packed**：训练时样本首尾拼接（`use_remove_padding=True`，默认值）。拼接算得不对时，每个样本单独占一行，\
在末尾补齐，并给出提醒。*窗口之内*：前提是最长的样本（`data.max_prompt_length + data.max_response_length`）\
不超过注意力窗口。这些模型族也都在两个 rank 拆分样本 token（`ulysses_sequence_parallel_size=2`）的情况下对比过。
- **padded**：训练时每个样本一行，括号里是算得对的注意力实现：rloom 的，或者 transformers 的 sdpa 或 eager。
- **native**：由 rloom 自己的引擎生成；在 GPU 上用 CUDA graph，各层缓存形状不同时逐步执行。
- **hf**：由 transformers 的 generate() 生成；有些模型族只能把长度相同的 prompt 放在一起。

| 模型族 | packed | padded | native | hf | |
| --- | --- | --- | --- | --- | --- |
"""

WORDS = {
    "–": "–",
    "yes": "是",
    "yes (rloom)": "是（rloom）",
    "yes (sdpa)": "是（sdpa）",
    "yes (eager)": "是（eager）",
    "yes within its window": "窗口之内",
    "graphs": "CUDA graph",
    "graphs within its window": "窗口之内，CUDA graph",
    "step by step": "逐步执行",
    "step by step within its window": "窗口之内，逐步执行",
    "one length at a time": "每次一种长度",
    "refused": "拒绝",
    "no rollout engine is right: refused": "没有算得对的 rollout 引擎：拒绝",
    "not tried: reads bytes in patches": "没有试：按字节块读入",
    "not tried: its picture tower needs the package timm; gemma3n_text is its text part": (
        "没有试：图像部分需要 timm 包；文本部分是 gemma3n_text"
    ),
    "not tried: drafts for another model": "没有试：为另一个模型起草",
    "not tried: writes sound": "没有试：生成声音",
}


def chinese(page: str) -> str:
    version = re.search(r"transformers (\d+\.\d+\.\d+)", page)
    assert version is not None
    rows = [line for line in page.splitlines() if line.startswith("| ")][2:]
    return HEAD.format(version=version[1]) + "".join(f"{translated(row)}\n" for row in rows)


def translated(row: str) -> str:
    family, *cells = row.strip("| ").split(" | ")
    return f"| {' | '.join([family, *(WORDS[cell] for cell in cells)])} |"


if __name__ == "__main__":
    print(chinese(PAGE.read_text(encoding="utf-8")), end="")
