"""Train with a function of this program as the reward: no data file, no reward file, no model to download.

The embedded model learns to give short answers. It takes about a minute on a laptop's CPU.
"""

import rloom

rows = [{"prompt": f"{a} + {b} 等于多少？", "answer": str(a + b)} for a in range(10, 50) for b in range(10, 50)]

result = rloom.train(
    {"algorithm.adv_estimator": "grpo", "trainer.total_training_steps": 10, "trainer.experiment_name": "quickstart"},
    train=rows,
    validation=rows[:64],
    reward=lambda completions, answer, **_: [float(text.endswith(a)) for text, a in zip(completions, answer)],
    callbacks=[lambda report: print("  ", repr(report.answers[0].text), report.answers[0].score)],
)

print(result)
print(rloom.generate(result.checkpoint, ["12 + 34 等于多少？"]))
