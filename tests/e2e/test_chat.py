"""`rloom chat`, through a pipe and through a terminal."""

import io
import os
import pty
import select
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import rloom
from rloom import cli
from rloom.api.generation import ChatSession, open_episode_session, open_model, sampling_of
from rloom.rollout.native.engine import NativeRollout
from tests.e2e.runs import train
from tests.ranks import forkserver

QUESTION = "12 + 20 等于多少？"


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("chat")
    train(directory, 1, "algorithm.adv_estimator=grpo")
    return directory


def test_one_prompt_is_answered_as_in_python(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = run_directory / "global_step_1"
    assert cli.main(["chat", str(checkpoint), "--prompt", QUESTION, "trainer.device=cpu"]) == 0
    said = capsys.readouterr().out
    [expected] = rloom.generate(run_directory, [QUESTION], keys=["trainer.device=cpu"])
    assert said == f"{expected}\n" and "2+0=2" in said.replace("0+2", "2+0")


def test_lines_of_a_pipe_are_turns_of_one_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answers(*lines: str) -> list[str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        assert cli.main(["chat", "embedded", "--max_tokens", "24", "trainer.device=cpu"]) == 0
        return capsys.readouterr().out.splitlines()

    once = answers(QUESTION)
    assert answers(QUESTION, "", "/reset", QUESTION, "/quit", "not read") == once * 2
    assert answers(QUESTION, QUESTION) != once * 2, "the second answer depends on the first turn"


def test_an_answer_comes_in_pieces_and_the_conversation_remembers_it() -> None:
    with open_model("embedded", ["trainer.device=cpu"]) as generator:
        conversation = ChatSession(generator, sampling_of(generator, None, 0.0), system="Be brief.")
        pieces = list(conversation.answer(QUESTION))
        assert len(pieces) > 5 and all("\ufffd" not in piece for piece in pieces)
        assert conversation.messages == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": "".join(pieces)},
        ]
        [whole] = generator.answers([conversation.messages[:2]], sampling_of(generator, None, 0.0), seed=0)
        assert "".join(pieces) == whole
        stopped = conversation.answer(QUESTION)
        begun = next(stopped)
        stopped.close()
        assert conversation.messages[-1]["content"] == begun
        conversation.reset()
        assert len(conversation.messages) == 1 and "".join(conversation.answer(QUESTION)) == whole


def test_a_conversation_over_the_models_context_goes_on_after_a_reset(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{'1 + ' * 300}\n{QUESTION}\n"))
    assert cli.main(["chat", "embedded", "--max_tokens", "8", "trainer.device=cpu"]) == 0
    said = capsys.readouterr()
    assert "the model supports 512 together" in said.err and "/reset clears the conversation." in said.err
    assert len(said.out.strip()) > 0


def test_a_model_that_is_not_there_is_an_error_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["chat", str(tmp_path), "--prompt", "1"]) == 2
    assert "is no checkpoint (global_step_N), no run directory with checkpoints" in capsys.readouterr().err
    assert cli.main(["chat", "embedded", "--prompt", "1", "--temperature", "-1", "trainer.device=cpu"]) == 2
    assert "temperature=-1.0: use 0 (greedy) or more" in capsys.readouterr().err


@pytest.mark.long
def test_in_a_terminal_it_prompts_answers_and_ends_with_ctrl_d() -> None:
    ours, theirs = pty.openpty()
    process = forkserver().Process(target=chat_in_terminal, args=(os.ttyname(theirs),))
    process.start()
    try:
        shown = read_until(ours, b"\n> ")
        assert 0 <= shown.find(b"Loading embedded ...") < shown.find(b"/reset clears the conversation")
        os.write(ours, f"{QUESTION}\n".encode())
        assert "20" in read_until(ours, b"\n> ").decode()
        os.write(ours, b"\x04")
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
        os.close(theirs)
        os.close(ours)


def chat_in_terminal(name: str) -> None:
    os.setsid()
    terminal = os.open(name, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(terminal, descriptor)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in enumerate("rww"))
    sys.exit(cli.main(["chat", "embedded", "--max_tokens", "24", "trainer.device=cpu"]))


def read_until(terminal: int, end: bytes, timeout_s: float = 120.0) -> bytes:
    found, deadline = b"", time.monotonic() + timeout_s
    while end not in found:
        assert time.monotonic() < deadline, found
        if select.select([terminal], [], [], 0.1)[0]:
            found += os.read(terminal, 4096).replace(b"\r\n", b"\n")
    return found


def test_an_episode_is_shown_turn_by_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "game.py"
    file.write_text(
        "class Game:\n"
        "    def reset(self, secret=0, **row):\n"
        "        self.secret, self.turn = secret, 0\n"
        '        return f\' [{row["prompt"][0]["content"]}]\'\n'
        "    def step(self, text):\n"
        "        self.turn += 1\n"
        "        return f'seen {self.secret}', 0.25, self.turn == 2\n"
    )
    arguments = ["--prompt", QUESTION, "--row", '{"secret": 7}', "trainer.device=cpu", "data.max_response_length=200"]
    assert cli.main(["chat", "embedded", "--environment", f"{file}:Game", *arguments]) == 0
    said = capsys.readouterr().out
    first, rest = said.split("[reward] 0.25\n", 1)
    assert first.startswith("[turn 1] ") and rest.startswith("[user] seen 7\n[turn 2] ")
    assert said.endswith("[reward] 0.25\n[end] done; turns: 2, reward 0.5\n")


def test_an_episode_has_turns_of_max_tokens_and_leaves_no_cache(tmp_path: Path) -> None:
    file = tmp_path / "game.py"
    file.write_text("class Game:\n    def reset(self, **row): ...\n    def step(self, text): return 'no', 0.0, False\n")
    with open_episode_session("embedded", f"{file}:Game", ["trainer.device=cpu"]) as session:
        sampling = sampling_of(session.generator, 3, 0.0)
        for seed in range(2):
            said = "".join(session.watch(QUESTION, replace(sampling, ignore_eos=True), seed))
            assert said.endswith("[end] turn token limit; turns: 1, reward 0\n")
            rollout = session.generator.rollout
            assert isinstance(rollout, NativeRollout) and rollout.session is None


def test_an_environment_that_fails_is_said_and_a_wrong_row_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "game.py"
    file.write_text("class Game:\n    def reset(self, **row): 1 / 0\n    def step(self, text): ...\n")
    chat = ["chat", "embedded", "--environment", f"{file}:Game", "--prompt", QUESTION, "trainer.device=cpu"]
    assert cli.main(chat) == 0
    assert (
        "ZeroDivisionError: division by zero (game.py:2 in Game.reset); turns: 0, no reward" in capsys.readouterr().out
    )
    assert cli.main([*chat, "--row", "[1]"]) != 0
    assert "--row=[1]: give an object" in capsys.readouterr().err


def test_a_run_without_an_environment_has_none_to_show(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chat", str(run_directory), "--environment", "saved", "trainer.device=cpu"]) != 0
    assert "was trained without an environment" in capsys.readouterr().err
