"""What a run is, by content: its model, its data, its algorithm. A checkpoint of another run is not continued.

The record is `identity.json`, in the run directory and in every checkpoint.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloom.config.base import RunConfig
from rloom.config.derived import reward_parts
from rloom.config.from_checkpoint import flattened, read_saved, saved_differences
from rloom.config.given_keys import leaf_keys
from rloom.config.load import expand
from rloom.config.schema import Config, Model
from rloom.data.prompts import PromptTable
from rloom.errors import CheckpointError, ConfigError
from rloom.launch.directory import CONTENT, IDENTITY_FILE, LENGTH, MACHINES
from rloom.launch.inputs import Inputs
from rloom.launch.model_sources import critic_source, policy_source, reward_source
from rloom.launch.models import needs_critic
from rloom.launch.rewards import has_reward_model
from rloom.models.fingerprint import Fingerprint, digest, fingerprint, tokenizer_digest
from rloom.runs.records import SCHEDULE_FILE, to_json_value
from rloom.runs.run_folder import CONFIG_FILE
from rloom.training.checkpoint import read_json
from rloom.types import Prompt

VERSION = 1
NOT_LISTED = ("trainer.resume_mode", "trainer.resume_from_path")
BEGIN_AGAIN = (
    "Set it back to go on with that run. To begin again, choose another trainer.default_local_dir, or add "
    "trainer.resume_mode=disable, which sets the old checkpoints aside"
)

Record = Mapping[str, Any]
Shapes = Mapping[str, tuple[type, ...]]  # types of the values of a record
SHAPES: Shapes = {  # of any kind of training
    "model": (dict,),
    "tokenizer": (str,),
    "lora": (dict, type(None)),
    "data": (dict,),
    "held_out": (dict,),
    "shuffle": (bool,),
    "seed": (int,),
}


@dataclass(frozen=True)
class Difference:
    what: str  # "algorithm.adv_estimator was gae, is grpo"
    refused: bool  # another run than the one that was saved
    moves_data: bool = False  # the saved position in the data means nothing here


def describe(config: Config, inputs: Inputs) -> dict[str, Any]:
    data = config.data
    return {
        "version": VERSION,
        "model": fingerprint(policy_source(config)).record(),
        "tokenizer": tokenizer_digest(inputs.tokenizer),
        "lora": lora_record(config.actor_rollout_ref.model),
        "critic": fingerprint(critic_source(config)).record() if needs_critic(config) else None,
        "reference": config.uses_reference,
        "estimator": code_and_name(config.algorithm.adv_estimator),
        "loss": code_and_name(config.actor_rollout_ref.actor.policy_loss.loss_mode),
        "reward": reward_record(config),
        CONTENT: inputs.data.content,
        "data": prompts_record(inputs.prompts),
        "held_out": prompts_record(inputs.held_out),
        "shuffle": data.shuffle,
        "seed": data.seed,
    }


def lora_record(model: Model) -> dict[str, Any] | None:
    if not model.has_lora:
        return None
    adapter = model.lora_adapter_path
    return {
        "rank": model.lora_rank,
        "alpha": model.lora_alpha,
        "target_modules": model.target_modules,
        "adapter": adapter and folder_digest(expand(adapter)),
    }


def prompts_record(prompts: PromptTable | None) -> dict[str, Any]:
    """Before truncation: another longest prompt is no other data, unless it drops rows."""
    if prompts is None:
        return {"rows": 0, "content": content_of([])}
    return {"rows": len(prompts), "content": prompts.digest(content_of)}


def content_of(prompts: Iterable[Prompt]) -> str:
    found = hashlib.sha256()
    for prompt in prompts:
        row = [prompt.index, prompt.text, prompt.data_source, to_json_value(prompt.ground_truth)]
        found.update(json.dumps(row, sort_keys=True).encode())
    return found.hexdigest()


def code_and_name(name: str) -> dict[str, Any]:
    """Of an entry `file.py:name` the file's content counts, too."""
    file = Path(name.rpartition(":")[0]).expanduser()
    return {"name": name, "code": file_digest(file) if ":" in name and file.is_file() else None}


def reward_record(config: Config) -> dict[str, Any]:
    custom = config.custom_reward_function
    return {
        "path": custom.path,
        "code": file_digest(expand(custom.path)) if custom.path else None,
        "name": custom.name,
        "kwargs": to_json_value(custom.reward_kwargs),
        "parts": [part.settings for part in reward_parts(config)],
        **({"model": fingerprint(reward_source(config)).record()} if has_reward_model(config) else {}),
    }


