"""Episodes with real environment processes and an engine that answers from a script."""

import textwrap
from contextlib import closing
from itertools import count

import pytest

from rloom.algos.aggregate import Counts, aggregate, episode_tokens
from rloom.algos.estimators import AdvantageInputs, AdvantageSettings, grpo, rloo
from rloom.algos.kl import token_rewards
from rloom.batch import Batch
from rloom.episodes.base import EnvironmentSetup, EpisodeLimits
from rloom.episodes.pool import EnvironmentPool
from rloom.episodes.record import Ending, episode_trajectories
from rloom.episodes.runner import EnvironmentDriver, EpisodeRow, EpisodeRunner
from rloom.rollout.base import Sampling
from rloom.types import Prompt, Score
from tests.unit.episodes.conversations import TEMPLATES, encode, tokenizer_for
from tests.unit.episodes.engines import answer_all, completed, texts_for

ENVIRONMENT = textwrap.dedent(
    """
    import os, subprocess, sys, time

    class Game:
        def reset(self, folder="", **row):
            self.folder, self.turn = folder, 0
            self.note("made")

        def note(self, what):
            if self.folder:
                with open(os.path.join(self.folder, what), "a") as file:
                    file.write("x")

        def step(self, text):
            self.turn += 1
            if text == "raise":
                raise ValueError("no such move")
            if text == "exit":
                os._exit(3)
            if text == "hang":
                while True:
                    time.sleep(0.01)
            if text == "hang for ever":
                while True:
                    try:
                        time.sleep(0.01)
                    except Exception:
                        pass
            if text == "fork":
                child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
                self.folder and open(os.path.join(self.folder, "child"), "w").write(str(child.pid))
                os._exit(3)
            if text == "print":
                sys.stdout.write("x" * 10_000_000)
            if text == "long":
                return "y" * 10_000_000, 0.0, False
            return "seen", 0.25, text == "done"

        def close(self):
            self.note("closed")
    """
)


@pytest.fixture(scope="module")
def environment_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("environment") / "game.py"
    file.write_text(ENVIRONMENT)
    return file


def run(environment_file, scripts, *, name="chatml", limits=None, rows=None, most=8, turns=8):
    """Episodes whose answers are those of `scripts`; the records in their order, and the sampled tokens of each."""
    limits = limits or EpisodeLimits(400_000, turns=turns, call_s=60.0, result_characters=20)
    pool = EnvironmentPool(EnvironmentSetup(f"{environment_file}:Game", {}, limits), most=most)
    assert pool.load() == ()
    stop = encode(TEMPLATES[name][1], name)
    runner = EpisodeRunner(EnvironmentDriver(pool, ()), texts_for(name), limits)
    prompts = [
        Prompt(n, ({"role": "user", "content": "guess"},), "", (), "game", columns=(rows or {}).get(n, {}))
        for n in range(len(scripts))
    ]
    planned = [EpisodeRow(n, 0, prompt, lambda turn, n=n: 1000 * n + turn) for n, prompt in enumerate(prompts)]
    sampled: list[list[int]] = [[] for _ in scripts]
    turn_of = [count() for _ in scripts]

    def answer(index, request):
        number = request.conversation
        turn = next(turn_of[number])
        completion = completed(index, request, [*encode(scripts[number][turn], name), *stop], -1.0, turn)
        sampled[number] += completion.tokens_L.tolist()
        return completion

    with closing(runner), runner.started(planned, Sampling(100), shares=1) as turns:
        records = answer_all(turns, answer)
    return [records[n] for n in range(len(scripts))], sampled, prompts


