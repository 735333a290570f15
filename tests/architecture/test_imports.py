"""Which part of rloom may know which: imports point one way, and a heavy library has one home."""

import ast
import subprocess
import sys
from collections.abc import Iterable

import pytest

from tests.architecture.source import ROOT, Module, module_names, modules, under

FOLDERS = {name for name in module_names() if any(under(other, name) and other != name for other in module_names())}
TOP_LEVEL = tuple(sorted(name for name in module_names() if name.count(".") == 1 and name not in FOLDERS))
NOUNS = tuple(name for name in TOP_LEVEL if name not in ("rloom.__main__", "rloom.console"))
BOTTOM = tuple(name for name in NOUNS if name not in ("rloom.batch", "rloom.transfer"))  # without torch
PROTOCOLS = ("rloom.engines.base", "rloom.rollout.base", "rloom.rewards.base", "rloom.runtime.group")
LIMITS = ("rloom.models.limits", "rloom.rollout.limits", "rloom.runs.dumps.limits")  # what `rloom plan` counts with
# declarations of what each entry of a kind needs and can do, without torch
TABLES = (
    "rloom.algos.needs",
    "rloom.algos.off_policy",
    "rloom.algos.ranges",
    "rloom.algos.rejection",
    "rloom.engines.kinds",
    "rloom.environments.kinds",
    "rloom.episodes.kinds",
    "rloom.rewards.kinds",
    "rloom.rollout.kinds",
)
BACKENDS = tuple(
    f"rloom.{name}" for name in ("engines", "episodes", "families", "rollout", "rewards", "models", "data", "runs")
)
# folder of one kind -> its backends, which do not import each other; the other modules of the folder are shared
KINDS = {
    "rloom.engines": ("rloom.engines.fsdp", "rloom.engines.local", "rloom.engines.megatron"),
    "rloom.rollout": ("rloom.rollout.hf", "rloom.rollout.native", "rloom.rollout.servers", "rloom.rollout.vllm"),
}
# what starts runs: above the loop, the backends and the configuration
LAUNCH = (
    *("rloom.launch", "rloom.training", *BACKENDS, "rloom.config", "rloom.algos", "rloom.net", "rloom.runtime"),
    *("rloom.console", "rloom.environments.kinds", *NOUNS),
)

# part of rloom -> the parts of it that it may import beside itself; the longest name that fits a module counts
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(TOP_LEVEL, BOTTOM),
    "rloom.batch": NOUNS,
    "rloom.__main__": ("rloom.cli",),
    # tables and rules without torch, which the keys are checked against
    "rloom.config": (
        *TABLES,
        "rloom.runs.run_folder",
        "rloom.runtime.placement",
        *BOTTOM,
    ),
    "rloom.plan": (
        *("rloom.config", "rloom.models.source", "rloom.runtime.placement", *TABLES),
        *LIMITS,
        *BOTTOM,
    ),
    "rloom.families": ("rloom.engines.ulysses", "rloom.models", "rloom.rollout", *NOUNS),
    "rloom.algos": NOUNS,
    "rloom.models": ("rloom.algos.kl", *NOUNS),  # the KL over a vocabulary is taken chunk by chunk
    "rloom.net": BOTTOM,
    "rloom.runtime": NOUNS,
    # conversations with the policy, and the processes of environments: above the protocols, below the loop
    "rloom.episodes": (
        *("rloom.data.chat", "rloom.environments.kinds", "rloom.net", "rloom.rewards.framing", "rloom.rollout.base"),
        *("rloom.runtime.fork_server", *NOUNS),
    ),
    # verl's tool of GSM8K scores with the rule
    "rloom.episodes.stand_ins.verl_tools": ("rloom.episodes", "rloom.rewards.rules.gsm8k", *BOTTOM),
    "rloom.episodes.kinds": ("rloom.environments.kinds", *BOTTOM),
    "rloom.environments": BOTTOM,
    "rloom.environments.python": ("rloom.rewards.rules.code", "rloom.rewards.sandbox", *BOTTOM),
    "rloom.rewards": ("rloom.net", *BOTTOM),
    "rloom.rewards.kinds": ("rloom.episodes.kinds", "rloom.rewards", *BOTTOM),
    "rloom.rewards.rules": ("rloom.rewards.sandbox", *BOTTOM),
    "rloom.rewards.sandbox": ("rloom.rewards.framing", *BOTTOM),
    "rloom.data": ("rloom.environments.kinds", "rloom.rewards.routing", "rloom.rewards.rules", *BOTTOM),
    "rloom.runs": NOUNS,
    "rloom.view": ("rloom.doctor.run", "rloom.runs", *BOTTOM),
    "rloom.doctor": ("rloom", "rloom.rewards.sandbox", *TABLES, *BOTTOM),
    # it starts ranks and runs
    "rloom.doctor.machine.gpus": (
        *("rloom.engines.collectives", "rloom.families.family", "rloom.runs.run_folder", "rloom.runtime"),
        *NOUNS,
    ),
    "rloom.doctor.run": ("rloom.rewards.routing", "rloom.runs", *TABLES, *BOTTOM),
    "rloom.engines": ("rloom.algos", "rloom.models", *NOUNS),
    # weights come from a training engine, over its process groups
    "rloom.rollout": ("rloom.engines.distributed", "rloom.engines.weight_sync", "rloom.models", "rloom.net", *NOUNS),
    "rloom.training": (
        *PROTOCOLS,
        "rloom.algos",
        "rloom.data",
        "rloom.doctor.run.live",
        "rloom.episodes",
        "rloom.runs",
        "rloom.rewards.composite",
        *NOUNS,
    ),
    "rloom.training.reward_model": ("rloom.models.classifier_scorer", *PROTOCOLS, *NOUNS),
    "rloom.launch": ("rloom", "rloom.doctor.run.live", "rloom.plan.disk", "rloom.plan.make", *LAUNCH),
    "rloom.api": LAUNCH,
    "rloom.cli": ("rloom", "rloom.api", "rloom.doctor", "rloom.plan", "rloom.trainer", "rloom.view", *LAUNCH),
    # verl's import paths
    "rloom.trainer": ("rloom", *LAUNCH),
    "rloom.trainer.ppo": ("rloom.algos", "rloom.rewards.helpers", "rloom.rewards.rules", *NOUNS),
    "rloom": ("rloom.api", "rloom.errors", "rloom.import_path"),
}

