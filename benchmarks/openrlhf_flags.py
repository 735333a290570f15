"""How many flags of OpenRLHF's example commands rloom accepts, and which commands pass the whole check.

    python benchmarks/openrlhf_flags.py FOLDER_OF_OPENRLHF

The scripts and the bash blocks of README.md and docs/ that start train_ppo_ray run in bash with programs that only
record their arguments; not those for images or with gaps (...). A refused flag is named in its command's error.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from rloom.config.checks import check
from rloom.config.derived import declared_needs
from rloom.config.frontends.openrlhf import translate
from rloom.config.frontends.openrlhf_flags import flags
from rloom.config.load import load_config
from rloom.errors import ConfigError

RECORDER = "#!{python}\nimport json, os, sys\nprint(json.dumps(sys.argv[1:]), file=open(os.environ['RECORD'], 'a'))\n"
SHELL = 'command_not_found_handle() { :; }; text="$2"; PATH="$1"; set --; eval "$text"'
PROGRAM = "openrlhf.cli.train_ppo_ray"


def sources(root: Path) -> dict[str, str]:
    found = {path.name: path.read_text() for path in sorted(root.glob("examples/scripts/*.sh"))}
    for page in (root / "README.md", *sorted(root.glob("docs/*.md"))):
        blocks = re.findall(r"```(?:bash|shell|sh)\n(.*?)```", page.read_text(), re.DOTALL)
        found |= {f"{page.name} #{number}": block for number, block in enumerate(blocks, 1)}
    gap = re.compile(r"^ *\.\.\.", re.MULTILINE)
    return {
        name: text for name, text in found.items() if PROGRAM in text and "vlm" not in name and not gap.search(text)
    }


def recorded(text: str, root: Path, programs: Path) -> list[str]:
    """The arguments of train_ppo_ray, also inside a quoted command of srun."""
    (programs / "record").write_text("")
    text = re.sub(r"<([A-Z_]+)>|&>> *\S+", r"\1", text)  # placeholders, and output to a file
    environment = {**os.environ, "RECORD": str(programs / "record"), "HOME": "/home/user"}
    command = ["bash", "-c", SHELL, str(root / "examples/scripts/script.sh"), str(programs), text]
    subprocess.run(command, cwd=root, env=environment, capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
    calls = [" ".join(json.loads(line)).split() for line in (programs / "record").read_text().splitlines()]
    return next(call[call.index(PROGRAM) + 1 :] for call in calls if PROGRAM in call)


def main() -> None:
    root, reasons, sizes, whole = Path(sys.argv[1]).resolve(), Counter[str](), Counter[str](), 0
    with tempfile.TemporaryDirectory() as folder:
        for program in (Path(folder, name) for name in ("python3", "ray", "srun")):
            program.write_text(RECORDER.format(python=sys.executable))
            program.chmod(0o755)
        Path(folder, "dirname").symlink_to("/usr/bin/dirname")
        calls = {name: recorded(text, root, Path(folder)) for name, text in sources(root).items()}
    for name, call in calls.items():
        given, lines = [one[2:] for one in call if one.startswith("--")], list[str]()
        try:
            command = translate(call)
            check(config := load_config(command.overrides, command.values), declared_needs(config))
        except ConfigError as error:
            lines = str(error).splitlines()
        starts = {one: [f"--{n} " for n in (flags()[one].names if one in flags() else [one])] for one in given}
        refused = {o: text for o in given for text in lines if text.replace(":", " ").startswith(tuple(starts[o]))}
        whole, sizes[name] = whole + (not lines), len(given)
        print(f"{name}: {len(given) - len(refused)} of {len(given)} flags", *([] if refused else lines), sep="; ")
        reasons.update(f"{one}: {line}" for one, line in refused.items())
    print(f"{len(calls)} commands, {whole} as they are; {sizes.total()} flags, {reasons.total()} refused")
    print(*(f"{number:4} {reason}" for reason, number in reasons.most_common()), sep="\n")


if __name__ == "__main__":
    main()
