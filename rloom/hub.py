"""The Hugging Face hub, or the mirror that HF_ENDPOINT names: one request with a time limit, before a library retries.

huggingface_hub and transformers repeat a failed request for a minute and log each attempt.
"""

import fnmatch
import logging
import os
import re
import sys
from functools import cache
from pathlib import Path

from huggingface_hub import (
    HfApi,
    constants,
    get_hf_file_metadata,
    get_token,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from rloom.errors import DataError, ModelError

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0
MIRROR = "HF_ENDPOINT=https://hf-mirror.com"
SHOWN_FILES = 8
OF_AUTH = ("login", "logout", "whoami")  # commands of huggingface-cli that `hf` has below `auth`


@cache  # a run loads tokenizer, configuration and weights
def check_model(name: str, key: str) -> None:
    """`name` is not a folder: the model is in the local cache, or the hub has it."""
    if constants.HF_HUB_OFFLINE and _is_cached(name):
        return
    fault = file_fault(name, "config.json", "model")
    if fault is not None and _is_cached(name):
        log.warning("%s=%s: %s; the copy in the local cache is used", key, name, fault)
        _go_offline()
    elif fault is not None:
        raise ModelError(
            f"{key}={name}: there is no such folder, and {fault}. Ways out: give the folder of a model on this "
            f"machine; use a mirror ({MIRROR}); for a gated or private model set HF_TOKEN; or download it where the "
            f"hub can be reached (`hf download {name} --local-dir FOLDER`) and give the folder"
        )


def config_file(name: str, key: str) -> Path:
    """config.json of a model, from the local cache or the hub."""
    check_model(name, key)
    try:
        return Path(hf_hub_download(name, "config.json"))
    except Exception as error:
        raise ModelError(f"{key}={name}: its config.json cannot be downloaded: {explain(error, name)}") from error


def cached_config(name: str, key: str) -> Path | None:
    """config.json of a model in the local cache."""
    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError as error:
        raise ModelError(f"{key}={name}: this is neither a folder nor a hub name") from error
    return Path(found) if isinstance(found, str) else None


def _go_offline() -> None:
    """Otherwise transformers repeats its request for each optional file: three minutes for a tokenizer."""
    constants.HF_HUB_OFFLINE = True
    os.environ["HF_HUB_OFFLINE"] = "1"  # for processes that this one starts


def _is_cached(name: str) -> bool:
    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return False


HUB_FILES = "hf://datasets/"  # as other libraries write them: hf://datasets/OWNER/NAME[@REVISION]/PATTERN
ADDRESS = re.compile(HUB_FILES + r"([^/@]+/[^/@]+)(?:@([^/]+))?/(.+)")
CONVERTED = {"~parquet": "refs/convert/parquet"}  # the hub's own conversion: CONFIGURATION/SPLIT/*.parquet


def files_at(address: str) -> list[Path]:
    """The files of one folder of a data set on the hub."""
    parts = ADDRESS.fullmatch(address)
    if parts is None:
        raise DataError(f"{address}: it is no {HUB_FILES}OWNER/NAME/FILE, with * for any text")
    repository, revision, pattern = parts.groups()
    way_out = "download it where the hub can be reached and give the files"
    return download_data(repository, pattern, way_out, revision)


def download_data(repository: str, pattern: str, way_out: str, revision: str | None = None) -> list[Path]:
    """The files of a data set on the hub whose path matches `pattern`. `way_out`: ends an error message."""
    where = CONVERTED.get(revision or "", revision)
    if constants.HF_HUB_OFFLINE:
        raise DataError(f"{repository}: HF_HUB_OFFLINE is set, so nothing is downloaded; unset it, or {way_out}")
    try:
        info = HfApi().dataset_info(repository, revision=where, timeout=TIMEOUT_S)
    except Exception as error:  # which HTTP library raises depends on the version of huggingface_hub
        raise unavailable(repository, explain(error, repository), way_out) from error
    present = [file.rfilename for file in info.siblings or ()]
    wanted = sorted(fnmatch.filter(present, pattern))
    if not wanted:
        found = f"it has {', '.join(present[:SHOWN_FILES]) or 'no files'}"
        raise unavailable(repository, f"the hub {constants.ENDPOINT} has no {pattern} in it ({found})", way_out)
    folders = sorted({os.path.dirname(file) for file in wanted})
    if len(folders) > 1:
        at = "" if revision is None else f"@{revision}"
        raise DataError(
            f"{repository}: {pattern} matches files of several folders: {', '.join(folders[:SHOWN_FILES])}; name one: "
            f"{HUB_FILES}{repository}{at}/FOLDER/*"
        )
    return [_download(repository, file, way_out, where) for file in wanted]


def _download(repository: str, file: str, way_out: str, revision: str | None) -> Path:
    fault = file_fault(repository, file, "dataset", revision)
    if fault is not None:
        raise unavailable(repository, fault, way_out)
    log.info("downloading %s of %s from %s", file, repository, constants.ENDPOINT)
    try:
        return Path(hf_hub_download(repository, file, repo_type="dataset", revision=revision))
    except Exception as error:
        raise unavailable(repository, explain(error, repository), way_out) from error


def check_push(name: str) -> None:
    """Before a model is exported: there is a token, and the name is one."""
    if constants.HF_HUB_OFFLINE:
        raise ModelError(f"--push_to_hub {name}: HF_HUB_OFFLINE is set, so nothing is sent; unset it")
    if get_token() is None:
        raise ModelError(f"--push_to_hub {name}: set HF_TOKEN to a token that may write, or run `hf auth login`")
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ModelError(f"--push_to_hub {name}: {explain(error, name)}") from error


def push_folder(folder: Path, name: str, *, private: bool) -> str:
    """The address of the repository, which is created if the hub does not have it."""
    check_push(name)
    try:
        api = HfApi()
        found = api.create_repo(name, private=private or None, exist_ok=True)
        api.upload_folder(repo_id=found.repo_id, folder_path=folder)
    except Exception as error:  # which HTTP library raises depends on the version of huggingface_hub
        raise ModelError(
            f"--push_to_hub {name}: {explain(error, name)}. The model is in {folder}; `hf upload {name} {folder}` "
            "sends it again"
        ) from error
    return str(found)


def unavailable(repository: str, fault: str, way_out: str) -> DataError:
    return DataError(
        f"{repository}: cannot be downloaded: {fault}. Ways out: use a mirror ({MIRROR}); for a gated data set set "
        f"HF_TOKEN; or {way_out}"
    )


def file_fault(repository: str, file: str, repo_type: str, revision: str | None = None) -> str | None:
    """Why the hub does not give this file; None if it does. One request, no retries."""
    if constants.HF_HUB_OFFLINE:
        return f"HF_HUB_OFFLINE is set, and {repository} was not downloaded before"
    try:
        url = hf_hub_url(repository, file, repo_type=repo_type, revision=revision)
        metadata = get_hf_file_metadata(url, timeout=TIMEOUT_S)
    except Exception as error:
        return explain(error, repository)
    return None if metadata.commit_hash else f"{constants.ENDPOINT} answers, but not as a Hugging Face hub ({url})"


def explain(error: Exception, repository: str) -> str:
    hub = f"the hub {constants.ENDPOINT}"
    if isinstance(error, GatedRepoError):
        return f"{hub} gives {repository} only to users who accepted its terms (HF_TOKEN identifies you)"
    if isinstance(error, RepositoryNotFoundError):
        return f"{hub} has no {repository}, or HF_TOKEN gives no access to it (status {error.response.status_code})"
    if isinstance(error, EntryNotFoundError) and isinstance(error, HfHubHTTPError):
        return f"{hub} has {repository}, but not the file {error.response.url}"
    if isinstance(error, HfHubHTTPError):
        return f"{hub} answered with status {error.response.status_code} for {error.response.url}"
    if "timeout" in type(error).__name__.casefold():
        return f"{hub} did not answer within {TIMEOUT_S:.0f} s"
    if isinstance(error, HFValidationError):
        return f"it is no name on a hub, which is OWNER/NAME ({first_line(error)})"
    if isinstance(error, ValueError):
        return f"{hub} gave an answer that cannot be read ({first_line(error)})"
    return f"{hub} cannot be reached ({first_line(error)})"


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def huggingface_cli() -> None:
    """The command `huggingface-cli` of guides, as `hf`: `huggingface-cli download NAME` -> `hf download NAME`.

    In the versions of huggingface_hub that rloom needs, it does not exist or only says that it no longer works.
    """
    from huggingface_hub.cli.hf import main

    given = sys.argv[1:]
    command = ["hf", *(["auth"] if given[:1] and given[0] in OF_AUTH else []), *given[:1]]
    sys.argv = [*command, *given[1:]]
    print(f"huggingface-cli is now: {' '.join(command)}", file=sys.stderr)  # the rest may have a token
    main()