# library -> the only modules that may import it
HOMES: dict[str, tuple[str, ...]] = {
    "hydra": ("rloom.config.load",),
    "omegaconf": ("rloom.config.load", "rloom.episodes.agents.by_tokens"),
    "pydantic": ("rloom.config", "rloom.episodes.stand_ins"),
    "transformers": ("rloom.models", "rloom.families", "rloom.rollout.hf", "rloom.launch"),
    "peft": ("rloom.models",),
    "huggingface_hub": ("rloom.hub",),
    "accelerate": ("rloom.models.load",),
    "safetensors": ("rloom.engines", "rloom.models", "rloom.training.queue_file"),
    "httpx": ("rloom.net.http",),
    "h11": ("rloom.net.http",),
    "cloudpickle": ("rloom.api.episodes",),
    "mcp": ("rloom.episodes.contracts.mcp_servers",),
    "uvicorn": ("rloom.episodes.gateway.server",),
    "openai": (),
    "anthropic": (),
    "pyarrow": ("rloom.data", "rloom.runs.dumps"),
    "tokenizers": ("rloom.runs.dumps", "rloom.models", "rloom.families"),
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
        "rloom.doctor.run.report",
        "rloom.doctor.machine.env",
        "rloom.cli.runs",
        "rloom.cli.compare",
    ),
    "torch.distributed": (
        "rloom.engines",
        "rloom.runtime.torchrun",  # calls among the ranks that torchrun has started
        "rloom.rollout.vllm.engine",  # a rank of vLLM in the workers' process group
    ),
    "triton": ("rloom.models.head_kernels", "rloom.rollout.native.kernels"),
    "ray": ("rloom.runtime.ray",),
    "vllm": ("rloom.rollout.vllm",),
    "sglang": (),
    "tensorrt_llm": ("rloom.rollout.servers.trtllm_server",),
    "megatron": ("rloom.engines.megatron.core",),
}

# folders, and modules of folders with torch, that start at once
WITHOUT_TORCH = (
    *BOTTOM,
    *("rloom.cli", "rloom.config", "rloom.console", "rloom.doctor", "rloom.plan", "rloom.rewards", "rloom.view"),
    *("rloom.trainer.main_ppo", "rloom.trainer.sft_trainer"),
    *("rloom.net", "rloom.runtime.fork_server", "rloom.runtime.placement", "rloom.models.source", *LIMITS, *TABLES),
    *(f"rloom.launch.{name}" for name in ("directory", "early_checks", "inputs", "model_sources")),
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
        if under(name, "rloom") and not is_any_of(name, (rule_of(module), *MAY_IMPORT[rule_of(module)]))
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


@pytest.mark.parametrize("kind", KINDS)
def test_no_backend_is_imported_by_another_of_its_kind(kind: str) -> None:
    for module in (m for m in modules() if under(m.name, kind)):
        others = [part for part in KINDS[kind] if not under(module.name, part)]
        assert not [name for name in module.imports() if is_any_of(name, others)], module.name


@pytest.mark.parametrize(
    "name",
    [
        "rloom",
        "rloom.config.load",
        "rloom.cli",
        "rloom.cli.checkpoints",
        "rloom.cli.view",
        "rloom.view.server",
        "rloom.doctor.run.report",
        "rloom.plan.make",
        "rloom.trainer.main_ppo",
        "rloom.trainer.sft_trainer",
        "rloom.rewards.pool_worker",
    ],
)
def test_importing_it_imports_no_torch(name: str) -> None:
    code = f"import sys, {name}; print([m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
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
