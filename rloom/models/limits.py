"""Limits of models and training engines that `rloom plan` counts with. No torch here."""

from rloom.errors import ModelError

UNREDUCED_SHARE = 0.25  # share of a GPU's memory that gradients not yet summed over ranks may take at most
LOGITS_AT_ONCE = 2**29  # numbers in the fused head's buffer: 2 GB of float32
LENGTH_KEYS = "data.max_prompt_length + data.max_response_length (at most data.max_length)"


def check_context(context: object, longest: int, key: str) -> None:
    """`context`: max_position_embeddings of the model; `longest`: tokens of the longest sample of the run."""
    if isinstance(context, int) and 0 < context < longest:
        section = key.split("=")[0].rsplit(".", 1)[0]
        raise ModelError(
            f"{key}: {LENGTH_KEYS} = {longest} tokens, the model supports {context} (max_position_embeddings); "
            f"lower them, or, if its rotary embedding supports more, set "
            f"{section}.override_config.max_position_embeddings={longest}"
        )