def folder_digest(folder: Path) -> str:
    return digest([[file.name, file_digest(file)] for file in sorted(folder.glob("adapter_*"))])


def file_digest(file: Path) -> str | None:
    if not file.is_file():
        return None  # whoever loads it says so
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_identity(checkpoint: Path) -> Record:
    """The record in a checkpoint, of the shape that `describe` gives it."""
    return read_record(
        checkpoint,
        {
            **SHAPES,
            "critic": (dict, type(None)),
            "reference": (bool,),
            **dict.fromkeys(("estimator", "loss", "reward"), (dict,)),
        },
        None,
    )


def read_record(checkpoint: Path, shapes: Shapes, kind: str | None) -> Record:
    """The record of a kind of training, of these shapes."""
    file = checkpoint / IDENTITY_FILE
    record = read_json(file)
    if record.get("kind") != kind:
        raise CheckpointError(
            f"{checkpoint} is a checkpoint of `rloom {record.get('kind') or 'train'}`, which this run does not "
            f"continue; export it with `rloom export {checkpoint} DIR`, and set the model's path to DIR"
        )
    wrong = [name for name, kinds in shapes.items() if not isinstance(record.get(name, ...), kinds)]
    if record.get("version") != VERSION or wrong:
        what = f"{wrong[0]} is {record.get(wrong[0])!r}" if wrong else f"version is {record.get('version')!r}"
        raise CheckpointError(f"{file} cannot be read ({what}); take another checkpoint")
    return record


def differences(saved: Record, own: Record, *, chosen: bool) -> Iterator[Difference]:
    """Between a checkpoint's run and this one. `chosen`: the user named that checkpoint to start from."""
    strict = not chosen
    yield from model_differences(saved, own, strict, "actor_rollout_ref.model.path")
    yield from critic_differences(saved, own, strict)
    for fact, key in (
        ("estimator", "algorithm.adv_estimator"),
        ("loss", "actor_rollout_ref.actor.policy_loss.loss_mode"),
    ):
        if saved[fact].get("name") != own[fact]["name"]:
            yield Difference(f"{key} was {saved[fact].get('name')}, is {own[fact]['name']}", refused=strict)
        elif saved[fact] != own[fact]:
            yield Difference(f"{key}={own[fact]['name']}: the file has other code", refused=False)
    yield from data_differences(saved, own, strict)
    for name, text in (
        ("held_out", "the held-out data is another: accuracies before and after do not compare"),
        ("reward", "the reward function is another"),
        ("reference", f"KL to a reference was {on(saved['reference'])}, is {on(own['reference'])}"),
    ):
        if saved[name] != own[name]:
            yield Difference(text, refused=False)


def data_differences(saved: Record, own: Record, strict: bool) -> Iterator[Difference]:
    if saved["data"] != own["data"]:
        rows = saved["data"].get("rows")
        text = f"the training data is another: {rows} rows, now {own['data']['rows']} rows with other content"
        yield Difference(text, refused=strict, moves_data=True)
    for name in ("shuffle", "seed"):
        if saved[name] != own[name]:
            yield Difference(f"data.{name} was {saved[name]}, is {own[name]}", refused=strict, moves_data=True)


def model_differences(saved: Record, own: Record, strict: bool, key: str) -> Iterator[Difference]:
    was, now = as_fingerprint(saved["model"]), as_fingerprint(own["model"])
    if not was.same_model(now):
        # without LoRA all trained weights are the checkpoint's; an adapter fits the weights it was trained on
        yield Difference(model_change(key, was, now), refused=strict or bool(own["lora"]))
    elif was.revision != now.revision:
        yield Difference(f"{now.path} has another commit: {was.revision}, now {now.revision}", refused=False)
    if saved["tokenizer"] != own["tokenizer"]:
        yield Difference("the tokenizer has another vocabulary", refused=True)
    if saved["lora"] != own["lora"]:
        yield Difference(f"LoRA was {shown(saved['lora'])}, is {shown(own['lora'])}", refused=True)


