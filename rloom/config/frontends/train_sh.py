"""The flags, environment variables and files of `train.sh`, as values of rloom's keys."""

import argparse
import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import yaml

from rloom.config.base import EMBEDDED_NAME
from rloom.config.frontends.short_names import BATCH, MINI_BATCH, MODEL, SHORT_NAMES, consequences
from rloom.config.given_keys import Tree, entries, known, real_key
from rloom.config.keys import all_keys, did_you_mean
from rloom.config.schema import KL_SWITCHES
from rloom.errors import ConfigError
from rloom.language import translate as in_language
from rloom.rewards.kinds import KINDS
from rloom.terminal import padded

FOLDER_VARIABLE = "RLOOM_KIT_DIR"  # set by train.sh: its own folder
JUDGE_FILE = "api_reward_config.yaml"
REWARD_FILE = "reward_model_config.yaml"
FUNCTION_FILE = "reward_functions.py"
FUNCTION = "compute_score"
JUDGE = "reward_model.api"
REWARD_SECTIONS = ("composite_reward", "reward_model", "custom_reward_function")


@dataclass(frozen=True)
class KeyFile:
    path: Path
    values: Mapping[str, Any]  # dotted keys


def find(name: str, folders: Sequence[str], environment: Mapping[str, str]) -> Path | None:
    """In `folders` of the current directory, then in those of train.sh."""
    kit = environment.get(FOLDER_VARIABLE)
    places = [Path(folder, name) for folder in folders]
    places += [Path(kit, folder, name) for folder in folders if not folder.startswith("..")] if kit else []
    return next((place for place in places if place.is_file()), None)


def judge_file(environment: Mapping[str, str]) -> KeyFile | None:
    """api_reward_config.yaml: keys of the section `reward_model.api`."""
    path = find(JUDGE_FILE, ["."], environment)
    return None if path is None else KeyFile(path, checked_values(path, {"reward_model": {"api": read_tree(path)}}))


def reward_file(environment: Mapping[str, str]) -> KeyFile | None:
    """reward_model_config.yaml: keys of the sections REWARD_SECTIONS."""
    path = find(REWARD_FILE, ["."], environment)
    if path is None:
        return None
    tree = read_tree(path)
    others = [name for name in tree if name.split(".")[0] not in REWARD_SECTIONS]
    if others:
        raise ConfigError(
            f"{path}: {others[0]}: this file takes the sections {', '.join(REWARD_SECTIONS)}; set other keys on the "
            f"command line{did_you_mean(others[0])}"
        )
    return KeyFile(path, checked_values(path, tree))


def function_file(environment: Mapping[str, str]) -> Path | None:
    """common/reward_functions.py, if it defines compute_score. It is parsed and not imported."""
    path = find(FUNCTION_FILE, ["common", "../common"], environment)
    if path is None:
        return None
    try:
        module = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except (SyntaxError, ValueError) as error:  # ValueError: not UTF-8, or a null byte
        raise ConfigError(f"{path}: it is not valid Python: {error}") from error
    return path if FUNCTION in defined_names(module) else None


def defined_names(module: ast.Module) -> Iterator[str]:
    for node in module.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))
            case ast.ImportFrom(names=names):
                yield from (alias.asname or alias.name for alias in names)


def read_tree(path: Path) -> Tree:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: it cannot be read: {' '.join(str(error).split())}") from error
    if tree is None:  # only comments
        return {}
    if not isinstance(tree, dict) or not all(isinstance(name, str) for name in tree):
        raise ConfigError(f"{path}: it holds no keys; write `key: value` lines")
    return tree


def checked_values(path: Path, tree: Tree) -> dict[str, Any]:
    """The keys of `tree` with their values. The values are not in the error: one of them may be a secret."""
    values = {}
    for entry in entries(tree):
        if known([entry.path]):
            values[entry.path] = entry.value
        elif entry.path not in all_keys():
            raise ConfigError(f"{path}: {unknown_key(entry.path)}")
        elif entry.value:  # not a section whose keys are all comments
            raise ConfigError(f"{path}: {entry.path} is a section of keys; write them below it")
    return values


def unknown_key(path: str) -> str:
    if path in (f"{JUDGE}.api_key", f"{JUDGE}.key"):
        return f"{path}: keys are not written to files; put it into an environment variable, such as DASHSCOPE_API_KEY"
    return f"{path}: there is no such key{did_you_mean(path)} (`rloom config` lists them all)"


MIX, WEIGHTS = "reward_model.composite.enable", "reward_model.composite.weights"
FUNCTION_KEY = "custom_reward_function.path"
# keys that set a reward other than rules and functions
OTHER_REWARDS = ("reward_model.model.path", *(kind.switch for kind in KINDS.values() if kind.title is not None))


