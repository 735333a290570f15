"""Which part of rloom may know which: imports point one way, and a heavy library has one home."""

import ast
import subprocess
import sys
from collections.abc import Iterable

import pytest

from tests.architecture.source import ROOT, Module, modules, under

BOTTOM = (
    "rloom.errors",
    "rloom.extras",
    "rloom.import_path",
    "rloom.interrupts",
    "rloom.terminal",
    "rloom.types",
)
NOUNS = (*BOTTOM, "rloom.batch", "rloom.packing", "rloom.transfer")
PROTOCOLS = ("rloom.engines.base", "rloom.rollout.base", "rloom.rewards.base", "rloom.runtime.group")
ENGINE_PARTS = tuple(
    f"rloom.engines.{name}"
    for name in ("base", "limits", "micro_batches", "optim", "storage", "distributed", "broadcast", "ulysses")
)  # of any engine
WEIGHT_CHANNELS = tuple(f"rloom.engines.{name}" for name in ("distributed", "shared_tensors", "weight_sync"))
LIMITS = (
    "rloom.models.context",
    "rloom.models.limits",
    "rloom.engines.limits",
    "rloom.rollout.limits",
)  # what `rloom plan` counts with
BACKENDS = tuple(f"rloom.{name}" for name in ("engines", "families", "rollout", "rewards", "models", "data", "runs"))
# what starts runs: above the loop, the backends and the configuration
LAUNCH = ("rloom.launch", "rloom.training", *BACKENDS, "rloom.config", "rloom.algos", "rloom.runtime", *NOUNS)

# part of rloom -> the parts of it that it may import; the longest name that fits a module counts
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "rloom.errors": (),
    "rloom.extras": (),
    "rloom.gpus": (),
    "rloom.language": (),
    "rloom.hub": ("rloom.errors",),
    "rloom.startup": (),
    "rloom.import_path": (),
    "rloom.interrupts": (),
    "rloom.terminal": (),
    "rloom.atomic": (),
    "rloom.types": (),
    "rloom.transfer": (),
    "rloom.batch": ("rloom.types", "rloom.transfer"),
    "rloom.packing": (),
    "rloom.console": ("rloom.errors", "rloom.startup", "rloom.terminal"),
    # tables and rules without torch, which the keys are checked against
    "rloom.config": (
        "rloom.config",
        "rloom.errors",
        "rloom.extras",
        "rloom.gpus",
        "rloom.language",
        "rloom.packing",
        "rloom.algos.needs",
        "rloom.rewards.judge.addresses",
        "rloom.runtime.placement",
    ),
    "rloom.plan": (
        "rloom.plan",
        "rloom.algos.discount",
        "rloom.config",
        "rloom.errors",
        "rloom.gpus",
        "rloom.packing",
        "rloom.runtime.placement",
        *LIMITS,
    ),
    "rloom.families": ("rloom.families", "rloom.engines.ulysses", "rloom.models", "rloom.rollout", *NOUNS),
    "rloom.algos": ("rloom.algos", *NOUNS),
    "rloom.models": (
        "rloom.models",
        "rloom.atomic",
        "rloom.hub",
        "rloom.algos.kl",
        *NOUNS,
    ),  # the KL over a vocabulary is taken chunk by chunk
    "rloom.runtime": ("rloom.runtime", *NOUNS),
    "rloom.rewards": ("rloom.rewards", "rloom.language", *BOTTOM),
    "rloom.rewards.rules": ("rloom.rewards.rules", "rloom.rewards.sandbox", *BOTTOM),
    "rloom.rewards.sandbox": ("rloom.rewards.framing", "rloom.rewards.sandbox", *BOTTOM),
    "rloom.data": ("rloom.data", "rloom.hub", "rloom.rewards.routing", "rloom.rewards.rules", *BOTTOM),
    "rloom.runs": ("rloom.runs", "rloom.atomic", *NOUNS),
    "rloom.runs.dumps": ("rloom.runs.dumps", "rloom.runs.json_lines", "rloom.runs.records", *NOUNS),
    "rloom.view": ("rloom.view", "rloom.doctor.run", "rloom.runs", "rloom.errors"),
    "rloom.doctor.run": (
        "rloom.doctor.run",
        "rloom.algos.discount",
        "rloom.algos.needs",
        "rloom.language",
        *(f"rloom.runs.{name}" for name in ("events", "mismatch", "names", "records", "run_folder")),
        *BOTTOM,
    ),
    "rloom.doctor": ("rloom", "rloom.doctor", "rloom.errors", "rloom.extras", "rloom.rewards.sandbox"),
    "rloom.engines": (*ENGINE_PARTS, "rloom.algos", "rloom.atomic", "rloom.models", *NOUNS),
    "rloom.engines.megatron": ("rloom.engines.megatron", *ENGINE_PARTS, "rloom.algos", "rloom.models", *NOUNS),
    "rloom.rollout": ("rloom.rollout.base", "rloom.models", *NOUNS),
    "rloom.rollout.native": (
        "rloom.rollout.native",
        "rloom.rollout.base",
        "rloom.rollout.limits",
        "rloom.models",
        *NOUNS,
    ),
    "rloom.rollout.vllm": (
        "rloom.rollout.vllm",
        "rloom.rollout.base",
        "rloom.rollout.limits",
        "rloom.models",
        *WEIGHT_CHANNELS,
        *NOUNS,
    ),
    "rloom.rollout.servers": (
        "rloom.rollout.servers",
        "rloom.rollout.base",
        "rloom.models",
        *WEIGHT_CHANNELS,
        *NOUNS,
    ),
    "rloom.training": (
        "rloom.training",
        *PROTOCOLS,
        "rloom.algos",
        "rloom.data",
        "rloom.doctor.run.live",
        "rloom.runs",
        "rloom.rewards.failures",
        "rloom.rewards.mix",
        "rloom.atomic",
        *NOUNS,
    ),
    "rloom.training.reward_model": ("rloom.models.classifier_scorer", *PROTOCOLS, *NOUNS),
    "rloom.launch": (
        *LAUNCH,
        *(
            f"rloom.{name}"
            for name in ("atomic", "console", "doctor.run.live", "gpus", "language", "plan.fit", "startup")
        ),
        "rloom",
    ),
    "rloom.api": ("rloom.api", *LAUNCH),
    "rloom.cli": (
        *("rloom", "rloom.api", "rloom.cli", "rloom.console", "rloom.doctor", "rloom.language", "rloom.plan"),
        *("rloom.trainer", "rloom.view", *LAUNCH),
    ),
    "rloom.__main__": ("rloom.cli",),
    "rloom.trainer.ppo": ("rloom.trainer.ppo", "rloom.algos", "rloom.rewards.helpers", "rloom.rewards.rules", *NOUNS),
    "rloom.trainer.config": (),
    "rloom.trainer": ("rloom", "rloom.console", "rloom.language", "rloom.trainer", *LAUNCH),
    "rloom": ("rloom.api", "rloom.errors", "rloom.import_path"),
}