def critic_differences(saved: Record, own: Record, strict: bool) -> Iterator[Difference]:
    if own["critic"] is None and saved["critic"] is not None:
        yield Difference("the checkpoint has a critic, which this run would drop", refused=strict)
    elif own["critic"] is not None and saved["critic"] is None:
        yield Difference("the checkpoint has no critic, and this run needs one", refused=True)
    elif own["critic"] is not None:
        was, now = as_fingerprint(saved["critic"]), as_fingerprint(own["critic"])
        if not was.same_model(now):
            yield Difference(model_change("critic.model.path", was, now), refused=strict)


def as_fingerprint(record: Record) -> Fingerprint:
    return Fingerprint(str(record.get("path")), record.get("config"), record.get("weights"), record.get("revision"))


def model_change(key: str, was: Fingerprint, now: Fingerprint) -> str:
    if was.path != now.path:
        return f"{key} was {was.path}, is {now.path}, which is another model"
    part = "weights" if was.config == now.config else "config.json"
    return f"{key}={now.path} has other {part} than when the checkpoint was saved"


def on(switch: bool) -> str:
    return "on" if switch else "off"


def shown(value: Any) -> str:
    text = "off" if value is None else str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def changed_keys(checkpoint: Path, config: RunConfig) -> list[str]:
    """`key: old -> new` for every key that differs from the checkpoint's own configuration."""
    saved, own = (
        dict(flattened(tree))
        for tree in (read_saved(checkpoint / CONFIG_FILE, type(config)), config.model_dump(mode="json"))
    )
    return [
        f"{key}: {shown(saved[key])} -> {shown(value)}"
        for key, value in own.items()
        if not isinstance(value, dict) and key not in NOT_LISTED and key in saved and saved[key] != value
    ]


def check_replay(config: Config, own: Record) -> None:
    """Before a model is loaded: a replay trains the same on as many workers, in a directory of its own."""
    if config.trainer.replay is None:
        return
    was, key = expand(config.trainer.replay).absolute(), f"trainer.replay={config.trainer.replay}"
    if not (was / CONFIG_FILE).is_file() or not (was / IDENTITY_FILE).is_file():
        raise ConfigError(f"{key}: {was} is not the directory of a run; name one with {SCHEDULE_FILE}")
    if was.resolve() == expand(config.trainer.default_local_dir).resolve():
        raise ConfigError(f"{key} is this run's own directory; choose another trainer.default_local_dir")
    keys = saved_differences(was / CONFIG_FILE, config, repeated_keys(config))
    now = dict(flattened(config.model_dump(mode="json")))
    found = [f"{name} was {shown(value)}, is {shown(now[name])}" for name, value in keys.items()]
    found += [difference.what for difference in differences(read_identity(was), own, chosen=False)]
    if found:
        raise ConfigError(f"{key}: this run is another one: {'; '.join(found)}; set them as in {was / CONFIG_FILE}")


def repeated_keys(config: Config) -> list[str]:
    """Those that may change what is computed, its last bits too."""
    models = ("actor_rollout_ref.", "critic.", "trainer.pools.")
    return [
        path
        for path, key in leaf_keys(type(config)).items()
        if (not key.same_run or path.startswith(models) or path in (*LENGTH, *MACHINES)) and path != "trainer.replay"
    ]


@dataclass(frozen=True)
class Continuation:
    notice: str  # what changed since the checkpoint was saved; empty: nothing
    keeps_position: bool  # in the data; False: other data, from its beginning


def compare(checkpoint: Path, config: Config, own: Record, *, chosen: bool) -> Continuation:
    """How this run goes on from a checkpoint; an error where that would be another run under the same name."""
    return continuation(checkpoint, config, list(differences(read_identity(checkpoint), own, chosen=chosen)))


def continuation(checkpoint: Path, config: RunConfig, found: Sequence[Difference]) -> Continuation:
    keys = changed_keys(checkpoint, config)
    refused = [difference.what for difference in found if difference.refused]
    if refused:
        others = f" Changed keys: {'; '.join(keys)}." if keys else ""
        raise CheckpointError(
            f"{checkpoint} is of another run, which this one does not continue: {'; '.join(refused)}.{others} "
            f"{BEGIN_AGAIN}"
        )
    moved = any(difference.moves_data for difference in found)
    changes = [*(difference.what for difference in found), *keys]
    changes += ["the data is read from its beginning"] if moved else []
    notice = f"Changed since that checkpoint: {'; '.join(changes)}" if changes else ""
    return Continuation(notice, keeps_position=not moved)
