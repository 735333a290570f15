"""What a command finds wrong without torch is reported without torch, and the first line comes before it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rloom import __version__
from rloom.config import checks
from rloom.config.load import load_config
from rloom.trainer.main_ppo import train
from tests.architecture.source import ROOT

# each list of arguments as a command: its exit status, what it imported, and what it wrote to stderr
COMMANDS = """
import contextlib, io, json, sys
from rloom.cli import main
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as written, contextlib.redirect_stdout(io.StringIO()):
        status = main(arguments)
    imported = [name for name in ("torch", "transformers", "ray") if name in sys.modules]
    print(json.dumps([status, imported, written.getvalue()]))
"""
NO_RAY = (
    "import importlib.machinery, sys\n"
    "import importlib.util as u; real = u.find_spec\n"
    "u.find_spec = lambda name, *rest: None if name == 'ray' else real(name, *rest)\n"
)
FAULTS = {
    "train data.train_files=absent.parquet": "data error: data.train_files: absent.parquet: no such file",
    "train data.val_files=[embedded,b.jsonl]": "data error: data.val_files: b.jsonl: no such file",
    "train data.train_files=rows.csv": "rows.csv: the name determines the format and must end in .parquet",
    "train data.train_files=empty.jsonl": "data.train_files: empty.jsonl: holds no rows",
    "train data.train_files=empty.parquet": "data.train_files: empty.parquet: holds no rows",
    "train data.train_files=broken.parquet": "broken.parquet: not a readable parquet file",
    "train data.train_files=half.jsonl": "half.jsonl, line 2: not valid JSON (Unterminated string",
    "train data.train_files=latin1.jsonl": "latin1.jsonl, line 1: not UTF-8 text (invalid continuation byte at byte",
    "train data.train_files=good.jsonl data.prompt_key=question": "row 0 (counting from 0): has nothing under",
    "sft data.train_files=good.jsonl data.prompt_key=question": "row 0 (counting from 0): has nothing under",
    "sft data.train_files=empty.jsonl": "data.train_files: empty.jsonl: holds no rows",
    "train custom_reward_function.path=syntax.py": "cannot be loaded: SyntaxError: invalid syntax (syntax.py:1)",
    "train custom_reward_function.path=name.py": "'compute_score': name.py has no such function; it defines other",
    "train custom_reward_function.path=name.py custom_reward_function.name=other": (
        "other(answer: str='a', *, limit) -> float in name.py cannot be called with the keywords data_source"
    ),
    "train trainer.device=cuda": "trainer.device=cuda: this machine shows no GPU (CUDA_VISIBLE_DEVICES=); use auto",
    "train trainer.n_gpus_per_node=4": (
        "trainer.n_gpus_per_node=4: this machine shows no GPU (CUDA_VISIBLE_DEVICES=); trainer.device=cpu trains with "
        "4 processes on the CPU, trainer.n_gpus_per_node=1 with one"
    ),
    "sft trainer.n_gpus_per_node=4": "trainer.n_gpus_per_node=4: this machine shows no GPU",
    "kit data.train_files=absent.json": "data error: data.train_files: absent.json: no such file",
    "train actor_rollout_ref.model.path=./absent": "model.path=./absent: there is no such folder",
    "train actor_rollout_ref.model.path=some/model": "some/model: there is no such folder, and HF_HUB_OFFLINE is set",
    "train critic.model.path=./absent": "critic.model.path=./absent: there is no such folder",
    "train reward_model.path=./absent": "reward_model.path=./absent: there is no such folder",
    "train custom_reward_function.path=absent.py": "reward error: custom_reward_function.path='absent.py'",
    "train actor_rollout_ref.actor.ppo_mini_batch_size=7": "ppo_mini_batch_size=7 (prompts) does not divide",
    "train trainer.default_local_dir=/dev/null/run": "trainer.default_local_dir=/dev/null/run: /dev/null is a file",
    "eval absent": "checkpoint error: absent is not a checkpoint of rloom",
    "export absent folder": "checkpoint error: absent is not a checkpoint of rloom",
}


def run(folder: Path, code: str, *commands: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "RLOOM_"))}
    return subprocess.run(
        [sys.executable, "-c", code, json.dumps([command.split() for command in commands])],
        cwd=folder,
        env=kept | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )


def refusals(folder: Path, code: str, *commands: str) -> list[str]:
    """What each wrote, after a check that it ended with status 2 and without torch."""
    done = run(folder, code, *commands)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(status, imported) for status, imported, _ in found] == [(2, [])] * len(commands)
    assert not any("loading torch" in written for *_, written in found)
    return [written for *_, written in found]


def write_faulty_files(folder: Path) -> None:
    row = json.dumps({"prompt": "1 + 1 =", "data_source": "math_reasoning", "ground_truth": "2"})
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), folder / "empty.parquet")
    for name, content in {
        "rows.csv": b"prompt,answer\n1,2\n",
        "empty.jsonl": b"",
        "broken.parquet": b"PAR1 no parquet PAR1",
        "half.jsonl": f"{row}\n{row[:12]}".encode(),
        "latin1.jsonl": row.replace("1 +", "caf\u00e9 1 +").encode("latin-1"),
        "good.jsonl": row.encode(),
        "syntax.py": b"def compute_score(:\n    pass\n",
        "name.py": b"def other(answer: str = 'a', *, limit) -> float:\n    return 0.0\n",
    }.items():
        (folder / name).write_bytes(content)


def test_errors_that_need_no_torch_come_before_it(tmp_path: Path) -> None:
    write_faulty_files(tmp_path)
    for expected, written in zip(FAULTS.values(), refusals(tmp_path, COMMANDS, *FAULTS), strict=True):
        assert expected in written


def test_workers_of_ray_without_it_are_refused_before_torch(tmp_path: Path) -> None:
    [written] = refusals(tmp_path, NO_RAY + COMMANDS, "train trainer.n_gpus_per_node=2 trainer.backend=ray")
    assert "need Ray, which is not installed" in written


def test_the_first_line_comes_before_torch_and_describes_the_run(tmp_path: Path) -> None:
    """With torch out of reach, the command ends after its first line."""
    without = (
        "import json, sys; sys.modules['torch'] = None; from rloom.cli import main; main(json.loads(sys.argv[1])[0])"
    )
    done = run(tmp_path, without, "train data.train_batch_size=64 data.seed=1")
    first = done.stderr.splitlines()[0]
    assert first.startswith("[") and f"s] rloom {__version__} · gae on embedded · 64 × 8 answers a step" in first
    assert first.endswith("loading torch and transformers ...")
    assert "ModuleNotFoundError" in done.stderr


class Stopped(Exception):
    pass


def test_the_keys_of_a_run_are_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[str] = []
    for name in ("all_faults", "without_effect"):
        rule = getattr(checks, name)
        monkeypatch.setattr(checks, name, lambda *given, name=name, rule=rule: counted.append(name) or rule(*given))

    def stop(*given: object) -> None:
        raise Stopped

    monkeypatch.setattr("rloom.launch.build.read_inputs", stop)  # what comes after all checks of the configuration
    own = tmp_path / "mine.py"
    own.write_text("from rloom.algos.registry import ALGORITHMS\nmine = ALGORITHMS['rloo'].advantage\n")
    for number, estimator in enumerate(("gae", f"{own}:mine")):
        counted.clear()
        folder = f"trainer.default_local_dir={tmp_path}/run{number}"
        with pytest.raises(Stopped):
            train(load_config([folder, "trainer.device=cpu", f"algorithm.adv_estimator={estimator}"]))
        assert sorted(counted) == ["all_faults", "without_effect"]
