"""`rloom openrlhf` trains, and writes the policy where OpenRLHF does."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from rloom.cli import train_ppo_ray
from tests.e2e.runs import SMALL, records

KEYS = [one for one in SMALL if one.startswith(("data.train_max", "reward_model", "trainer.device"))]


def test_a_command_of_openrlhf_trains_with_its_reward_function_and_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rloom.launch.run.draw_learning_curve", lambda metrics_file, picture: picture)
    (tmp_path / "prompts.jsonl").write_text(
        '{"input": "1 + 2 =", "answer": "3"}\n{"input": "2 + 2 =", "answer": "4"}\n'
    )
    (tmp_path / "rewards.py").write_text(
        "def reward_func(queries, prompts, labels):\n"
        "    assert prompts[0] in ('Q: 1 + 2 =', 'Q: 2 + 2 =') and labels[0] in '34'\n"
        "    return {'rewards': [float(len(queries[0]) % 3)], 'extra_logs': {'characters': len(queries[0])}}\n"
    )
    flags = "--rollout_batch_size 2 --n_samples_per_prompt 2 --train_batch_size 2 --micro_train_batch_size 1"
    flags += " --micro_rollout_batch_size 2 --advantage_estimator rloo --max_len 14 --label_key answer"
    flags += f" --prompt_data {tmp_path}/prompts.jsonl --remote_rm_url {tmp_path}/rewards.py"
    # OpenRLHF's scripts write the policy into the folder above that of the run
    paths = ["--ckpt_path", f"{tmp_path}/policy/run", "--save_path", f"{tmp_path}/policy"]
    assert train_ppo_ray.main([*flags.split(), *paths, "--input_template", "Q: {}", *KEYS]) == 0
    [step] = records(tmp_path / "policy" / "run")
    assert step["prompt_length/max"] + step["response_length/max"] <= 14
    assert step["reward/failed"] == 0 and step["reward/characters"] > len("Q: 1 + 2 =")
    assert step["critic/advantages/mean"] == pytest.approx(0, abs=1e-5)  # normalised
    trained = load_file(tmp_path / "policy" / "run" / "global_step_1" / "actor" / "model.safetensors")
    policy = load_file(tmp_path / "policy" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert (policy[name].float() == trained[name].bfloat16().float()).all()
