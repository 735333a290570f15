"""Run directories for tests of `rloom view`, written by the run's own writers, with numbers that tests know.

`write_run`: 8 steps of 6 prompts with 4 answers each, and validations of 6 prompts at steps 0, 4 and 8.

    group g of step s     row (6 s + g) % 12 of the data; even rows are `sums`, odd ones `colours`
    scores                the first (g + s) % 5 of the 4 answers have 1.0, the others 0.0
    group 5               the score of the last answer failed
    group 2               two turns of the policy, a tool's output between them
    colours               a judge's words, and the parts of the score
"""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from rloom.runs.dumps.index import FOLDER, INDEX, SCHEMA, TOKEN_COLUMNS
from rloom.runs.dumps.writer import DumpWriter
from rloom.runs.records import EVENTS_FILE, METRICS_FILE, EventLog, append_metrics

START = 1_790_000_000.0  # seconds since 1970
STEP_S = 40.0
STEPS, GROUPS, ANSWERS, ROWS = 8, 6, 4, 12
VALIDATED = (0, 4, 8)
TOOL_OUTPUT = '\n[tool] {"result": 42}\n'
STAGES = {"gen": (0.0, 20.0), "reward": (20.0, 4.0), "old_log_prob": (24.0, 3.0), "update_actor": (28.0, 10.0)}

# row of the data -> accuracies of the two answers at steps 0, 4 and 8. None: the score failed.
VALIDATION: Mapping[int, Sequence[tuple[float | None, float | None]]] = {
    0: [(0.0, 0.0), (0.0, 1.0), (1.0, 1.0)],  # fixed
    1: [(1.0, 1.0), (1.0, 1.0), (0.0, 0.0)],  # broken
    2: [(1.0, 1.0), (1.0, 1.0), (1.0, 1.0)],  # right
    3: [(0.0, 0.0), (0.0, 0.0), (0.0, 1.0)],  # wrong: half is not more than half
    4: [(0.0, None), (1.0, 1.0), (1.0, None)],  # fixed, of the scores that did not fail
    5: [(1.0, 1.0), (1.0, 1.0), (None, None)],  # without a score at last
}

HOSTILE = (
    "<script>window.hacked = 1</script>",
    "</pre></textarea></style></script><img src=x onerror='window.hacked = 2'>",
    '<a href="javascript:window.hacked=3">click</a> [click](javascript:window.hacked=3)',
    '"><svg/onload=window.hacked=4> & &lt;b&gt; &amp;amp; {{7*7}} ${7*7} `x`',
    "\x1b[31mred\x1b[0m \x07 \x00 \x08\x08 \r\n\t end",
    "left \u202egnirts desrever\u202c \u2066isolated\u2069 \u200b\u200d\ufeff right",
    "W" * 20_000,
    "",
    "   \n\n\n   ",
    "答案是四十二。\u2028下一行\u2029段落",
    "👩‍👩‍👧‍👦 🇨🇳 e\u0301 \ud83d",
    "../../../../etc/passwd %2e%2e%2f ' OR 1=1 --",
)

QUESTION = "How many\nare left?"
# prompts with the templates of Qwen, Llama, Gemma, Mistral and DeepSeek, the last after an earlier turn
TEMPLATES = (
    f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n",
    "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n"
    f"{QUESTION}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    f"<bos><start_of_turn>user\n{QUESTION}<end_of_turn>\n<start_of_turn>model\n",
    f"<s>[INST] {QUESTION} [/INST]",
    f"<｜User｜>Hello<｜Assistant｜>Yes?<｜end▁of▁sentence｜><｜User｜>{QUESTION}<｜Assistant｜>",
)
START_RECORD = {
    "command": "rloom train algorithm.adv_estimator=grpo",
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "versions": {"python": "3.12.1", "torch": "2.13.0"},
}
NOTICE = "data.seed has no effect"

CONFIG: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo", "lam": 0.95, "gamma": 1.0},
    "actor_rollout_ref": {"model": {"path": "Qwen/Qwen2-0.5B-Instruct"}, "rollout": {"n": ANSWERS}},
    "data": {"train_batch_size": GROUPS},
    "trainer": {"project_name": "sums", "experiment_name": "grpo", "total_epochs": 1, "logger": ["console"]},
}


def write_run(
    folder: Path, *, steps: int = STEPS, status: str | None = "finished", config: Mapping[str, Any] = CONFIG
) -> Path:
    """`status`: of its `end` event; None: it has none, and this process is the one that runs."""
    run = GrowingRun(folder, total_steps=STEPS, config=config)
    for step in range(1, steps + 1):
        run.write_step(step)
    run.close(status)
    return folder


