"""What `rloom plan` says about keys that make learning slow."""

import pytest

from rloom.config.load import load_config
from rloom.plan.make import make_plan


@pytest.mark.parametrize(
    ("keys", "advice"),
    [
        # 0.95^58 = 0.051, 0.95^59 = 0.0485
        (("algorithm.lam=0.95",), "algorithm.lam=0.95: the reward reaches about the last 58 tokens of an answer"),
        # 0.99^298 = 0.0500, 0.99^299 = 0.0495
        (
            ("algorithm.adv_estimator=remax", "algorithm.gamma=0.99"),
            "algorithm.gamma=0.99: the reward reaches about the last 298 tokens of an answer",
        ),
        (("algorithm.lam=1.0",), None),
        (("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2"), None),
        (("algorithm.lam=0.95", "data.max_response_length=48"), None),  # 0.95^48 = 0.085
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_reward_that_cannot_reach_the_first_tokens_is_a_note(
    keys: tuple[str, ...], advice: str | None, device: str
) -> None:
    config = load_config(["data.max_response_length=448", *keys, f"trainer.device={device}"])
    notes = make_plan(config).notes
    found = [note for note in notes if "the reward reaches" in note]
    assert [note.split(" (5 %")[0] for note in found] == ([] if advice is None else [advice])
    assert all("answers may have 448; if they are longer than that, use algorithm." in note for note in found)