def test_turns_and_what_is_between_them_are_one_trajectory(environment_file):
    [record], [sampled], [prompt] = run(environment_file, [["7", "8", "done"]])
    assert (record.ending, record.reward, record.turns, record.rewritten) == (Ending.DONE, 0.75, 3, 0)
    [trajectory] = episode_trajectories(record, prompt, 0, Score(0.75))
    assert trajectory.answer_tokens == sampled
    assert trajectory.text == "7\n8\ndone" and trajectory.finished
    seen = "<|im_start|>user\nguess<|im_end|>\n<|im_start|>assistant\n7<|im_end|>\n<|im_start|>user\nseen<|im_end|>\n"
    assert tokenizer_for("chatml").decode(trajectory.tokens_L).startswith(seen)
    assert [turn.version for turn in trajectory.turns] == [0, 1, 2]
    assert trajectory.logprobs_L[trajectory.mask_L].tolist() == [
        -1,
        -2,
        -1,
        -2,
        *range(-1, -len(encode("done", "chatml")) - 2, -1),
    ]
    assert not trajectory.logprobs_L[~trajectory.mask_L].any()


def test_rewards_of_turns_are_at_their_last_tokens(environment_file):
    [record], _, [prompt] = run(environment_file, [["7", "done"]])
    trajectory = episode_trajectories(record, prompt, 0, Score(0.5))[0]
    rewards_T = token_rewards(Batch.pack([trajectory]))
    last = [turn.stop - 1 for turn in trajectory.turns]
    assert rewards_T[last].tolist() == [0.25, 0.25] and rewards_T.sum() == 0.5
    # a mix in which they count half: the rest of the score is at the end
    mixed = token_rewards(Batch.pack(episode_trajectories(record, prompt, 0, Score(0.9), turn_weight=0.5)))
    assert mixed[last].tolist() == pytest.approx([0.125, 0.775])
    other = token_rewards(Batch.pack(episode_trajectories(record, prompt, 0, Score(0.9), turn_weight=0.0)))
    assert other[last].tolist() == pytest.approx([0.0, 0.9])


def test_a_rewritten_past_begins_a_branch_and_every_sampled_token_is_trained_once(environment_file):
    script = ["<think>a</think>7", "<think>b</think>8", "done"]
    [record], [sampled], [prompt] = run(environment_file, [script], name="drops reasoning")
    assert (record.rewritten, record.turns) == (2, 3)
    found = episode_trajectories(record, prompt, 0, Score(1.0))
    assert [trajectory.branch for trajectory in found] == [0, 1, 2]
    assert [token for trajectory in found for token in trajectory.answer_tokens] == sampled
    texts = [tokenizer_for("drops reasoning").decode(trajectory.tokens_L) for trajectory in found]
    assert "<think>a" in texts[0] and "<think>a" not in texts[1] and "<think>b" not in texts[2]


def trajectories_of_two_episodes(environment_file):
    """The first has three branches, the second one; scores 1 and 0; a third and a fourth of another prompt."""
    scripts = [["<think>a</think>7", "<think>b</think>8", "done"], ["done"], ["done"], ["done"]]
    records, _, prompts = run(environment_file, scripts, name="drops reasoning")
    scores = [1.0, 0.0, 3.0, 1.0]
    return [
        trajectory
        for record, prompt, group, score in zip(records, prompts, (0, 0, 1, 1), scores, strict=True)
        for trajectory in episode_trajectories(record, prompt, group, Score(score))
    ]


def test_branches_share_their_episodes_advantage_and_count_once(environment_file):
    batch = Batch.pack(trajectories_of_two_episodes(environment_file))
    assert batch.episode_N.tolist() == [0, 0, 0, 1, 2, 3] and batch.counted_N.tolist() == [1, 0, 0, 1, 1, 1]
    inputs = AdvantageInputs(batch, token_rewards(batch))
    first = [(batch.sample_T == row) & batch.mask_T for row in range(6)]
    found = rloo(inputs, AdvantageSettings()).advantages_T
    assert [float(found[mask][0]) for mask in first] == [1, 1, 1, -1, 2, -2]  # counted by row: 1/3 · 4 - ...
    found = grpo(inputs, AdvantageSettings(norm_by_std=False)).advantages_T
    assert [float(found[mask][0]) for mask in first] == [0.5, 0.5, 0.5, -0.5, 1, -1]