def write_killed_run(folder: Path) -> Path:
    """Its process is gone and wrote no `end`; the last lines of its files are cut short."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    run = GrowingRun(folder, total_steps=STEPS, process=ended.pid)
    for step in (1, 2, 3):
        run.write_step(step)
    run.close(None)
    cut_last_line(folder)
    return folder


def cut_last_line(folder: Path) -> None:
    """A process was killed while it wrote."""
    for name, text in (
        (EVENTS_FILE, '{"time": 1790000999.0, "event": "step", "step": 99, "metr'),
        (METRICS_FILE, '{"step": 99, "critic/sc'),
        (f"{FOLDER}/{INDEX}", '{"kind":"train","step":99,"byt'),
    ):
        with (folder / name).open("a", encoding="utf-8") as out:
            out.write(text)


def write_hostile_run(folder: Path) -> Path:
    """Every text that a page shows of a run is one that does harm where it is taken for markup."""
    config = {**CONFIG, "custom": {f"<b>{i}</b>": text.replace("\ud83d", "?") for i, text in enumerate(HOSTILE)}}
    run = GrowingRun(folder, total_steps=1, config=config)
    rows = [
        row
        for group, prompt in enumerate(HOSTILE)
        for row in answer_rows(
            group, group, prompt, [1.0, 0.0, None, 0.5], [HOSTILE[(group + i) % len(HOSTILE)] for i in range(ANSWERS)]
        )
    ]
    for place, row in enumerate(rows):
        text = HOSTILE[place % len(HOSTILE)]
        row |= {"data_source": HOSTILE[place // ANSWERS % 4], "ground_truth": text, "prediction": text, "detail": text}
        row |= {"parts": json.dumps({text: 1.0}), "reason": text if row["score"] is None else None}
    run.dumps.write("train", 1, partial(table, rows))
    for step in (0, 1):
        run.dumps.write("validation", step, partial(table, [{**row, **NO_TRAINING} for row in rows]))
    run.events.write("warning", time=START, step=1, kind="<i>kind</i>", message=HOSTILE[1])
    run.log_step(1, {"critic/score/mean": 0.5, "reward/<b>part</b>/mean": 1.0})
    run.log_validation(1, {"val-core/<img src=x onerror=alert(1)>/acc/mean@4": 0.5})
    run.close("<script>Error</script>")
    return folder


def write_templated_run(folder: Path) -> Path:
    """One step, of prompts with chat templates, a right and a wrong answer to each."""
    run = GrowingRun(folder, total_steps=1)
    rows = [
        {**row, "parts": json.dumps({"acc": row["score"], "format": 0.5})}
        for group, prompt in enumerate(TEMPLATES)
        for row in answer_rows(group, 2 * group, prompt, [1.0, 0.0], ["#### 4", "#### 5"])
    ]
    run.dumps.write("train", 1, partial(table, rows))
    run.log_step(1, {"critic/score/mean": 0.5})
    run.close()
    return folder


class GrowingRun:
    """A run that is written step by step, by hand or, as a context manager, by a thread until it is left."""

    def __init__(
        self,
        folder: Path,
        *,
        total_steps: int,
        config: Mapping[str, Any] = CONFIG,
        after: int = 0,
        process: int | None = None,
        interval_s: float = 0.5,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.interval_s, self.total_steps = folder, interval_s, total_steps
        (folder / "config.yaml").write_text(yaml.safe_dump(dict(config), allow_unicode=True), encoding="utf-8")
        self.events = EventLog(folder / EVENTS_FILE)
        self.dumps = DumpWriter(
            folder / FOLDER, limit=float("inf"), seed=1, report=_fail, save_tokenizer=_save_tokenizer
        )
        self.last_step = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._grow, name="growing-run")
        self.begin(after, process)

    def begin(self, after: int, process: int | None = None) -> None:
        """A process starts or resumes."""
        self.events.write(
            "run",
            time=START + STEP_S * after,
            step=after,
            total_steps=self.total_steps,
            host=socket.gethostname(),
            pid=os.getpid() if process is None else process,
            **START_RECORD,
        )
        self.events.write("warning", time=START + STEP_S * after, step=after, kind="notice", message=NOTICE)
        self.dumps.remove_after(after if after else -1)
        self.last_step = after

    def write_step(self, step: int) -> None:
        if step == 1:
            self.write_validation(0)
        begin = START + STEP_S * (step - 1)
        for stage, (start, seconds) in STAGES.items():
            self.events.write("stage_begin", time=begin + start, step=step, stage=stage)
            if stage == "gen":  # a stage within a stage
                self.events.write("stage_begin", time=begin + 1.0, step=step, stage="sync_weights")
                self.events.write("stage_end", time=begin + 3.0, step=step, stage="sync_weights", seconds=2.0)
            self.events.write("stage_end", time=begin + start + seconds, step=step, stage=stage, seconds=seconds)
        rows = train_rows(step)
        self.dumps.write("train", step, partial(table, rows))
        self.log_step(step, step_metrics(step, rows))
        if step in VALIDATED:
            self.write_validation(step)
        self.last_step = step

    def write_validation(self, step: int) -> None:
        rows = validation_rows(step)
        self.dumps.write("validation", step, partial(table, rows))
        metrics = {}
        for source in ("sums", "colours"):
            known = [r["accuracy"] for r in rows if r["data_source"] == source and r["accuracy"] is not None]
            metrics[f"val-core/{source}/acc/mean@2"] = sum(known) / len(known)
        self.log_validation(step, metrics)

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.events.write("step", time=START + STEP_S * step - 1.0, step=step, metrics=metrics)
        append_metrics(self.folder / METRICS_FILE, step, metrics)

    def log_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.events.write("validation", time=START + STEP_S * step, step=step, metrics=metrics)
        append_metrics(self.folder / METRICS_FILE, step, metrics)

    def close(self, status: str | None = "finished") -> None:
        self.dumps.close()
        if status is not None:
            self.events.write("end", time=START + STEP_S * self.last_step, status=status)

    def __enter__(self) -> "GrowingRun":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.close()

    def _grow(self) -> None:
        while self.last_step < self.total_steps and not self._stop.wait(self.interval_s):
            self.write_step(self.last_step + 1)


@dataclass(frozen=True)
class Spoken:
    """What follows a prompt."""

    tokens: list[int]
    turns: list[int]  # start and stop of each


NO_TRAINING = {"advantages": None, "entropy": None, "ratio": None}


def train_rows(step: int) -> list[dict[str, Any]]:
    rows = []
    for group in range(GROUPS):
        index = (GROUPS * step + group) % ROWS
        scores: list[float | None] = [float(place < (group + step) % 5) for place in range(ANSWERS)]
        texts = [answer_text(index, step, place, score) for place, score in enumerate(scores)]
        if group == 5:
            scores[-1] = None
        turns = [[text, "So it is 42."] for text in texts] if group == 2 else [[text] for text in texts]
        rows += answer_rows(group, index, prompt_text(index), scores, texts, turns, version=step - 1)
    return rows


def validation_rows(step: int) -> list[dict[str, Any]]:
    rows = []
    for index, by_step in VALIDATION.items():
        scores = by_step[VALIDATED.index(step)] if step in VALIDATED else by_step[-1]
        texts = [answer_text(index, step, place, score) for place, score in enumerate(scores)]
        rows += answer_rows(index, index, prompt_text(index), scores, texts, version=step)
    return [{**row, **NO_TRAINING} for row in rows]


def answer_rows(
    group: int,
    index: int,
    prompt: str,
    scores: Sequence[float | None],
    texts: Sequence[str],
    turns: Sequence[Sequence[str]] | None = None,
    version: int = 0,
) -> list[dict[str, Any]]:
    """`turns`: texts of the turns of each answer; by default its text is the only one."""
    rows = []
    for place, (score, text) in enumerate(zip(scores, texts, strict=True)):
        spoken = speak(turns[place] if turns else [text])
        judged = index % 2 == 1
        rows.append(
            {
                "group": group,
                "index": index,
                "data_source": "colours" if judged else "sums",
                "prompt": prompt,
                "ground_truth": "blue" if judged else str(index),
                "output": text,
                "score": score,
                "accuracy": score,
                "parts": json.dumps({"judge": score, "format": 0.5}) if judged and score is not None else None,
                "prediction": None if score is None or judged else str(index),
                "reason": "judge: no answer within 30 s" if score is None else None,
                "detail": f"The judge gives {score}: it names the colour." if judged and score is not None else None,
                "finished": place != 1,
                "version": version,
                "length": sum(stop - start for start, stop in zip(*[iter(spoken.turns)] * 2, strict=True)),
                "turns": spoken.turns,
                "tokens": spoken.tokens,
                "logprobs": [-(i % 8) / 4 for i in range(len(spoken.tokens))],
                "advantages": [0.0 if score is None else score - 0.5] * len(spoken.tokens),
                "entropy": [(i % 4) / 2 for i in range(len(spoken.tokens))],
                "ratio": [1.0 + (i % 3 - 1) / 8 for i in range(len(spoken.tokens))],
            }
        )
    return rows


def speak(texts: Sequence[str]) -> Spoken:
    tokens, turns = [], []
    for place, text in enumerate(texts):
        if place:
            tokens += tokenizer().encode(TOOL_OUTPUT).ids
        turns += [len(tokens)]
        tokens += tokenizer().encode(text.encode("utf-8", "replace").decode()).ids
        turns += [len(tokens)]
    return Spoken(tokens, turns)


def table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Half of a surrogate pair becomes `?`, as in `rloom.runs.dumps.writer`."""
    columns = [[_whole(row[field.name]) for row in rows] for field in SCHEMA]
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)


