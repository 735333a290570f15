"""How many of verl's example scripts rloom accepts as they are.

    python benchmarks/verl_keys.py FOLDER_OF_VERL

Each script of examples/ runs in bash with a `python3` that only records its arguments, and without any other program.
The arguments of main_ppo are then read and checked as `rloom train` does before it reads data and models, as on a
machine of a Ray cluster. Refused scripts are listed with their errors, then the notices about accepted ones.
"""

import argparse
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rloom.config.checks import check
from rloom.config.load import load_config
from rloom.console import split_hydra_flags
from rloom.errors import ConfigError
from rloom.launch.build import resolved_needs

RECORDER = "#!{python}\nimport json, os, sys\nprint(json.dumps(sys.argv[1:]), file=open(os.environ['RECORD'], 'a'))\n"
GROUPS = {
    "all": "",
    "examples/{ppo,grpo,rloo}_trainer": r"^examples/(ppo|grpo|rloo)_trainer/",
    "of these, text models on FSDP": r"^examples/(ppo|grpo|rloo)_trainer/"
    "(?!.*(megatron|npu|vl|minicpm|glm41v|deepseek671|moonlight))",
}


def recorded_arguments(script: Path, root: Path, programs: Path) -> list[str]:
    """Of the script's first call of main_ppo; [] if it has none."""
    record = programs / "record"
    record.write_text("")
    source = 'command_not_found_handle() { :; }; script="$2"; PATH="$1"; set --; source "$script"'
    command = ["bash", "-c", source, "bash", str(programs), str(script)]
    environment = {**os.environ, "RECORD": str(record), "HOME": "/home/user", "PWD": str(root)}
    subprocess.run(command, cwd=root, env=environment, capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
    calls = [json.loads(line) for line in record.read_text().splitlines()]
    found = next((call for call in calls if "verl.trainer.main_ppo" in call), [])
    return found[found.index("verl.trainer.main_ppo") + 1 :] if found else []


def notices(arguments: Sequence[str]) -> list[str]:
    """ConfigError: what rloom refuses."""
    overrides, source = split_hydra_flags(arguments)
    config = load_config(overrides, **source)
    return check(config, resolved_needs(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verl", type=Path)
    root = parser.parse_args().verl.resolve()
    os.environ["RAY_ADDRESS"] = "auto"  # scripts of several machines are submitted to a cluster
    logging.disable(logging.WARNING)
    os.chdir(root)
    refused: dict[str, str] = {}
    accepted: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("python3", "python"):
            Path(folder, name).write_text(RECORDER.format(python=sys.executable))
            Path(folder, name).chmod(0o755)
        for script in sorted(root.glob("examples/**/*.sh")):
            if arguments := recorded_arguments(script, root, Path(folder)):
                name = str(script.relative_to(root))
                try:
                    accepted[name] = notices(arguments)
                except ConfigError as error:
                    refused[name] = str(error)
    for name, reason in refused.items():
        print(f"{name}\n    " + reason.replace("\n", "\n    "))
    for text, number in Counter(text for found in accepted.values() for text in found).most_common():
        print(f"{number:4} {text}")
    for title, pattern in GROUPS.items():
        whole, part = ([name for name in names if re.search(pattern, name)] for names in (accepted, refused))
        print(f"{title}: {len(whole)} of {len(whole) + len(part)} scripts accepted as they are")


if __name__ == "__main__":
    main()