def test_a_mean_over_sequences_is_one_over_episodes_in_any_split(environment_file):
    batch = Batch.pack(trajectories_of_two_episodes(environment_file))
    counts = Counts.of(batch, horizon=10)
    assert counts.samples == 4
    ones_T = batch.mask_T.float()
    whole = aggregate(ones_T, with_tokens(batch), "seq-mean-token-mean", counts)
    assert float(whole) == pytest.approx(1.0)  # each episode contributes its mean of ones, divided by four
    parts = [with_tokens(batch).select(rows) for rows in ([0, 3], [1, 4], [2, 5])]
    split = sum(float(aggregate(part.mask_T.float(), part, "seq-mean-token-mean", counts)) for part in parts)
    assert split == pytest.approx(1.0)


def with_tokens(batch):
    from dataclasses import replace

    return replace(batch, episode_tokens_N=episode_tokens(batch))


def test_limits_end_an_episode_with_their_reason(environment_file):
    many = ["7"] * 9
    [by_turns], _, _ = run(environment_file, [many], limits=EpisodeLimits(400, turns=3, call_s=60.0))
    assert (by_turns.ending, by_turns.turns, by_turns.reward) == (Ending.TURNS, 3, 0.75)
    [by_tokens], _, [prompt] = run(environment_file, [many], limits=EpisodeLimits(40, call_s=60.0))
    assert by_tokens.ending is Ending.TOKENS
    [trajectory] = episode_trajectories(by_tokens, prompt, 0, Score(1.0))
    assert len(trajectory.tokens_L) - trajectory.turns[0].start <= 40 + 20  # what the environment added last
    assert not trajectory.finished
    whole = trajectory.turns[0].start + 40  # of the prompt and what follows
    [by_both], _, _ = run(environment_file, [many], limits=EpisodeLimits(400, call_s=60.0, total_tokens=whole))
    assert (by_both.ending, by_both.turns) == (Ending.TOKENS, by_tokens.turns)
    [by_turn_tokens], _, _ = run(
        environment_file, [["guess" * 20]], limits=EpisodeLimits(400, call_s=60.0, turn_tokens=5)
    )
    assert (by_turn_tokens.ending, by_turn_tokens.turns) == (Ending.TURN_TOKENS, 1)


def test_replies_of_the_environment_and_tokens_of_all_branches_have_limits(environment_file):
    [by_replies], _, _ = run(environment_file, [["7"] * 9], limits=EpisodeLimits(400, user_turns=2, call_s=60.0))
    assert (by_replies.ending, by_replies.turns) == (Ending.USER_TURNS, 3)  # the last reply is answered
    script = [f"<think>{'a' * 10}</think>7"] * 9
    limits = EpisodeLimits(400, call_s=60.0, episode_tokens=150)
    [record], _, _ = run(environment_file, [script], name="drops reasoning", limits=limits)
    assert record.ending is Ending.EPISODE_TOKENS and record.rewritten >= 1
    sizes = [len(node.tokens_L) for node in record.episode.nodes]
    assert sum(sizes) - sizes[0] <= 150 + sizes[-1]
    answers = [node for node in record.episode.nodes if node.sampled]
    until_last = sum(sizes[: record.episode.nodes.index(answers[-1]) + 1]) - sizes[0]
    assert until_last <= 150


def test_an_environment_that_cannot_begin_is_an_episode_without_turns(environment_file):
    [record], _, [prompt] = run(environment_file, [["7"]], rows={0: {"folder": "/nowhere"}})
    assert record.ending is Ending.FAILED and "FileNotFoundError" in record.failure
    [trajectory] = episode_trajectories(record, prompt, 0, Score(1.0))
    assert trajectory.turns == () and not trajectory.score.ok


def test_an_episode_whose_time_ends_in_a_step_keeps_the_rewards_it_has(environment_file):
    limits = EpisodeLimits(400, call_s=30.0, episode_s=6.0)
    [record, other], _, _ = run(environment_file, [["7", "hang"], ["7", "done"]], limits=limits)
    assert (record.ending, record.reward, record.turns, record.failure) == (Ending.TIME, 0.25, 2, None)
    assert (other.ending, other.reward) == (Ending.DONE, 0.5)
