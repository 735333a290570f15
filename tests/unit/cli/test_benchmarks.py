"""The benchmarks' arithmetic, and each of them once in small."""

import importlib
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rloom.rollout.base import Request, Sampling

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SMALL = ["--shape", "tiny", "--prompt_tokens", "8", "--new_tokens", "6", "--repeat", "1", "--answers", "2"]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    return importlib.import_module


@pytest.fixture
def run(load: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A script with these arguments, on the CPU; what it printed."""

    def run_script(script: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        runpy.run_path(str(BENCHMARKS / script), run_name="__main__")
        return capsys.readouterr().out

    return run_script


def test_the_shapes_have_as_many_parameters_as_their_models(load: Any) -> None:
    shapes = load("shapes")
    for shape in shapes.SHAPES.values():
        model = shapes.random_model(shape, torch.device("meta"), torch.bfloat16, "sdpa")
        assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_the_floor_is_the_reading_of_weights_and_cache_plus_the_products(load: Any) -> None:
    shapes = load("shapes")
    # one layer, hidden 4, one head, vocabulary 10: 2·16 + 2·16 of attention, 3·4·8, norms 8 + 4, embedding 40 = 212
    shape = shapes.Shape("llama", 4, 8, 1, 1, 1, 10, tied=True)
    assert (shape.parameters, shape.kv_bytes) == (212, 16)
    rates = shapes.Rates(bandwidth=8.0, matrix=2.0)
    # answers of 1 and 3 tokens after 5: 3 steps read 424 bytes of weights each; 5 + (5 + 6 + 7) tokens of cache
    # are read at 16 bytes; 4 tokens cost 424 operations each
    assert shapes.decode_floor_seconds(shape, 5, [1, 3], rates) == (3 * 424 + 23 * 16) / 8 + 4 * 424 / 2
    assert shapes.prefill_floor_seconds(shape, 5, 2, rates) == 10 * 424 / 2
    assert shapes.training_flops(shape, 7) == 6 * 212 * 7


def test_the_floor_of_the_half_billion_shape_is_near_350_000_tokens_a_second(load: Any) -> None:
    shapes = load("shapes")
    shape, rates = shapes.SHAPES["qwen2.5-0.5b"], shapes.Rates()
    floor_s = shapes.decode_floor_seconds(shape, 128, [512] * 1024, rates)
    floor_s += shapes.prefill_floor_seconds(shape, 128, 128, rates)
    assert 340_000 < 1024 * 512 / floor_s < 370_000


def test_a_profile_tells_busy_from_idle(load: Any) -> None:
    profiling = load("profiling")
    # two kernels overlap for 10 us, then nothing runs for 50
    spans = [profiling.Span("sm90_gemm", 0, 30), profiling.Span("flash_fwd", 20, 30), profiling.Span("add", 100, 10)]
    assert profiling.busy_us(spans) == 60
    text = profiling.summary(spans, wall_s=120e-6)
    assert "| matmul | 0.03 | 25.0% |" in text and "| idle | 0.06 | 50.0% |" in text
    assert profiling.kind_of("triton_red_fused_linear_add") == profiling.OTHERS


def test_an_operator_is_charged_without_those_it_calls(load: Any) -> None:
    profiling = load("profiling")
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::linear", "ts": 0, "dur": 10, "tid": 1},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 2, "dur": 7, "tid": 1},
        {"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 10, "dur": 4, "tid": 1},
    ]
    found = {span.name: span.length_us for span in profiling.read_spans(events)}
    assert found == {"aten::linear": 3, "aten::mm": 7, "aten::add": 4}
    on_device = {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 3, "dur": 5}
    assert [span.name for span in profiling.read_spans([*events, on_device])] == ["gemm"]


def test_generate_of_transformers_notes_the_log_prob_of_every_token_it_draws(load: Any) -> None:
    shapes, peer = load("shapes"), load("hf_peer")
    engine = peer.HfGenerate(shapes.SHAPES["tiny"], torch.device("cpu"), torch.float32)
    prompts = shapes.random_prompts(shapes.SHAPES["tiny"], 2, 5, seed=0)
    requests = [Request(tokens, Sampling(4, ignore_eos=True), 0) for tokens in prompts]
    for index, completion in engine.generate(requests):
        tokens = torch.cat([torch.tensor(requests[index].tokens), completion.tokens_L])
        expected = engine.model(tokens[None]).logits[0, 4:-1].log_softmax(-1).gather(1, completion.tokens_L[:, None])
        assert torch.allclose(completion.logprobs_L, expected.squeeze(1), atol=1e-5)


def test_the_report_of_gsm8k_tells_arithmetic_from_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent / "recipes" / "gsm8k"))
    report = importlib.import_module("report")
    answers = ["3 + 4 = 7\n#### 7", "It is 7", "7 apples in 2 days", "#### 8"]
    rows = [{"data_source": "openai/gsm8k", "output": answer, "gts": "7"} for answer in answers]
    assert report.accuracies(rows) == {"flexible": 50.0, "strict": 25.0, "anywhere": 75.0, "marked": 50.0}


@pytest.mark.slow
def test_the_rollout_benchmark_runs_on_a_cpu(run: Callable[..., str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.json.gz"
    printed = run("rollout.py", *SMALL, "--sequences", "8", "--spread", "2", "--skewed", "2", "--profile", str(trace))
    assert (
        "| native | all 6 | 48 |" in printed and "| hf | all 6 | 48 |" in printed and "| native | 2 to 6 |" in printed
    )
    assert "| native | 2 to 6, most short |" in printed
    assert trace.is_file()


def test_skewed_lengths_are_many_short_ones_and_few_long_ones(load: Any) -> None:
    lengths = sorted(load("shapes").skewed_lengths(1000, 100, 8192, seed=0))
    assert 100 <= lengths[0] < 110 and 7500 < lengths[-1] <= 8192
    assert 800 < lengths[500] < 1020  # the median is the geometric mean of the ends, 905
    assert 1700 < sum(lengths) / 1000 < 2000  # 8,092 / ln(81.92) = 1,837


@pytest.mark.slow
def test_the_training_benchmark_runs_on_a_cpu(run: Callable[..., str]) -> None:
    small = [argument for argument in SMALL if argument not in ("--answers", "2")]
    printed = run("training.py", *small, "--samples", "4", "--tokens_per_pass", "28")
    assert "| rloom | 28 |" in printed and "| hf | 28 |" in printed


@pytest.mark.slow
def test_the_reward_model_benchmark_gets_equal_scores_in_every_way(run: Callable[..., str]) -> None:
    few = ["--shape", "tiny", "--conversations", "6", "--shortest", "4", "--longest", "12", "--tokens_per_pass", "24"]
    rows = [line for line in run("reward_model.py", *few, "--repeat", "1").splitlines() if line.startswith("| ")][2:]
    assert [row.split(" | ")[0] for row in rows] == [
        "| rloom, packed",
        "| transformers, padded, sorted by length",
        "| transformers, padded, as they come",
    ]
    assert all(float(row.strip("| ").split(" | ")[-1]) < 1e-4 for row in rows)


@pytest.mark.slow
def test_the_step_benchmark_runs_on_a_cpu(run: Callable[..., str]) -> None:
    printed = run("step.py", *SMALL, "--prompts", "3")
    assert "| step | generation | reward and pack | advantages | update | weights | dump | total |" in printed
    (row,) = [line for line in printed.splitlines() if line.startswith("| 1 |")]
    *stages, total = [float(cell) for cell in row.strip("| ").split(" | ")[1:]]
    assert sum(stages) == pytest.approx(total, abs=0.03) and total > 0  # each is rounded to a hundredth
    gap = float(printed.split("training/rollout_logprobs_diff_mean ")[1].split(",")[0])
    assert gap < 1e-5  # float32: what was sampled is what is trained on


HERE = [*BENCHMARKS.glob("*.py"), *(BENCHMARKS / "peers" / f"{name}.py" for name in ("compare", "run_rloom"))]


@pytest.mark.parametrize("script", sorted(file.stem for file in HERE))
def test_every_script_imports_names_that_exist(load: Any, script: str) -> None:
    assert load(script)


def test_the_gae_benchmark_equals_its_loop(run: Callable[..., str]) -> None:
    printed = run("gae.py", "--sequences", "4", "--tokens", "16")
    assert float(printed.rpartition("largest difference ")[2]) < 1e-5


@pytest.mark.long
def test_the_reward_benchmark_runs_in_small() -> None:
    command = [sys.executable, str(BENCHMARKS / "rewards.py"), "--samples", "20", "--workers", "1"]
    command += ["--sources", "openai/gsm8k"]
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    lines = done.stdout.splitlines()
    assert lines[0] == "openai/gsm8k, 20 answers, 1 workers"
    assert [line.split("samples/s")[0].rsplit(None, 1)[0].strip() for line in lines[1:]] == [
        "the queue, first time",
        "the queue, again",
        "a process pool, a call per sample",
        "a loop in this process",
    ]


def small_work(load: Any, **changed: Any) -> Any:
    sizes = {"prompts": 2, "answers": 2, "prompt_tokens": 3, "new_tokens": 6, "steps": 1, "rows": 2}
    kept = {"kind": "step", "model": "", "shape": "tiny-qwen3", "shortest": None, "skewed": False}
    return load("work").Work(**{**kept, **sizes, "weights": "float32", "on_gpu": False, **changed})


def test_the_reward_of_the_comparison_is_the_parity_of_the_ids(load: Any) -> None:
    parity = load("parity")
    assert parity.as_text([2, 100, 511]) == "2 100 511"
    assert parity.compute_score("", "2 100 511", "") == 1.0  # 613
    assert parity.compute_score("", "2 <end> 100", "") == 0.0


def test_a_result_of_other_work_is_refused(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = load("work")
    monkeypatch.setattr(sys, "argv", ["run", "job", str(tmp_path / "result.json")])
    result = shared.Result(versions={}, settings={}, seconds=[2.0], warm_up_s=1.0, tokens=24)
    with pytest.raises(SystemExit, match="the answers have 23 tokens, the work has 24"):
        shared.write_result(result, small_work(load), [6, 6, 6, 5])
    with pytest.raises(SystemExit, match="1 steps were measured, not 2"):
        shared.write_result(result, small_work(load, steps=2), [6] * 4)
    shared.write_result(result, small_work(load), [6] * 4)
    assert (tmp_path / "result.json").is_file() and result.speed == 12.0


def test_the_model_folder_of_the_comparison_encodes_each_id_to_itself_and_never_ends(load: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    load("compare").write_model(tmp_path, "tiny-qwen3", torch.float32)
    tokenizer, model = AutoTokenizer.from_pretrained(tmp_path), AutoModelForCausalLM.from_pretrained(tmp_path)
    assert tokenizer("2 10 100 511").input_ids == [2, 10, 100, 511] and tokenizer.decode([2, 100]) == "2 100"
    assert tokenizer.eos_token_id == 512 == model.config.vocab_size  # no id that can be sampled
    assert model.config.eos_token_id is None and model.generation_config.eos_token_id is None


def test_every_requirement_of_a_peer_is_pinned(load: Any) -> None:
    for peer in load("compare").PEERS.values():
        for name in {peer.requirements, peer.requirements_cpu} - {None}:
            lines = (BENCHMARKS / "peers" / "requirements" / f"{name}.txt").read_text().splitlines()
            assert all("==" in line for line in lines if not line.startswith("#")), name


def test_the_comparison_is_started_by_its_documented_command() -> None:
    command = [sys.executable, str(BENCHMARKS / "peers" / "compare.py"), "--help"]
    environment = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)}  # rloom is installed, the benchmarks are not
    subprocess.run(command, capture_output=True, check=True, env=environment)


ECHO = """
import json, os, sys
known = {"seconds": [1.0], "warm_up_s": 1.0, "tokens": 1, "versions": {}}
open(sys.argv[2], "w").write(json.dumps(known | {"settings": {"path": os.environ["PYTHONPATH"]}}))
"""


def test_installed_peers_see_the_folders_of_pythonpath_and_peers_of_environments_do_not(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compare = load("compare")
    (tmp_path / "run_trl.py").write_text(ECHO)
    python = tmp_path / "trl-cpu" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (tmp_path / "trl-cpu" / "finished").touch()
    monkeypatch.setattr(compare, "HERE", tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/packages")
    work = small_work(load)
    paths = [compare.run("trl", work, venvs, tmp_path)[0].settings["path"] for venvs in (None, tmp_path)]
    assert paths == [f"{BENCHMARKS}{os.pathsep}/packages", str(BENCHMARKS)]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["step", "rollout"])
def test_rloom_does_the_work_of_the_comparison(load: Any, tmp_path: Path, kind: str) -> None:
    compare = load("compare")
    compare.write_model(tmp_path / "model", "tiny-qwen3", torch.float32)
    work = small_work(load, kind=kind, model=str(tmp_path / "model"), shortest=3 if kind == "rollout" else None)
    result, _ = compare.run("rloom", work, tmp_path, tmp_path)
    assert result.tokens == sum(work.lengths()) and len(result.seconds) == 1
    assert len(result.grad_norm) == (2 if kind == "step" else 0)
