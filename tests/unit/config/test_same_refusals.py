"""`rloom plan` and `rloom train` check the keys by the same rules, before torch loads."""

import subprocess
import sys

import pytest

from rloom import cli
from tests.architecture.source import ROOT

BAD = {
    "tensor parallelism": ["trainer.n_gpus_per_node=8", "actor_rollout_ref.rollout.tensor_model_parallel_size=3"],
    "a batch": ["data.train_batch_size=10", "actor_rollout_ref.actor.ppo_mini_batch_size=4"],
    "a micro-batch of all GPUs": ["trainer.n_gpus_per_node=8", "actor_rollout_ref.actor.ppo_micro_batch_size=2"],
    "pools": ["trainer.n_gpus_per_node=2", "trainer.pools.rollout=2"],
    "a machine without an address": ["trainer.nnodes=2"],
    "a loss": ["actor_rollout_ref.actor.policy_loss.loss_mode=x"],
    "a key without effect": ["actor_rollout_ref.actor.kl_loss_coef=0.1"],
    "an engine": ["actor_rollout_ref.rollout.name=trtllm", "actor_rollout_ref.rollout.temperature=0.7"],
    "rejection without a bound": ["algorithm.rollout_correction.rollout_rs=token"],
}


@pytest.mark.parametrize("name", BAD)
def test_plan_and_train_refuse_the_same_in_the_same_words(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *BAD[name]]) == 2
    planned = capsys.readouterr().err
    assert cli.main(["train", *BAD[name]]) == 2
    assert capsys.readouterr().err == planned
    assert planned.startswith("rloom: configuration error: ")


def test_training_refuses_keys_before_torch_loads() -> None:
    code = f"""if True:
        import sys
        from rloom import cli
        codes = [cli.main(["train", *keys]) for keys in {list(BAD.values())!r}]
        sys.modules["ray"] = sys.modules["wandb"] = None  # not installed
        codes += [cli.main(["train", key]) for key in ("trainer.backend=ray", "trainer.logger=wandb")]
        codes += [cli.main(["train", "actor_rollout_ref.rollout.name=trtllm"])]  # its package neither
        print(set(codes), {{"torch", "transformers"}} & set(sys.modules))
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1] == "{2} set()", done.stderr
    for extra in ("ray", "wandb"):
        assert f"-m pip install --constraint {ROOT}/constraints.txt --editable '{ROOT}[{extra}]'" in done.stderr


def test_a_plan_names_keys_without_effect_too(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["algorithm.adv_estimator=grpo", "critic.optim.lr=1"]
    assert cli.main(["plan", *keys]) == 0
    assert (
        "Note: critic.optim.lr=1.0: no effect in this run, because algorithm.adv_estimator=grpo trains no critic"
        in (capsys.readouterr().err)
    )


def test_errors_and_flags_are_those_of_training(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "data.sead=1"]) == 2
    assert "data.sead: there is no such key; did you mean data.seed?" in capsys.readouterr().err
    assert cli.main(["plan", "--lr", "1"]) == 2
    assert "--lr is not a flag of this command" in capsys.readouterr().err
    assert cli.main(["plan", "--gpu_memory", "0"]) == 2
    assert "--gpu_memory=0.0: give the GiB of one GPU" in capsys.readouterr().err
