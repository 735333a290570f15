"""The secret of a run's Ray cluster, which allows to run code on every machine of the run.

Machine 0 writes a new secret into the run directory, readable only by its user, and removes it at the end. The other
machines read it there. If they do not share that directory, the user sets one in Ray's environment variables. A run on
one machine writes it into a temporary folder, and its cluster listens on the loopback device alone.
"""

import os
import re
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from rloom.errors import ConfigError

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"  # of Ray
# With 0, Ray uses 127.0.0.1 as this machine's address and binds every port to it; its default on Windows and macOS.
# `ray.init(_node_ip_address="127.0.0.1")` does not: Ray replaces it by an address that other machines can reach.
LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
OTHER_WAY = f"set {TOKEN} (or {TOKEN_PATH}, a file) to the same secret on every machine"


def secret_file(directory: Path, address: str) -> Path:
    """One file per address: another run with the same directory does not overwrite it."""
    return directory / f".ray_token_{re.sub(r'[^A-Za-z0-9.-]', '_', address)}"


def given_by_user() -> bool:
    """Whether the user set a secret, a file with one, or no secret at all (RAY_AUTH_MODE=disabled)."""
    return bool(os.environ.get(TOKEN) or os.environ.get(TOKEN_PATH)) or not tokens_are_used()


def tokens_are_used() -> bool:
    return os.environ.get(MODE, "token").lower() == "token"


def ray_variables(file: Path) -> dict[str, str]:
    """Environment variables of Ray's processes: the path of the secret, since variables are inherited and printed."""
    if given_by_user():
        return {MODE: os.environ.get(MODE, "token")}
    return {MODE: "token", TOKEN_PATH: str(file)}


@contextmanager
def new_secret(directory: Path, address: str) -> Iterator[None]:
    """On machine 0, while the run lasts. Call it before Ray is imported, since Ray reads the environment on import."""
    file = secret_file(directory, address)
    if given_by_user():
        file.unlink(missing_ok=True)  # a killed run may have left one
    else:
        write_private(file, secret_of_this_process())
    try:
        with environment(ray_variables(file)):
            yield
    finally:
        file.unlink(missing_ok=True)


@contextmanager
def on_this_machine() -> Iterator[None]:
    """The same for a cluster of this machine alone, which is also not reachable from other machines."""
    with (
        tempfile.TemporaryDirectory(prefix="rloom_ray_") as folder,
        environment({LOOPBACK: os.environ.get(LOOPBACK, "0")}),
        new_secret(Path(folder), "local"),
    ):
        yield


@cache
def secret_of_this_process() -> str:
    """One for all runs of a process: Ray reads the file once and uses that text as long as the process lives."""
    return secrets.token_hex(32)


def write_private(file: Path, text: str) -> None:
    """Readers see the old file or the complete new one; other users cannot read either."""
    beside = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside.unlink(missing_ok=True)
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as stream:
            if os.fstat(handle).st_mode & 0o077:
                raise ConfigError(
                    f"trainer.default_local_dir={file.parent}: this file system lets other users read every file, also "
                    f"the secret of the run's cluster; choose another directory, or {OTHER_WAY}"
                )
            stream.write(text)
            stream.flush()
            os.fsync(handle)
        beside.replace(file)
    except OSError as error:
        raise ConfigError(
            f"trainer.default_local_dir={file.parent}: the secret of the run's cluster cannot be written there "
            f"({error.strerror}); choose another directory, or {OTHER_WAY}"
        ) from error
    finally:
        beside.unlink(missing_ok=True)


def read_secret(file: Path) -> str | None:
    """None: it does not exist yet, or is not visible yet."""
    try:
        return file.read_text().strip() or None
    except PermissionError as error:
        raise ConfigError(
            f"{file} cannot be read by this user; run every machine as the same user, or {OTHER_WAY}"
        ) from error
    except OSError:
        return None


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
