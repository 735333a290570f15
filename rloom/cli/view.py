"""`rloom view RUN...`"""

import argparse
import getpass
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rloom.cli.parsing import RUNS_FOLDERS, CommandParser, default_run_folders, epilog
from rloom.console import OK, run_safely
from rloom.errors import ConfigError
from rloom.language import translate

if TYPE_CHECKING:
    from rloom.view.access import ViewAccess
    from rloom.view.run_cache import RunCache
    from rloom.view.server import ViewServer

FIRST_PORT, TRIED_PORTS = 8817, 20
LAST_PORT = 65_535
ADDRESS = "127.0.0.1"


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "rloom view",
        description="Show runs in the browser: curves, prompts, answers token by token, validations, findings. Reads "
        "run directories, also of a run that goes on, and writes nothing but the tags that you give to runs.",
        **epilog("rloom view checkpoints/rloom/gsm8k", "0 ended by ctrl-C · 2 an error that you can correct"),
    )
    parser.add_argument(
        "run", nargs="*", type=Path, help=f"a run directory, or a folder above several ({' and '.join(RUNS_FOLDERS)})"
    )
    parser.add_argument(
        "--port", type=int, help=f"of {ADDRESS}; 0: any free one (default: {FIRST_PORT}, or the next that is free)"
    )
    parser.add_argument("--host", default=ADDRESS, help=f"{ADDRESS}, nothing else: from elsewhere, use ssh -L")
    parser.add_argument("--no-open", action="store_true", help="do not open the browser")
    given = parser.parse_args(arguments)
    return run_safely(lambda: view(given))


def view(given: argparse.Namespace) -> int:
    from rloom.view.access import ViewAccess, choose_token
    from rloom.view.run_cache import RunCache, preload

    if given.host != ADDRESS:
        raise ConfigError(
            f"--host {given.host}: the viewer listens on {ADDRESS} only, because answers of a run are not for everyone "
            f"in the network; from another machine, use `ssh -L {FIRST_PORT}:{ADDRESS}:{FIRST_PORT} HOST`"
        )
    access = ViewAccess(choose_token(os.environ))
    runs = RunCache([run.expanduser() for run in given.run or default_run_folders()], defaults)
    with listen(given.port, runs, access) as server:
        print(translate(greeting(server.server_port, access.token)), flush=True)
        preload()
        if not given.no_open and has_display(os.environ):
            import webbrowser

            webbrowser.open(address(server.server_port, access.single_use_token()))
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return OK


def defaults(kind: str) -> Mapping[str, Any]:
    """The default of every key; asked for by the page of a configuration."""
    from rloom.config.given_keys import leaf_keys
    from rloom.config.schema import Config, SftConfig

    return {path: key.default for path, key in leaf_keys(SftConfig if kind == "sft" else Config).items()}


def listen(port: int | None, runs: "RunCache", access: "ViewAccess") -> "ViewServer":
    from rloom.view.server import ViewServer

    if port is not None and not 0 <= port <= LAST_PORT:
        raise ConfigError(f"--port {port}: use a number from 0 to {LAST_PORT}")
    for candidate in [port] if port is not None else range(FIRST_PORT, FIRST_PORT + TRIED_PORTS):
        try:
            return ViewServer(candidate, runs, access)
        except OSError as error:
            fault = error
    tried = f"--port {port}" if port is not None else f"ports {FIRST_PORT} to {FIRST_PORT + TRIED_PORTS - 1}"
    raise ConfigError(f"{tried}: cannot listen on {ADDRESS} ({fault.strerror}); choose another --port, or 0 for any")


def address(port: int, token: str) -> str:
    return f"http://{ADDRESS}:{port}/?token={token}"


def greeting(port: int, token: str) -> str:
    forward = f"ssh -N -L {port}:{ADDRESS}:{port} {_user()}@{socket.gethostname()}"
    return f"{address(port, token)}\nfrom another machine: {forward}\nctrl-C ends it"


def has_display(environment: Mapping[str, str]) -> bool:
    """Whether a browser that is started here appears before the user; without a display, a text browser may start."""
    if "SSH_CONNECTION" in environment:
        return False
    return sys.platform in ("darwin", "win32") or bool({"DISPLAY", "WAYLAND_DISPLAY"} & environment.keys())


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return "USER"