# library -> the only modules that may import it
HOMES: dict[str, tuple[str, ...]] = {
    "hydra": ("rloom.config.load",),
    "omegaconf": ("rloom.config.load",),
    "pydantic": ("rloom.config",),
    "transformers": ("rloom.models", "rloom.families", "rloom.rollout.hf", "rloom.launch"),
    "peft": ("rloom.models",),
    "huggingface_hub": ("rloom.hub", "rloom.plan.architecture"),
    "accelerate": ("rloom.models.load",),
    "safetensors": ("rloom.engines", "rloom.models"),
    "httpx": ("rloom.rewards.remote_http", "rloom.rewards.judge.providers", "rloom.rollout.servers.http"),
    "pyarrow": ("rloom.data", "rloom.runs.dumps"),
    "tokenizers": ("rloom.runs.dumps.pieces", "rloom.models", "rloom.families"),
    "math_verify": ("rloom.rewards.rules",),
    "latex2sympy2_extended": ("rloom.rewards.rules",),
    "sympy": ("rloom.rewards.rules",),
    "wandb": ("rloom.runs.trackers.wandb",),
    "swanlab": ("rloom.runs.trackers.swanlab",),
    "mlflow": ("rloom.runs.trackers.mlflow",),
    "trackio": ("rloom.runs.trackers.trackio",),
    "tensorboard": ("rloom.runs.trackers.tensorboard",),
    "torch.utils.tensorboard": ("rloom.runs.trackers.tensorboard",),
    "matplotlib": ("rloom.runs.curve",),
    "rich": (
        "rloom.runs",
        "rloom.doctor.run.command",
        "rloom.doctor.machine.env",
        "rloom.cli.runs",
        "rloom.cli.compare",
    ),
    "torch.distributed": (
        *(f"rloom.engines.{name}" for name in ("distributed", "storage", "broadcast", "fsdp", "ulysses", "megatron")),
        "rloom.runtime.torchrun",  # calls among the ranks that torchrun has started
        "rloom.rollout.vllm.executor",  # a rank of vLLM in the workers' process group
    ),
    "openai": ("rloom.rewards.judge.providers.openai",),
    "anthropic": ("rloom.rewards.judge.providers.claude",),
    "google": ("rloom.rewards.judge.providers.gemini",),
    "dashscope": ("rloom.rewards.judge.providers.dashscope",),
    "triton": ("rloom.models.head_kernels", "rloom.rollout.native.kernels"),
    "ray": ("rloom.runtime.ray",),
    "vllm": ("rloom.rollout.vllm",),
    "sglang": (),
    "tensorrt_llm": ("rloom.rollout.servers.trtllm_server",),
    "megatron": ("rloom.engines.megatron.core",),
}

