"""`rloom chat MODEL [key=value ...]`"""

import argparse
import contextlib
import json
import sys
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rloom.cli.parsing import CommandParser, epilog
from rloom.console import run_safely
from rloom.errors import ConfigError, DataError
from rloom.language import translate
from rloom.terminal import printable

if TYPE_CHECKING:
    from rloom.api.generation import ChatSession

HELP = "/reset clears the conversation, /quit or ctrl-D ends it, ctrl-C stops an answer."
WATCH_HELP = "Each line is the prompt of an episode; /quit or ctrl-D ends, ctrl-C stops an episode."
MARK = "> "


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "rloom chat",
        description=f"Talk to a model that was trained. In a conversation: {HELP}",
        **epilog('rloom chat outputs/checkpoints/embedded/global_step_32 --prompt "15 + 27 等于多少？"'),
    )
    parser.add_argument(
        "model", help="a checkpoint (global_step_N), a run directory, a Hugging Face folder, a hub name or `embedded`"
    )
    parser.add_argument("--prompt", metavar="TEXT", help="print one answer and end")
    parser.add_argument("--system", metavar="TEXT", help="system message of the conversation")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--max_tokens", type=int, help="of an answer; default: data.max_response_length")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--environment",
        metavar="NAME",
        help="watch episodes: each prompt begins one with this environment (a name, or file.py:name), or with `saved`, "
        "what the run itself had",
    )
    parser.add_argument("--row", metavar="JSON", help='columns that the environment reads: {"number": 7}')
    parser.add_argument("keys", nargs="*", metavar="key=value", help="changes to the configuration")
    given = parser.parse_intermixed_args(arguments)
    return run_safely(lambda: chat(given))


def chat(given: argparse.Namespace) -> int:
    interactive = given.prompt is None and sys.stdin.isatty()
    if interactive:
        print(f"Loading {given.model} ...", file=sys.stderr, flush=True)
        with contextlib.suppress(ImportError):  # line editing; not part of every Python
            import readline  # noqa: F401
    if given.environment is not None:
        return watch(given, MARK if interactive else "")
    from rloom.api.generation import ChatSession, open_model, sampling_of

    with open_model(given.model, given.keys) as generator:
        sampling = sampling_of(generator, given.max_tokens, given.temperature, given.top_p)
        conversation = ChatSession(generator, sampling, system=given.system, seed=given.seed)
        if given.prompt is not None:
            show(conversation, given.prompt)
            return 0
        if interactive:
            print(translate(HELP), file=sys.stderr, flush=True)
        converse(conversation, MARK if interactive else "")
    return 0


def watch(given: argparse.Namespace, mark: str) -> int:
    from rloom.api.generation import open_episode_session, sampling_of

    with open_episode_session(given.model, given.environment, given.keys, row=row_of(given.row)) as session:
        sampling = sampling_of(session.generator, given.max_tokens, given.temperature, given.top_p)
        if mark and given.prompt is None:
            print(translate(WATCH_HELP), file=sys.stderr, flush=True)
        for text in [given.prompt] if given.prompt is not None else lines(mark):
            if text == "/quit":
                break
            with contextlib.suppress(KeyboardInterrupt):
                print_pieces(session.watch(text, sampling, given.seed))
    return 0


def row_of(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"--row={text}: it is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f'--row={text}: give an object such as {{"number": 7}}')
    return found


def converse(conversation: "ChatSession", mark: str) -> None:
    for text in lines(mark):
        if text == "/quit":
            return
        if text == "/reset":
            conversation.reset()
            continue
        try:
            show(conversation, text)
        except KeyboardInterrupt:
            print()
        except DataError as error:  # such as a conversation that is longer than the model's context
            print(printable(translate(f"{error}. /reset clears the conversation.")), file=sys.stderr, flush=True)


def lines(mark: str) -> Iterator[str]:
    """What the user enters, without empty lines, until the end of the input."""
    while True:
        try:
            text = input(mark).strip()
        except EOFError:
            print() if mark else None
            return
        if text:
            yield text


def show(conversation: "ChatSession", text: str) -> None:
    print_pieces(conversation.answer(text))
    print(flush=True)


def print_pieces(found: Generator[str, None, None]) -> None:
    with contextlib.closing(found) as pieces:
        for piece in pieces:
            print(printable(piece), end="", flush=True)