def reward_values(
    flags: Mapping[str, Any], typed: Mapping[str, str], environment: Mapping[str, str]
) -> tuple[dict[str, Any], str]:
    """(values of the files, sentence). `flags`: of flags and variables. `typed`: key=value of the command line."""
    files = used_files(flags, typed, environment)
    values = {key: value for file in files for key, value in file.values.items()}
    given = {**values, **flags, **typed}
    function = None if FUNCTION_KEY in given else function_file(environment)
    is_used = function is not None and uses_rule_score(given, has_mix(values, typed))
    if is_used:
        values[FUNCTION_KEY] = str(function)
    sentence = f"Reward: {described({**values, **flags, **typed}, has_mix(values, typed))}"
    if files:
        sentence += f", with the keys of {' and '.join(str(file.path) for file in files)}"
    if function is not None and not is_used:
        sentence += f"; {FUNCTION} of {function} is not used, because another reward is set and no mix uses rule_score"
    return values, sentence


def used_files(flags: Mapping[str, Any], typed: Mapping[str, str], environment: Mapping[str, str]) -> Sequence[KeyFile]:
    """A mix that is not enabled is left out, because keys without effect are reported to the user."""
    reward = reward_file(environment)
    if reward is not None and not has_mix(reward.values, typed):
        others = {key: value for key, value in reward.values.items() if key not in (MIX, WEIGHTS)}
        reward = replace(reward, values=others)
    judge = judge_file(environment) if flags.get(f"{JUDGE}.enable") else None
    return [file for file in (reward, judge) if file is not None and file.values]


def has_mix(values: Mapping[str, Any], typed: Mapping[str, str]) -> bool:
    return typed[MIX].lower() == "true" if MIX in typed else bool(values.get(MIX))


def uses_rule_score(given: Mapping[str, Any], mix: bool) -> bool:
    """Without a mix, rules and functions are used if no other reward is set."""
    if mix:
        weights = given.get(WEIGHTS) or {}
        return f"{WEIGHTS}.rule_score" in given or "rule_score" in weights
    return not any(given.get(key) for key in OTHER_REWARDS)


def described(given: Mapping[str, Any], mix: bool) -> str:
    found = []
    for kind in KINDS.values():
        if kind.title is not None and given.get(kind.switch):
            found.append(kind.title.format(given[kind.switch]))
    if given.get(FUNCTION_KEY):
        found.append(f"{FUNCTION} of {given[FUNCTION_KEY]}")
    elif uses_rule_score(given, mix):
        found.append("rules, selected by the data_source of each row")
    return ("a mix of " if mix else "") + " and ".join(found)


DATA_KEY, VAL_KEY = "data.train_files", "data.val_files"
EPOCHS_KEY = "actor_rollout_ref.actor.ppo_epochs"


@dataclass(frozen=True)
class Setting:
    """A flag or a variable of the kit, and the key it sets."""

    key: str
    meaning: str
    variable: str | None = None  # the environment variable with the same meaning as the flag
    takes_value: bool = True
    default: str = ""  # with a model or data of your own
    embedded: str = ""  # the default of the embedded task, if it is another
    splits: bool = False  # the value is a list, with commas
    other_spelling: str | None = None  # of the flag

    def explained(self) -> str:
        """Meaning, key and default: `PPO's clip range (actor_rollout_ref.actor.clip_ratio) [0.2]`."""
        default = f" [{self.default}]" if self.default else ""
        return f"{in_language(self.meaning)} ({self.key}){default}"


def short(name: str, **further: Any) -> Setting:
    return Setting(SHORT_NAMES[name].key, SHORT_NAMES[name].meaning, **further)


