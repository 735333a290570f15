"""OpenRLHF's flags of data, reward and sampling as values of rloom's keys."""

from collections.abc import Iterator
from typing import Any

from rloom.config.frontends.openrlhf_parse import Given

MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
SUFFIXES = (".parquet", ".json", ".jsonl")
NO_SOURCE = "default"  # OpenRLHF's data source of rows without one
REWARD_FUNCTION = "reward_func"


def data_values(given: Given) -> dict[str, Any]:
    values: dict[str, Any] = {"data.truncation": "left", **length_values(given)}
    if "prompt_data" in given:
        values |= {"data.train_files": files(given["prompt_data"]), "data.prompt_key": given["input_key"]}
        values |= {"data.default_data_source": NO_SOURCE}
        if not given["apply_chat_template"]:
            values[f"{MODEL}.custom_chat_template"] = raw_template(given["input_template"])
    if "eval_dataset" in given:
        values["data.val_files"] = files(given["eval_dataset"])
        values[f"{ROLLOUT}.val_kwargs.n"] = given["eval_n_samples_per_prompt"]
        values[f"{ROLLOUT}.val_kwargs.temperature"] = given["eval_temperature"]
        values[f"{ROLLOUT}.val_kwargs.do_sample"] = given["eval_temperature"] > 0
    return values


def length_values(given: Given) -> dict[str, Any]:
    """The embedded model has shorter lengths than OpenRLHF's defaults, which are set only with --pretrain."""
    if "max_new_tokens" in given and "max_len" in given:
        answer = given["max_new_tokens"]
        return {"data.max_prompt_length": given["max_len"] - answer, "data.max_response_length": answer}
    names = {"prompt_max_len": "data.max_prompt_length", "generate_max_len": "data.max_response_length"}
    return {key: given[name] for name, key in names.items() if name in given or "pretrain" in given}


def files(text: str) -> str | list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    return names[0] if len(names) == 1 else names


def raw_template(around: str | None) -> str:
    """A Jinja template that writes the prompt as it is, with the text of --input_template around it."""
    before, _, after = (around or "{}").partition("{}")
    content = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return literal_text(before) + content + literal_text(after)


def literal_text(text: str) -> str:
    escaped = text.encode("unicode_escape").decode("ascii").replace("'", "\\'")
    return f"{{{{ '{escaped}' }}}}" if text else ""


def reward_values(given: Given) -> dict[str, Any]:
    url = given["remote_rm_url"]
    if url is not None and url.endswith(".py"):
        return {"custom_reward_function.path": url, "custom_reward_function.name": REWARD_FUNCTION}
    if url is not None:
        return {"reward_model.remote.urls": files(url)}
    return {"reward_model.path": given["reward_pretrain"]} if "reward_pretrain" in given else {}


def data_faults(given: Given) -> Iterator[str]:
    for name in ("prompt_data", "eval_dataset"):
        found = files(given[name] or "")
        for file in [found] if isinstance(found, str) else found:
            if file and not file.endswith(SUFFIXES):
                yield (
                    f"--{name} {file}: rloom reads {', '.join(SUFFIXES)} files; write the data set to one, or use "
                    "`rloom data prepare NAME` for a known one"
                )
    for name in ("input_key", "label_key", "input_template", "apply_chat_template"):
        if name in given and "prompt_data" not in given:
            yield f"--{name}: no effect without --prompt_data"
    for name in ("eval_temperature", "eval_n_samples_per_prompt"):
        if name in given and "eval_dataset" not in given:
            yield f"--{name}: no effect without --eval_dataset"
    if "input_template" in given and given["apply_chat_template"]:
        yield "--input_template: no effect with --apply_chat_template, which formats the prompts; keep one"
    elif "input_template" in given and given["input_template"].count("{}") != 1:
        yield f"--input_template {given['input_template']}: it needs one {{}}, where the prompt is put"
    yield from length_faults(given)
    yield from reward_faults(given)


def length_faults(given: Given) -> Iterator[str]:
    if ("max_len" in given) != ("max_new_tokens" in given):
        yield (
            "--max_len and --max_new_tokens: rloom limits prompt and answer apart; give both, or --prompt_max_len and "
            "--generate_max_len"
        )
    elif "max_len" in given and {"prompt_max_len", "generate_max_len"} & set(given.values):
        yield (
            "--max_len and --max_new_tokens set the same limits as --prompt_max_len and --generate_max_len; keep one "
            "pair"
        )
    elif "max_len" in given and given["max_len"] <= given["max_new_tokens"]:
        yield (
            f"--max_len {given['max_len']}: it leaves no tokens for the prompt beside --max_new_tokens "
            f"{given['max_new_tokens']}; use a larger --max_len"
        )


def reward_faults(given: Given) -> Iterator[str]:
    url, model = given["remote_rm_url"], given["reward_pretrain"]
    if url is not None and model is not None:
        yield "--remote_rm_url and --reward_pretrain are two rewards; keep one, or mix them by reward_model.composite"
    if url is not None and "," in url and any(part.endswith(".py") for part in url.split(",")):
        yield f"--remote_rm_url {url}: give one .py file, or URLs"
    if model is not None and "," in model:
        yield f"--reward_pretrain {model}: a run has one reward model; give one"
