"""The vLLM peer, in a process of its own because it takes the whole GPU.

    python benchmarks/vllm_peer.py JOB.json RESULT.json

benchmarks/rollout.py writes the job and reads the result. Nothing of rloom is imported: vLLM may live in an
environment of its own.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shapes import SHAPES, Shape, random_prompts


def main() -> None:
    job_file, result_file = map(Path, sys.argv[1:3])
    job = json.loads(job_file.read_text())
    import vllm

    shape = SHAPES[job["shape"]]
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        engine = make_engine(vllm, shape, Path(folder), job)
        built_s = time.perf_counter() - started
        cases = [measure(vllm, engine, shape, job, case) for case in job["cases"]]
        cases[0]["warm_up_s"] += built_s
    result = {"version": vllm.__version__, "cases": cases, "memory_gib": used_gib()}
    result_file.write_text(json.dumps(result))
    print(json.dumps(result), flush=True)


def make_engine(vllm: Any, shape: Shape, folder: Path, job: dict[str, Any]) -> Any:
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=1))
    return vllm.LLM(
        model=str(folder),
        load_format="dummy",  # random weights
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=job["prompt_tokens"] + job["new_tokens"],
        gpu_memory_utilization=job["gpu_memory_utilization"],
        max_num_seqs=job["sequences"],
        enforce_eager=job["eager"],
        seed=0,
    )


def measure(vllm: Any, engine: Any, shape: Shape, job: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """Fresh prompts each time, as in training: its prefix cache must not know them from the repetition before."""
    answers, prompts = job["answers"], job["sequences"] // job["answers"]
    parameters = [
        vllm.SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, logprobs=0, detokenize=False)
        for new in case["new_tokens"]
    ]
    seconds, tokens = [], 0
    for attempt in range(job["repeat"] + 1):
        texts = random_prompts(shape, prompts, job["prompt_tokens"], case["seed"] + attempt)
        asked = [{"prompt_token_ids": list(text)} for text in texts for _ in range(answers)]
        started = time.perf_counter()
        outputs = engine.generate(asked, parameters, use_tqdm=False)
        seconds.append(time.perf_counter() - started)
        written = [output.outputs[0] for output in outputs]
        assert all(len(answer.logprobs) == len(answer.token_ids) for answer in written)
        tokens = sum(len(answer.token_ids) for answer in written)
    return {"name": case["name"], "tokens": tokens, "warm_up_s": seconds[0], "seconds": min(seconds[1:])}


def used_gib() -> float | None:
    """Of the whole GPU, by nvidia-smi: vLLM takes its share at the start and keeps it."""
    try:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return int(subprocess.check_output(query, text=True).split()[0]) / 1024
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        return None


if __name__ == "__main__":
    main()