def step_metrics(step: int, rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    scores = [row["score"] for row in rows if row["score"] is not None]
    timings = {f"timing_s/{stage}": seconds for stage, (_, seconds) in STAGES.items()}
    return {
        "critic/score/mean": sum(scores) / len(scores),
        "response_length/mean": sum(row["length"] for row in rows) / len(rows),
        "actor/entropy": 1.0 / step,
        "actor/ppo_kl": 0.001 * step,
        "actor/pg_clipfrac": 0.1,
        "actor/grad_norm": float("nan") if step == 3 else 0.5,
        "perf/throughput": 1000.0 + step,
        "perf/total_num_tokens": 1000.0,
        "perf/max_memory_allocated_gb": 10.0 + step / 8,
        "timing_s/step": 38.0,
        **timings,
    }


def prompt_text(index: int) -> str:
    if index % 2:
        return f"Question {index}: what is the colour of a clear sky? Name it in one word."
    return f"Question {index}: Tom has {index} apples and eats none. How many are left? Write the number after ####."


def answer_text(index: int, step: int, place: int, score: float | None) -> str:
    right = "blue" if index % 2 else str(index)
    said = right if score else f"{right}{place + 1}"
    return f"At step {step}, answer {place}: let me think about question {index}.\nNothing changes.\n#### {said}"


@cache
def tokenizer() -> Tokenizer:
    made = Tokenizer(BPE())
    made.pre_tokenizer, made.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    texts = [prompt_text(i) + answer_text(i, 1, 1, 1.0) + TOOL_OUTPUT for i in range(ROWS)]
    alphabet = ByteLevel.alphabet()
    made.train_from_iterator(texts, BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    return made


def _save_tokenizer(file: Path) -> None:
    tokenizer().save(str(file))


def _whole(value: Any) -> Any:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def _fail(message: str) -> None:
    raise AssertionError(message)


def write_big_run(folder: Path, *, steps: int, prompts: int, answers: int, tokens: int) -> Path:
    """A run of real size: every step has its own scores, log-probs and order of prompts."""
    run = GrowingRun(folder, total_steps=steps)
    draw = np.random.default_rng(0)
    rows = prompts * answers
    length_N = draw.integers(tokens // 2, tokens + tokens // 2, rows)
    offsets = pa.array(np.concatenate([[0], np.cumsum(length_N)]).astype(np.int32))
    words = tokenizer().encode(prompt_text(2) + answer_text(2, 1, 1, 1.0)).ids
    texts = [tokenizer().decode(draw.choice(words, length).tolist()) for length in length_N]
    for step in range(1, steps + 1):
        run.dumps.write("train", step, partial(_big_table, draw, prompts, answers, texts, offsets, words))
        for stage, (start, seconds) in STAGES.items():
            at = {"step": step, "stage": stage}
            run.events.write("stage_begin", time=START + STEP_S * step + start, **at)
            run.events.write("stage_end", time=START + STEP_S * step + start + seconds, seconds=seconds, **at)
        run.log_step(step, {f"group{i % 7}/metric_{i}/mean": draw.random() for i in range(120)})
    run.close()
    return folder


def _big_table(
    draw: np.random.Generator, prompts: int, answers: int, texts: list[str], offsets: pa.Array, words: list[int]
) -> pa.Table:
    rows, total = len(texts), offsets[-1].as_py()
    score_N = (draw.random(rows) < np.repeat(draw.random(prompts), answers)).astype(np.float64)
    index_N = np.repeat(draw.permutation(20 * prompts)[:prompts], answers)
    short_N = np.diff(offsets.to_numpy())

    def numbers() -> pa.Array:
        return pa.ListArray.from_arrays(offsets, pa.array(draw.standard_normal(total).astype(np.float16)))

    columns = {
        "group": np.repeat(np.arange(prompts), answers),
        "index": index_N,
        "data_source": ["sums"] * rows,
        "prompt": [prompt_text(2 * index) for index in index_N.tolist()],
        "ground_truth": [str(index) for index in index_N.tolist()],
        "output": texts,
        "score": score_N,
        "accuracy": score_N,
        "finished": draw.random(rows) < 0.9,
        "version": np.zeros(rows),
        "length": short_N,
        "turns": [[0, length] for length in short_N.tolist()],
        "tokens": pa.ListArray.from_arrays(offsets, pa.array(draw.choice(words, total).astype(np.int32))),
        **{name: numbers() for name in TOKEN_COLUMNS},
    }
    made = [
        columns[f.name] if isinstance(columns.get(f.name), pa.Array) else pa.array(columns.get(f.name, [None] * rows))
        for f in SCHEMA
    ]
    return pa.table([column.cast(f.type) for column, f in zip(made, SCHEMA, strict=True)], schema=SCHEMA)
