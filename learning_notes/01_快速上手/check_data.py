"""检查数据文件的格式：python learning_notes/01_快速上手/check_data.py ~/data/gsm8k/train.parquet

与 `rloom data check` 相同：报告行数、数据来源、错误和警告（带行号）；有错误时退出码为 1。
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rloom.cli.data import main

if __name__ == "__main__":
    print("== 数据格式检查 ==", flush=True)
    sys.exit(main(["check", *sys.argv[1:]]))
