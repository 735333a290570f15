"""The maximum length of a sample: the context length of the model."""

from rloom.errors import ModelError

LENGTH_KEYS = "data.max_prompt_length + data.max_response_length"


def check_context(context: object, longest: int, key: str) -> None:
    """`context`: max_position_embeddings of the model; `longest`: tokens of the longest sample of the run."""
    if isinstance(context, int) and 0 < context < longest:
        section = key.split("=")[0].rsplit(".", 1)[0]
        raise ModelError(
            f"{key}: {LENGTH_KEYS} = {longest} tokens, the model supports {context} (max_position_embeddings); "
            f"lower them, or, if its rotary embedding supports more, set "
            f"{section}.override_config.max_position_embeddings={longest}"
        )