WITHOUT_TORCH = (
    *BOTTOM,
    "rloom.algos.discount",
    "rloom.algos.needs",
    "rloom.runtime.placement",
    "rloom.config",
    "rloom.plan",
    *LIMITS,
    "rloom.packing",
    "rloom.rewards",
    "rloom.console",
    "rloom.startup",
    "rloom.doctor",
    "rloom.view",
    "rloom.cli",
    "rloom.models.source",
    "rloom.trainer.main_ppo",
    "rloom.trainer.sft_trainer",
    "rloom.launch.early_checks",
    "rloom.launch.model_sources",
    "rloom.launch.directory",
    "rloom.runtime.fork_server",
)


def rule_of(module: Module) -> str:
    return max((part for part in MAY_IMPORT if under(module.name, part)), key=len)


def is_any_of(name: str, parts: Iterable[str]) -> bool:
    # `rloom` itself holds the version and the public names: it allows nothing below it
    return any(name == part or (part != "rloom" and under(name, part)) for part in parts)


@pytest.mark.parametrize("module", modules(), ids=lambda module: module.name)
def test_a_module_imports_only_what_is_below_it(module: Module) -> None:
    wrong = [
        name
        for name in module.imports()
        if under(name, "rloom") and not is_any_of(name, (module.name, *MAY_IMPORT[rule_of(module)]))
    ]
    assert not wrong, f"{module.name} may import {MAY_IMPORT[rule_of(module)]} of rloom; it imports {wrong}"


def test_only_the_front_doors_and_the_builder_know_the_configuration_tree() -> None:
    allowed = ("rloom.config", "rloom.plan", "rloom.cli", "rloom.api", "rloom.launch", "rloom.trainer")
    knowing = {m.name for m in modules() if any(under(name, "rloom.config") for name in m.imports())}
    assert {name for name in knowing if not is_any_of(name, allowed)} == set()
    assert "rloom.launch.build" in knowing  # the search finds something


@pytest.mark.parametrize("library", HOMES)
def test_a_heavy_library_has_one_home(library: str) -> None:
    users = {module.name for module in modules() if any(under(name, library) for name in module.imports())}
    strangers = {name for name in users if not is_any_of(name, HOMES[library])}
    assert not strangers, f"{library} belongs into {HOMES[library] or 'no module yet'}"


@pytest.mark.parametrize("part", WITHOUT_TORCH)
def test_what_must_start_at_once_names_no_heavy_library(part: str) -> None:
    named = {name for module in modules() if under(module.name, part) for name in module.imports()}
    assert not [name for name in named if name.split(".")[0] in ("torch", "transformers", "numpy", "peft")]


def test_no_backend_imports_another_of_its_kind() -> None:
    for kind in ("rloom.engines", "rloom.rollout"):
        for module in (m for m in modules() if under(m.name, kind)):
            own = ".".join(module.name.split(".")[:3])
            others = [
                name
                for name in module.imports()
                if under(name, kind) and not is_any_of(name, (own, f"{kind}.base", f"{kind}.limits", *ENGINE_PARTS))
            ]
            assert not others, f"{module.name} imports {others}"


@pytest.mark.parametrize(
    "name",
    [
        "rloom",
        "rloom.config.load",
        "rloom.cli",
        "rloom.cli.evaluate",
        "rloom.cli.view",
        "rloom.view.server",
        "rloom.trainer.main_ppo",
        "rloom.trainer.sft_trainer",
        "rloom.rewards.pool_worker",
    ],
)
def test_importing_it_imports_no_torch(name: str) -> None:
    code = f"import sys, {name}; print([m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_every_python_that_rloom_starts_is_told_so() -> None:
    """A list with sys.executable is a command: its next word is -P, or -I, which includes it."""
    started = [
        (module.name, [word.value if isinstance(word, ast.Constant) else "" for word in node.elts])
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.List) and node.elts and "sys.executable" in ast.unparse(node.elts[0])
    ]
    assert len(started) >= 6
    assert [found for found in started if found[1][1] not in ("-P", "-I")] == []
