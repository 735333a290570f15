"""Log-probs of a scoring pass over episodes of several turns and branches are those that the engine recorded."""

import random
from contextlib import closing

import pytest

from rloom.batch import Batch
from rloom.episodes.base import EpisodeLimits
from rloom.episodes.record import episode_trajectories
from rloom.episodes.runner import EpisodeRow, EpisodeRunner, LimitReached
from rloom.episodes.template import TurnTemplate
from rloom.episodes.writer import Texts
from rloom.rollout.base import Sampling
from rloom.types import Prompt, Score
from tests.helpers import FAMILIES, engine_of, policy, save_model
from tests.moe import MOE_FAMILIES
from tests.paged_engine import in_torch, paged_rollout
from tests.unit.episodes.conversations import tokenizer_for

__all__ = ["in_torch"]  # a fixture
pytest.importorskip("triton")
VOCABULARY, STOP = 40, 7


class TokensDriver:
    """An agent that sends tokens: it goes on from its answers, at times without their last tokens, and at times from
    the middle of its history."""

    async def run(self, run) -> None:
        draw = random.Random(run.row.row)
        tokens = [draw.randrange(10, VOCABULARY) for _ in range(4)]
        try:
            for _ in range(5):
                answer = await run.answer(run.writer.read_tokens(tokens), max_tokens=draw.randrange(1, 6))
                tokens = run.writer.episode.tokens(answer)
                if draw.random() < 0.3:
                    tokens = tokens[:-2]
                tokens = [*tokens, draw.randrange(10, VOCABULARY)]
                if draw.random() < 0.3:
                    tokens = tokens[len(tokens) // 2 :]
        except LimitReached as reached:
            run.ending = reached.ending

    async def end(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("pages", [None, 14, 24], ids=["slots", "14 pages", "24 pages"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe", "mixtral"])
@pytest.mark.usefixtures("in_torch")
def test_a_scoring_pass_gives_the_recorded_logprobs_of_a_cache_that_is_reused(family, pages, tmp_path):
    """With 14 pages of 4 tokens, sequences are preempted and kept ones evicted."""
    config = MOE_FAMILIES[family]() if family in MOE_FAMILIES else FAMILIES[family]()
    network = policy(save_model(tmp_path, config))
    engine = engine_of(network)
    rollout = paged_rollout(network, pages=pages, max_sequences=4, records_routing=family in MOE_FAMILIES)
    rollout.uses_graphs = pages is not None
    rollout.expect(12, 12, 40)
    texts = Texts(TurnTemplate(tokenizer_for("chatml")), lambda tokens: "", {STOP: "."})
    runner = EpisodeRunner(TokensDriver(), texts, EpisodeLimits(40))
    prompts = [Prompt(n, (), "", (), "") for n in range(12)]
    rows = [EpisodeRow(n, 0, prompt, lambda turn, n=n: 100 * n + turn) for n, prompt in enumerate(prompts)]
    records = {}
    with (
        closing(runner),
        closing(rollout.generate_stream()) as stream,
        runner.started(rows, Sampling(40, stop_ids=(STOP,)), shares=1) as turns,
    ):
        next(stream)
        while (items := turns.next_requests(0)) is not None:
            for index, completion in stream.send(items):
                turns.complete(0, index, completion)
        records |= dict(turns.take_finished())
    reused, requested = (
        sum(getattr(record, name) for record in records.values()) for name in ("reused_tokens", "requested_tokens")
    )
    assert 20 < reused < requested  # how many depends on the order in which the episodes ask
    found = [t for n in range(12) for t in episode_trajectories(records[n], prompts[n], n, Score(1.0))]
    assert max(t.branch for t in found) >= 1 and max(len(t.turns) for t in found) >= 3
    assert sum(record.reused_tokens for record in records.values()) > 0  # keys and values of the turns before
    for one in found:  # the experts of every token before the last one that was sampled
        assert one.experts_LMK is None or bool((one.experts_LMK[: one.turns[-1].stop - 1] >= 0).all())
    batch = Batch.pack(found)
    assert (batch.experts_TMK is not None) == (family in MOE_FAMILIES)
    difference_A = (engine.score(batch) - batch.rollout_logprobs_T)[batch.mask_T].abs()
    assert float(difference_A.max()) < 1e-4
    # planted: a token of the environment is another one than the engine had
    other = Batch.pack(found)
    place = int((~other.mask_T).nonzero()[1])
    other.tokens_T[place] = 10 + (int(other.tokens_T[place]) - 9) % 30
    assert float((engine.score(other) - other.rollout_logprobs_T)[other.mask_T].abs().max()) > 1e-3
