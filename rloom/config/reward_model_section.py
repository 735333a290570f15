"""The keys of a reward model: a Hugging Face sequence classifier that scores whole conversations."""

from typing import Literal

from rloom.config.section import Section, key, section


class RewardFsdp(Section):
    param_offload: bool | None = key(
        None,
        "Keep the reward model in host memory while it does not score. null: if it shares its workers with other "
        "roles. No effect on a CPU.",
        same_run=True,
    )
    dtype: Literal["auto", "float32", "bfloat16"] = key(
        "auto", "Data type of weights and computation. auto: bfloat16 on a GPU, float32 on a CPU."
    )


class RewardNetwork(Section):
    path: str | None = key(None, "Another name of `reward_model.path`.")
    trust_remote_code: bool = key(
        False, "Another name of `reward_model.trust_remote_code`.", needs_consent=bool, same_run=True
    )
    input_tokenizer: str | None = key(
        None,
        "Tokenizer of the answers that are scored. rloom decodes them with the policy's, so only null and the value of "
        "`actor_rollout_ref.model.path` are accepted. The reward model's own tokenizer and chat template encode the "
        "conversation again.",
    )
    use_remove_padding: bool = key(
        True,
        "Score packed conversations without padding, where the family allows it. False: pad each pass.",
        same_run=True,
    )
    fsdp_config: RewardFsdp = section(RewardFsdp, "Offload and data type.")


class ClassifierKeys(Section):
    enable: bool | None = key(None, "Score answers with a reward model. null: if its path is set.")
    path: str | None = key(
        None,
        "Folder or hub name of a sequence classifier (AutoModelForSequenceClassification), with its tokenizer and chat "
        "template. `embedded`: the model that is part of rloom with an untrained head, to try a command.",
    )
    trust_remote_code: bool = key(
        False, "Run the Python files of the reward model's repository.", needs_consent=bool, same_run=True
    )
    model: RewardNetwork = section(RewardNetwork, "The reward model, in verl's spelling.")
    micro_batch_size_per_gpu: int | None = key(
        None, "Conversations per forward pass. null: by token budget.", ge=1, same_run=True
    )
    micro_batch_size: int | None = key(None, "Older key: the same, summed over all GPUs.", ge=1, same_run=True)
    use_dynamic_bsz: bool | None = key(
        None, "Fill forward passes up to the token budget. null: if no micro-batch size is given.", same_run=True
    )
    forward_max_token_len_per_gpu: int = key(
        32768, "Token budget of a forward pass; where conversations are padded, padding counts.", ge=1, same_run=True
    )
    use_torch_compile: bool = key(True, "Compile the layers of a packed reward model on a GPU.", same_run=True)
    max_length: int | None = key(None, "Maximum tokens of a conversation. null: the limit of the reward model.", ge=1)
    truncation: Literal["error", "left", "right"] = key(
        "error",
        "For conversations over the maximum. error: the score has failed; left, right: remove tokens on that side.",
    )
    label_weights: list[float] | None = key(
        None, "With several labels: the score is the sum of their outputs times these weights. null: their mean."
    )

    @property
    def model_path(self) -> str | None:
        """The reward model of this run; None: there is none."""
        return None if self.enable is False else self.path or self.model.path

    @property
    def trusts_code(self) -> bool:
        return self.trust_remote_code or self.model.trust_remote_code