FLAGS = {
    "model": short("model", variable="MODEL_PATH", default="Qwen/Qwen2.5-0.5B", embedded=EMBEDDED_NAME),
    "data": Setting(
        DATA_KEY,
        "your training prompts: json, jsonl or parquet files, with commas between them",
        variable="TRAIN_DATA",
        splits=True,
    ),
    "val": Setting(VAL_KEY, "validation prompts, likewise", variable="VAL_DATA", splits=True),
    "epochs": short("epochs", default="30", embedded="1"),
    "lr": short("lr", default="1e-6", embedded="2e-4"),
    "batch_size": short("batch", default="1024", embedded="64", other_spelling="batch"),
    "kl_coef": short("kl_coef", variable="KL_COEF", default="0.001", embedded="0"),
    "n_gpus": Setting(
        SHORT_NAMES["n_gpus"].key,
        "GPUs of this machine; not given: all visible ones, or 1 for the embedded task",
        variable="N_GPUS",
    ),
    "reward_model": Setting("reward_model.path", "reward model: folder or hub name", variable="REWARD_MODEL_PATH"),
    "use_api_reward": Setting(
        f"{JUDGE}.enable", f"score answers with an API judge; {JUDGE_FILE} has its other keys", takes_value=False
    ),
    "rm_api_type": Setting(f"{JUDGE}.type", "provider of the judge: dashscope (default), openai, gemini, claude"),
    "rm_model": Setting(f"{JUDGE}.model", "model of the judge"),
    "rm_prompt_preset": Setting(f"{JUDGE}.preset", "prompts of the judge: math, code, dialogue, safety"),
    "rm_system_prompt": Setting(f"{JUDGE}.system_prompt", "system prompt of the judge"),
    "rm_scoring_prompt": Setting(
        f"{JUDGE}.scoring_prompt", "scoring prompt, with {prompt}, {response} and {ground_truth}"
    ),
}
FLAGS |= {name: short(name) for name in SHORT_NAMES if name not in (*FLAGS, "batch")}
VARIABLES = {
    "CLIP_RATIO": short("clip_ratio", default="0.2"),
    "GAE_GAMMA": Setting("algorithm.gamma", "discount of later rewards", default="1.0"),
    "GAE_LAMBDA": Setting("algorithm.lam", "GAE's lambda", default="0.95"),
    "PPO_EPOCHS": Setting(EPOCHS_KEY, "passes over each batch in the update of the actor", default="1"),
    "CRITIC_LR": short("critic_lr", default="1e-5", embedded="1e-3"),
    "CRITIC_EPOCHS": Setting("critic.ppo_epochs", "the same, for the critic", default="1"),
    "CLIPRANGE_VALUE": Setting("critic.cliprange_value", "clip range of the values", default="0.5"),
    "ROLLOUT_N": short("n", default="1", embedded="8"),
    "ROLLOUT_TEMPERATURE": short("temperature", default="1.0"),
    "ROLLOUT_TP_SIZE": Setting(
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "GPUs of one rollout engine; above 1 the engine is vLLM",
        default="1",
    ),
    "GPU_MEMORY_UTILIZATION": Setting(
        "actor_rollout_ref.rollout.gpu_memory_utilization",
        "share of a GPU's memory in use, at most, with the key-value cache",
        default="0.5",
    ),
    "NNODES": Setting("trainer.nnodes", "machines", default="1"),
    "NODE_RANK": Setting("trainer.node_rank", "rank of this machine, from 0", default="0"),
    "MASTER_ADDR": Setting("trainer.master_addr", "address of machine 0"),
}
OUTPUT = "outputs/checkpoints"  # with one folder per model, and further ones with a number
DIRECTORY_KEY = "trainer.default_local_dir"
KL_KEY = "algorithm.use_kl_in_reward"


ABOUT = """Usage: train.sh [--flag VALUE ...] [key=value ...]

Trains a policy: without flags, the embedded model on the embedded data, no download.
With data or a model of your own (--data, --model) the defaults are those in brackets, with KL to the reference.
Every key of `rloom config` can follow as key=value and overrides the flags."""
FILES = (
    f"Files (in the current directory, then beside train.sh): {REWARD_FILE}; {JUDGE_FILE} with\n"
    f"--use_api_reward; compute_score in common/{FUNCTION_FILE}, if no other reward is set or a mix uses rule_score."
)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"train.sh: {message}; it takes --{', --'.join(FLAGS)} and key=value")


@dataclass(frozen=True)
class KitCommand:
    """Arguments of `load_config`, and what the run uses."""

    values: Mapping[str, Any]
    overrides: Sequence[str]
    model: str
    data: str  # as given: names of files
    reward: str  # a sentence

    @property
    def uses_embedded_data_only(self) -> bool:
        """A model of the user's own on rloom's sums: most likely the data were forgotten."""
        return self.model != EMBEDDED_NAME and self.data == EMBEDDED_NAME

    @property
    def chooses_batch_size(self) -> bool:
        given = {**self.values, **split(self.overrides)}
        return BATCH in given or MINI_BATCH in given


