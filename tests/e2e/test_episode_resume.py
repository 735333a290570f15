"""A run that is killed in the middle of an episode goes on as if it had not been: none is trained twice or lost."""

import os
import textwrap
from pathlib import Path

import pytest

from tests.e2e.runs import fork, records, same, train, weights
from tests.waiting import wait_until

GAME = textwrap.dedent(
    """
    import os, random, time
    from pathlib import Path

    def turn(folder):
        with open(folder / "calls", "ab") as file:
            file.write(b"x")
        block = folder / "block"  # holds a number of calls
        while block.exists() and (folder / "calls").stat().st_size > int(block.read_text()):
            (folder / "blocked").touch()
            time.sleep(0.05)

    class Game:
        def __init__(self, folder):
            self.folder = Path(folder)

        def reset(self, **row):
            self.number, self.left = random.randint(1, 9), 3

        def step(self, text):
            turn(self.folder)
            self.left -= 1
            return "+", float(str(self.number) in text), self.left == 0

    def agent(base_url, row, folder, **kwargs):
        from openai import OpenAI  # environments need not import it

        messages, texts = list(row["prompt"]), []
        for _ in range(3):
            found = OpenAI().chat.completions.create(model="policy", messages=messages, max_tokens=8)
            texts.append(found.choices[0].message.content or "")
            messages += [{"role": "assistant", "content": texts[-1]}, {"role": "user", "content": "+"}]
            turn(Path(folder))
        return len("".join(texts)) % 5 / 4
    """
)
SECTION = "actor_rollout_ref.rollout"
NOT_COMPARED = (
    "timing",
    "time/",
    "perf/",
    "memory",
    "rollout_corr",
    "rollout_probs",
    "rollout_logprobs",
    "throughput",
    "seconds",
)


def computed(folder: Path) -> list[dict[str, float]]:
    """Metrics of the steps. The engine's log-probs may differ in the last digit: other requests are in its batches."""
    return [
        {name: value for name, value in row.items() if not any(part in name for part in NOT_COMPARED)}
        for row in records(folder)
        if "training/global_step" in row
    ]


ENVIRONMENT = (("multi_turn.environment={}:Game", "multi_turn.environment_kwargs.folder={}"), 24)
AGENT = (("agent.path={}:agent", "agent.kwargs.folder={}"), 96)


@pytest.mark.parametrize(
    ("keys", "tokens", "workers"),
    [
        pytest.param(*ENVIRONMENT, 1, id="environment"),
        pytest.param(*ENVIRONMENT, 2, marks=pytest.mark.long, id="environment, two workers"),
        pytest.param(*AGENT, 1, marks=pytest.mark.long, id="agent"),
    ],
)
def test_a_run_that_is_killed_in_an_episode_goes_on_as_one_that_was_not(
    tmp_path: Path, keys: tuple[str, str], tokens: int, workers: int
) -> None:
    file = tmp_path / "game.py"
    file.write_text(GAME)
    overrides = (
        f"{SECTION}.{keys[0].format(file)}",
        f"{SECTION}.{keys[1].format(tmp_path)}",
        f"{SECTION}.multi_turn.tool_timeout_s=600",
        f"data.max_response_length={tokens}",
        "algorithm.adv_estimator=rloo",
        f"trainer.n_gpus_per_node={workers}",
    )
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    train(whole, 2, *overrides)
    calls = (tmp_path / "calls").stat().st_size
    (tmp_path / "calls").unlink()
    (tmp_path / "block").write_text(str(calls * 3 // 4))  # in the second of two steps
    process = fork(killed, 2, *overrides)
    wait_until(lambda: (tmp_path / "blocked").exists() or not process.is_alive(), 240)
    assert (tmp_path / "blocked").exists(), killed.with_suffix(".log").read_text()[-2000:]
    assert process.pid is not None
    os.kill(process.pid, 9)
    process.join()
    assert len(computed(killed)) == 1
    (tmp_path / "block").unlink()
    train(killed, 2, *overrides)
    assert computed(killed) == computed(whole)
    files = (
        ["model.safetensors"] if workers == 1 else [f"model_shards/rank_{rank}.safetensors" for rank in range(workers)]
    )
    assert all(same(weights(killed, 2, file=file), weights(whole, 2, file=file)) for file in files)
