"""`rloom eval CKPT`: validate a checkpoint."""

from collections.abc import Sequence
from pathlib import Path

from rloom.config.from_checkpoint import load_saved, run_directory_of, saved_root
from rloom.config.schema import SftConfig
from rloom.errors import CheckpointError
from rloom.launch.build import open_evaluation
from rloom.launch.directory import open_checkpoint
from rloom.rewards.composite import check_failures
from rloom.training.checkpoint import read_state


def evaluate_checkpoint(checkpoint: Path, overrides: Sequence[str] = ()) -> dict[str, float]:
    state = read_state(open_checkpoint(checkpoint))
    if saved_root(checkpoint) is SftConfig:
        raise CheckpointError(
            f"{checkpoint} is a checkpoint of `rloom sft`, which has no reward; export it with `rloom export "
            f"{checkpoint} DIR`, and validate it with `rloom train actor_rollout_ref.model.path=DIR "
            "trainer.val_only=True`"
        )
    config = load_saved(checkpoint, overrides, settings=[run_directory_of(checkpoint)])
    with open_evaluation(config, checkpoint) as evaluator:
        answers = evaluator.answer(state["step"], progress=lambda done, total: None)
        check_failures([answer.score for answer in answers], config.reward_model.max_failed_share)
        return evaluator.metrics(answers)
