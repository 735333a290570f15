"""A training loop of one's own: GRPO. Its numbers equal those of `rloom train` with the same keys."""

import sys

import rloom


def train(keys: list[str], steps: int) -> list[dict[str, float]]:
    history = []
    with rloom.open_run(["algorithm.adv_estimator=grpo", *keys]) as run:
        for step in range(1, steps + 1):
            # generate and score
            trajectories = run.answer(run.next_prompts(), step)
            batch = rloom.Batch.pack(trajectories)

            # scores -> advantages: T tokens of all answers, packed
            old_logprobs_T = run.policy.scorer.score(batch)
            inputs = rloom.AdvantageInputs(batch, rewards_T=rloom.token_rewards(batch))
            found = rloom.ALGORITHMS["grpo"].estimate(inputs, run.advantage_settings)

            # update the policy, then generate with its new weights
            train_batch = rloom.TrainBatch.of(batch, found, old_logprobs_T=old_logprobs_T)
            metrics = run.policy.learn(train_batch, step)
            run.sync_weights(step)

            history.append({"critic/score/mean": float(batch.score_N.mean()), **metrics})
            print(step, {name: round(history[-1][name], 4) for name in ("critic/score/mean", "actor/pg_loss")})
        print(run.save(steps))
    return history


if __name__ == "__main__":
    train(sys.argv[1:], steps=4)