def translate(arguments: Sequence[str], environment: Mapping[str, str]) -> KitCommand:
    """A variable overrides the files, a flag overrides its variable, a key=value overrides all of them."""
    given = vars(parser().parse_intermixed_args(list(arguments)))
    check_judge_flags(given)
    values: dict[str, Any] = {
        found.key: environment[name] for name, found in VARIABLES.items() if environment.get(name)
    }
    for flag, found in FLAGS.items():
        value = given[flag] or (environment.get(found.variable) if found.variable else None)
        if value:
            values[found.key] = listed(value) if found.splits else value
    values = {**consequences(values), **values}
    overrides = given["overrides"]
    typed = split(overrides)
    rewards, sentence = reward_values(values, typed, environment)
    both = {**values, **typed}
    data = both.get(DATA_KEY, EMBEDDED_NAME)
    model = both.get(MODEL) or (EMBEDDED_NAME if data == EMBEDDED_NAME else FLAGS["model"].default)
    defaults = {
        **({} if data == EMBEDDED_NAME else {MODEL: model}),
        DIRECTORY_KEY: f"{OUTPUT}/{model_folder(model)}",
        **({} if DIRECTORY_KEY in both else {"trainer.number_runs": True}),
        **default_kl(model, both),
        **default_critic_epochs(both),
    }
    named = data if isinstance(data, str) else ", ".join(data)
    return KitCommand({**defaults, **rewards, **values}, overrides, model, named, sentence)


def listed(value: str) -> str | list[str]:
    """`a.json`, or a list of `a.json,b.json`."""
    names = [name.strip() for name in value.split(",") if name.strip()]
    return names if len(names) > 1 else value


def default_kl(model: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """KL in the reward, with the default coefficient 0.001. The embedded task learns in two minutes without it."""
    chosen = any(f"{key}.".startswith(f"{name}.") for key in given for name in KL_SWITCHES)
    return {} if model == EMBEDDED_NAME or chosen else {KL_KEY: True}


def default_critic_epochs(given: Mapping[str, Any]) -> dict[str, Any]:
    """1, where the key's own default would follow the actor. Without a critic the key would be reported as unused."""
    has_critic = given.get("algorithm.adv_estimator", "gae") == "gae"
    return {VARIABLES["CRITIC_EPOCHS"].key: 1} if EPOCHS_KEY in given and has_critic else {}


def check_judge_flags(given: Mapping[str, Any]) -> None:
    judges = [flag for flag, found in FLAGS.items() if found.key.startswith(f"{JUDGE}.") and given[flag]]
    if judges and not given["use_api_reward"]:
        raise ConfigError(
            f"--{', --'.join(judges)}: no effect without --use_api_reward, which enables the API judge; add it"
        )


def split(overrides: Sequence[str]) -> dict[str, str]:
    """Key -> text, as it is written: `load_config` reads the values."""
    pairs = [text.lstrip("+").partition("=") for text in overrides]
    return {real_key(name): value.strip("'\"") for name, _, value in pairs}


def model_folder(model: str) -> str:
    """A hub name unchanged (Qwen/Qwen2.5-7B), or the last part of a path."""
    path = PurePosixPath(model)
    is_hub_name = len(path.parts) == 2 and path.parts[0] not in ("~", "..", "/", ".")
    parts = path.parts if is_hub_name else (path.name,)
    return "/".join(re.sub(r"[^\w.-]", "_", part) for part in parts) or "model"


def parser() -> Parser:
    named = {found.variable: found for found in FLAGS.values() if found.variable} | VARIABLES
    variables = [
        in_language("Environment variables (a flag overrides its variable), with their defaults:"),
        *(f"  {name:<24}{found.explained()}" for name, found in named.items()),
    ]
    made = Parser(
        "train.sh",
        usage=argparse.SUPPRESS,  # argparse would write the word before it in English
        description=in_language(ABOUT),
        epilog="\n".join([*embedded_table(), "", *variables, "", in_language(FILES)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    flags = made.add_argument_group(in_language("Flags"))
    flags.add_argument("-h", "--help", action="help", help=in_language("show this help and end"))
    for flag, found in FLAGS.items():
        kind: dict[str, Any] = {"metavar": "VALUE"} if found.takes_value else {"action": "store_true"}
        other = [f"--{found.other_spelling}"] if found.other_spelling else []
        flags.add_argument(f"--{flag}", *other, help=found.explained(), **kind)
    made.add_argument("overrides", nargs="*", metavar="key=value", help=argparse.SUPPRESS)
    return made


def embedded_table() -> Iterator[str]:
    """The settings whose default is another in the embedded task."""
    yield in_language(
        "Without --model and --data: the embedded task, whose defaults let it learn within minutes on a CPU:"
    )
    rows = [(in_language("flag or variable"), in_language("default"), in_language("embedded task"))]
    named = {f"--{flag}" + (f", {found.variable}" if found.variable else ""): found for flag, found in FLAGS.items()}
    rows += [(name, one.default, one.embedded) for name, one in (named | VARIABLES).items() if one.embedded]
    for name, default, embedded in rows:
        yield f"  {padded(name, 24)}{padded(default, 24)}{embedded}"
