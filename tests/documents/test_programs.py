"""The commands of the documents that do not train: run by a shell as they are printed, with a hub on this machine."""

import io
import json
import os
import re
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rloom import __version__
from rloom.cli import openrlhf
from rloom.runs.trackers import make_trackers
from rloom.runs.trackers.base import Start
from tests.documents.printed import ROOT, copied
from tests.documents.shell import PROGRAMS, sets_only
from tests.hub_server import hub_server

STATEMENTS = list(dict.fromkeys(entry.renamed for entry in copied() if entry.language == "bash"))
NOT_RUN = {
    "pip install -e .[test,vllm]": "installs packages; the extras are in pyproject.toml (test_entries.py)",
    "pip install -e .[test,sglang]": "installs packages; the extras are in pyproject.toml (test_entries.py)",
    "pip install wandb": "installs a package",
    "wandb login": "needs an account",
}
TENSORBOARD = "tensorboard --logdir ./runs/"
FLAGS = next(text for text in STATEMENTS if text.startswith("--"))  # document 000 prints the flags alone
LIMIT_S = 300


def is_key(statement: str) -> bool:
    return "." in statement.split("=")[0] and " " not in statement.split("=")[0]


RUN = [
    text
    for text in STATEMENTS
    if not (sets_only(text) or is_key(text) or text in (*NOT_RUN, TENSORBOARD, FLAGS))
    and not any(program in text for program in PROGRAMS)
]


def test_every_command_is_run_here_or_in_another_file_or_listed_with_a_reason() -> None:
    assert len(RUN) == 10
    assert set(NOT_RUN) < set(STATEMENTS)


def parquet(*rows: dict[str, str]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows)), file)
    return file.getvalue()


APPLES = {"question": "Tom has 3 apples and buys 4. How many has he?", "answer": "3 + 4 = 7\n#### 7"}
HALF = {"problem": "What is 1 divided by 2?", "solution": r"It is \boxed{\frac12}.", "answer": r"\frac12"}
HUB = {
    "Qwen/Qwen2.5-0.5B-Instruct": {"config.json": b"{}"},
    "datasets/openai/gsm8k": {f"main/{split}-00000-of-00001.parquet": parquet(APPLES) for split in ("train", "test")},
    "datasets/DigitalLearningGmbH/MATH-lighteval": {"data/train-00000-of-00001.parquet": parquet(HALF)},
    "datasets/HuggingFaceH4/MATH-500": {"test.jsonl": json.dumps(HALF).encode()},
}
EXPECTED = {  # a part of the statement -> what it prints
    "rloom.__version__": rf"^{__version__}$",
    "gsm8k.py": r"data/gsm8k/train.parquet",
    "math.py": r"data/math/test.parquet",
    "check_data.py": r"openai/gsm8k",
    "data_quality_check.py": r"openai/gsm8k",
    "['reward_model']": r"^\{'style': 'rule', 'ground_truth': '7'\}$",
    "['data_source']": r"^openai/gsm8k$",
    "huggingface-cli": r"models--Qwen--Qwen2.5-0.5B-Instruct/snapshots/",
    "ls ": r"^test\.parquet\ntrain\.parquet$",
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    home = tmp_path_factory.mktemp("home")
    command = console_script("huggingface-cli", home / "bin")
    with hub_server(HUB) as hub:
        yield {
            "HOME": str(home), "PATH": f"{command.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HF_ENDPOINT": hub.url, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8",
            "PYTHONWARNINGS": "ignore",
        }  # fmt: skip


def console_script(name: str, folder: Path) -> Path:
    """As an installation writes it. The one of this environment may be older than pyproject.toml."""
    module, _, function = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"][name].partition(
        ":"
    )
    script = folder / name
    folder.mkdir()
    script.write_text(f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    script.chmod(0o755)
    return script


@pytest.mark.parametrize("statement", RUN)
def test_a_program_prints_what_the_document_promises(statement: str, environment: dict[str, str]) -> None:
    """In the order of the documents: the data are prepared first, then looked at."""
    done = subprocess.run(
        ["bash", "-c", statement], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [pattern] = [expected for part, expected in EXPECTED.items() if part in statement]
    assert re.search(pattern, done.stdout, re.M), done.stdout


def test_tensorboard_shows_a_run_where_the_document_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trackers = make_trackers(["tensorboard"], Start(tmp_path / "checkpoints" / "p" / "e", "p", "e", {}))
    for tracker in trackers:
        tracker.log(1, {"critic/score/mean": 0.5})
        tracker.close()
    server = subprocess.Popen(
        ["bash", "-c", f"exec {TENSORBOARD}"], cwd=tmp_path, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )  # fmt: skip
    try:
        assert server.stderr is not None
        address = next(found[0] for line in server.stderr if (found := re.findall(r"http://\S+/", line)))
        tags = json_of(f"{address}data/plugin/scalars/tags")
        # what else tensorboard says of a tag depends on its data server, which some platforms have and others do not
        assert {run: list(found) for run, found in tags.items()} == {"p/e": ["critic/score/mean"]}
        [[_, step, value]] = json_of(f"{address}data/plugin/scalars/scalars?run=p%2Fe&tag=critic%2Fscore%2Fmean")
        assert (step, value) == (1, 0.5)
    finally:
        server.kill()
        server.wait()
        if server.stderr is not None:
            server.stderr.close()


def json_of(url: str) -> Any:
    """As soon as it is not empty: the server reads the files while it answers."""
    end = time.monotonic() + LIMIT_S
    while True:
        with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
            found = json.load(answer)
        if found or time.monotonic() > end:
            return found
        time.sleep(0.1)


def test_the_flags_of_document_000_have_its_plan(capsys: pytest.CaptureFixture[str]) -> None:
    placement = (
        "--actor_num_gpus_per_node 8 --ref_num_gpus_per_node 8 --vllm_num_engines 2 --vllm_tensor_parallel_size 4"
    )
    assert openrlhf.main([*FLAGS.split(), *placement.split(), "--advantage_estimator", "rloo", "--plan"]) == 0
    plan = capsys.readouterr().out
    for figure in ("32 × 4 = 128 samples", "16 prompts, 64 samples each", "8 prompts × 4 = 32 samples"):
        assert figure in plan
    assert "4 accumulation steps" in plan
    assert "128 / 32 = 4" in plan
