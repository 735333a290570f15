"""How many settings of verl's example scripts rloom accepts.

    python benchmarks/verl_keys.py FOLDER_OF_VERL

Each script of examples/{ppo,grpo,rloo}_trainer runs in bash with a `python3` that only records its arguments, and
without any other program. A setting counts as refused if the configuration names it in an error;
the others are then tried again.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from rloom.config.load import load_config
from rloom.errors import ConfigError

RECORDER = "#!{python}\nimport json, os, sys\nprint(json.dumps(sys.argv[1:]), file=open(os.environ['RECORD'], 'a'))\n"
NOT_TEXT_ON_FSDP = re.compile("megatron|npu|vl|minicpm|glm41v|deepseek671|moonlight|full_hh_rlhf")
REFUSED = "there is no such key|not in this version|not one of|cannot be read|should be"


def recorded_settings(script: Path, root: Path, programs: Path) -> list[str]:
    record = programs / "record"
    record.write_text("")
    command = [
        "bash",
        "-c",
        'command_not_found_handle() { :; }; script="$2"; PATH="$1"; set --; source "$script"',
        "bash",
        str(programs),
        str(script),
    ]
    environment = {**os.environ, "RECORD": str(record), "HOME": "/home/user"}
    subprocess.run(command, cwd=root, env=environment, capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
    calls = [json.loads(line) for line in record.read_text().splitlines()]
    training = next((call for call in calls if "verl.trainer.main_ppo" in call), [])
    return [text for text in training if "=" in text and not text.startswith("-")]


def refused_settings(settings: list[str]) -> set[str]:
    refused: set[str] = set()
    while True:
        left = [text for text in settings if text not in refused]
        try:
            load_config(left)
            return refused
        except ConfigError as error:
            found = {
                text for text in left if re.search(rf"(?<![\w.]){re.escape(key(text))}\b[^\n]*({REFUSED})", str(error))
            }
            if not found:
                raise
            refused |= found


def key(setting: str) -> str:
    return setting.lstrip("+").partition("=")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verl", type=Path)
    root = parser.parse_args().verl.resolve()
    settings: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("python3", "python"):
            Path(folder, name).write_text(RECORDER.format(python=sys.executable))
            Path(folder, name).chmod(0o755)
        for script in sorted(root.glob("examples/*_trainer/*.sh")):
            if script.parent.name in ("ppo_trainer", "grpo_trainer", "rloo_trainer"):
                settings[f"{script.parent.name}/{script.name}"] = recorded_settings(script, root, Path(folder))
    settings = {name: given for name, given in settings.items() if given}
    refused = {name: refused_settings(given) for name, given in settings.items()}
    for title, names in (
        ("all", list(settings)),
        ("text models on FSDP", [name for name in settings if not NOT_TEXT_ON_FSDP.search(name)]),
    ):
        total, lost = sum(len(settings[name]) for name in names), sum(len(refused[name]) for name in names)
        whole = sum(not refused[name] for name in names)
        print(f"{title}: {len(names)} scripts, {total} settings, {total - lost} accepted; {whole} scripts as they are")
    for name, number in Counter(key(text) for found in refused.values() for text in found).most_common():
        print(f"{number:4} {name}")


if __name__ == "__main__":
    main()
