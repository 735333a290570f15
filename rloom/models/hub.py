"""Check that the model hub can be reached, before transformers retries for a minute."""

import os
import socket
from functools import cache
from urllib.parse import urlsplit

from huggingface_hub import constants, try_to_load_from_cache

from rloom.errors import ModelError

CONNECT_TIMEOUT_S = 5.0
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy")


def check_hub(name: str, key: str) -> None:
    """`name` is not a folder: either the model is in the local cache, or the hub has to be reachable."""
    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    way_out = (
        "give the folder of a model on this machine, or set HF_ENDPOINT to a mirror that this machine can reach; a "
        "model downloaded elsewhere can be copied here (`hf download NAME --local-dir FOLDER`)"
    )
    if constants.HF_HUB_OFFLINE:
        raise ModelError(f"{key}={name}: HF_HUB_OFFLINE is set, and no such model was downloaded before; {way_out}")
    fault = None if any(os.environ.get(proxy) for proxy in PROXIES) else connection_fault(constants.ENDPOINT)
    if fault is not None:
        raise ModelError(
            f"{key}={name}: there is no such folder, and the hub {constants.ENDPOINT} cannot be reached ({fault}); "
            f"{way_out}"
        )


@cache
def connection_fault(endpoint: str) -> str | None:
    """Why the endpoint cannot be reached; None if it can."""
    parts = urlsplit(endpoint)
    port = parts.port or (80 if parts.scheme == "http" else 443)
    try:
        with socket.create_connection((parts.hostname or "", port), timeout=CONNECT_TIMEOUT_S):
            return None
    except OSError as error:
        return error.strerror or str(error)
