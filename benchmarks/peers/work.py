"""The work that every peer does: one model folder, the same prompts, answers of the same lengths, one reward.

Every script of this folder reads a Work from JOB.json and writes a Result to RESULT.json. Nothing of rloom is imported:
a peer runs in an environment of its own.
"""

import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

from shapes import SHAPES, random_prompts, skewed_lengths, spread_lengths

LEARNING_RATE = 1e-6
WEIGHT_DECAY = 0.01
BETAS = (0.9, 0.999)
GRAD_CLIP = 1.0


@dataclass(frozen=True)
class Work:
    """`kind` is step (generate, score, update once) or rollout (generate only)."""

    kind: str
    model: str  # a folder with weights and a tokenizer of one word for each id
    shape: str
    prompts: int
    answers: int  # to each prompt
    prompt_tokens: int
    new_tokens: int
    shortest: int | None  # rollout: answers of `shortest` to `new_tokens` tokens. None: all of `new_tokens`
    skewed: bool  # many short answers and few long ones, instead of uniform lengths
    steps: int  # measured, after one that warms up
    rows: int  # answers in a micro-batch of the update
    weights: str  # float32: masters, with arithmetic in bfloat16 on a GPU; bfloat16: no masters
    on_gpu: bool

    @property
    def sequences(self) -> int:
        return self.prompts * self.answers

    @property
    def rollout_dtype(self) -> str:
        return "bfloat16" if self.on_gpu else "float32"

    def prompt_ids(self, step: int) -> list[list[int]]:
        """Other prompts in each step, as in training: no prefix cache knows them."""
        return [list(ids) for ids in random_prompts(SHAPES[self.shape], self.prompts, self.prompt_tokens, seed=step)]

    def lengths(self) -> list[int]:
        """Tokens of each answer."""
        if self.shortest is None:
            return [self.new_tokens] * self.sequences
        return (skewed_lengths if self.skewed else spread_lengths)(self.sequences, self.shortest, self.new_tokens, 0)


@dataclass
class Result:
    """What one process measured; lists have an entry for each measured step."""

    versions: dict[str, str]
    settings: dict[str, str]  # what was set besides Work, for the table of settings
    seconds: list[float]
    warm_up_s: float
    tokens: int  # generated in one step, counted
    generation_s: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)  # from the warm-up on
    gpu_gib: float | None = None

    @property
    def speed(self) -> float:
        """Generated tokens a second."""
        return self.tokens / median(self.generation_s or self.seconds)


def versions(*packages: str) -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def gpu_gib() -> float | None:
    """In use on the whole GPU, by nvidia-smi."""
    try:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return int(subprocess.check_output(query, text=True).split()[0]) / 1024
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        return None


def read_work() -> Work:
    return Work(**json.loads(Path(sys.argv[1]).read_text()))


def write_result(result: Result, work: Work, lengths: Sequence[int]) -> None:
    """Refuse a measurement of other work: an answer that ended early, or a step that is missing."""
    if sorted(lengths) != sorted(work.lengths()):
        raise SystemExit(f"the answers have {sum(lengths)} tokens, the work has {sum(work.lengths())}")
    if len(result.seconds) != work.steps:
        raise SystemExit(f"{len(result.seconds)} steps were measured, not {work.steps}")
    result.gpu_gib = gpu_gib()
    Path(sys.argv[2]).write_text(json.dumps(asdict(result)))
