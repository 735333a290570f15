"""The keys of the prompts that a policy is trained on."""

from typing import Literal

from rloom.config.section import Section, key


class Data(Section):
    train_files: str | list[str] = key(
        "embedded",
        "Training prompts: one file or a list; parquet, json, jsonl. `embedded`: the arithmetic problems of rloom.",
    )
    val_files: str | list[str] | None = key(
        None,
        "Validation prompts, in the same formats. null: none, or the embedded ones if trained on embedded data.",
        same_run=True,
    )
    train_batch_size: int = key(1024, "Prompts per step. A step trains on this many times `rollout.n` samples.", ge=1)
    val_batch_size: int | None = key(
        None, "Prompts per generation batch in validation. null: all of them.", ge=1, same_run=True
    )
    max_prompt_length: int = key(512, "Maximum prompt length in tokens.", ge=1)
    max_response_length: int = key(512, "Maximum answer length in tokens.", ge=1)
    filter_overlong_prompts: bool = key(False, "Drop prompts over `max_prompt_length` instead of truncating them.")
    truncation: Literal["error", "left", "right", "middle"] = key(
        "error",
        "For prompts over the maximum that are not filtered: stop with an error, or remove tokens on that side.",
    )
    shuffle: bool = key(True, "Shuffle the prompts in each epoch; the order depends only on `seed` and the epoch.")
    seed: int = key(1, "Seed of the prompt order, the sampled answers and the shuffling of mini-batches.", ge=0)
    prompt_key: str = key("prompt", "Column with the prompt: chat messages or a plain string.")
    reward_fn_key: str = key("data_source", "Column that selects the reward rule.")
    default_data_source: str | None = key(
        None, "Data source of rows without the column `reward_fn_key`. null: such a row is an error."
    )
    label_key: str | None = key(
        None, "Column with the ground truth. null: `reward_model.ground_truth`, or the column `ground_truth`."
    )
    train_max_samples: int = key(-1, "Use only the first N training rows. -1: all.", ge=-1)
    val_max_samples: int = key(-1, "Use only the first N validation rows. -1: all.", ge=-1, same_run=True)
    dataloader_num_workers: int = key(
        0, "Threads that render and tokenize the prompts at start. 0: none extra.", ge=0, same_run=True
    )
    return_raw_chat: bool = key(False, "Pass the chat messages to reward functions as `extra_info['raw_prompt']`.")
