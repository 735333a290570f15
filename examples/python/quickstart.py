"""Train with a function of this program as the reward: no data file, no reward file, no model to download.

The embedded model ends its answers with "答案：46" or with "Answer: 46". The reward here is 1 for the English form.
The sums are not checked, and they do not become more accurate.
"""

import sys

import rloom

rows = [{"prompt": f"{a} + {b} = ?"} for a in range(10, 50) for b in range(10, 50)]

result = rloom.train(
    [
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.total_training_steps=8",
        *sys.argv[1:],
    ],
    train=[row for number, row in enumerate(rows) if number % 50],
    validation=rows[::50],
    reward=lambda completions, **columns: [float("Answer:" in text) for text in completions],  # as in TRL
    callbacks=[lambda report: print(f"  {report.answers[0].score} for {report.answers[0].text!r}")],
)

print(result)
print(rloom.generate(result.checkpoint, ["12 + 34 = ?"]))
