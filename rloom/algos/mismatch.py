"""How far rollout engine and trainer disagree about what was written. N samples, A tokens that the policy wrote."""

from torch import Tensor

from rloom.algos.packed import sum_by_sample
from rloom.batch import Batch

FARTHEST = 20.0  # log-ratios are held within this: e^20 says all there is to say, and its square is still finite


def mismatch(batch: Batch, trainer_logprobs_T: Tensor) -> dict[str, float]:
    """Over every token written, in failed samples too: the gap has nothing to do with the score. Always finite."""
    mask_T = batch.mask_T
    if not bool(mask_T.any()):
        return {}
    rollout_A, trainer_A = batch.rollout_logprobs_T[mask_T].double(), trainer_logprobs_T[mask_T].double()
    log_ratio_A = (trainer_A - rollout_A).clamp(-FARTHEST, FARTHEST)
    difference_A = (rollout_A.exp() - trainer_A.exp()).abs()
    found = {
        "training/rollout_probs_diff_mean": difference_A.mean(),
        "training/rollout_probs_diff_max": difference_A.max(),
        "training/rollout_probs_diff_std": difference_A.std() if len(difference_A) > 1 else difference_A.new_zeros(()),
        "training/rollout_logprobs_diff_mean": (rollout_A - trainer_A).abs().mean(),
        # the tokens were drawn by the rollout engine, so these two estimate KL(rollout || trainer)
        "rollout_corr/kl": (rollout_A - trainer_A).mean(),
        "rollout_corr/k3_kl": (log_ratio_A.exp() - log_ratio_A - 1).mean(),
        "rollout_corr/chi2_token": (2 * log_ratio_A).exp().mean() - 1,
    }
    sample_A = batch.sample_T[mask_T]
    return {
        name: float(value) for name, value in (found | by_answer(rollout_A, trainer_A, sample_A, len(batch))).items()
    }


def by_answer(rollout_A: Tensor, trainer_A: Tensor, sample_A: Tensor, samples: int) -> dict[str, Tensor]:
    """Perplexities, answer by answer, and the divergence of whole answers."""
    count_N = sum_by_sample(rollout_A.new_ones(len(sample_A)), sample_A, samples)
    written_N = count_N > 0
    rollout_N = -sum_by_sample(rollout_A, sample_A, samples)[written_N] / count_N[written_N]
    trainer_N = -sum_by_sample(trainer_A, sample_A, samples)[written_N] / count_N[written_N]
    difference_N = trainer_N - rollout_N
    log_ratio_N = (-difference_N * count_N[written_N]).clamp(-FARTHEST, FARTHEST)
    found = {
        "training_ppl": trainer_N.clamp(max=FARTHEST).exp().mean(),
        "training_log_ppl": trainer_N.mean(),
        "rollout_ppl": rollout_N.clamp(max=FARTHEST).exp().mean(),
        "rollout_log_ppl": rollout_N.mean(),
        "log_ppl_diff": difference_N.mean(),
        "log_ppl_abs_diff": difference_N.abs().mean(),
        "log_ppl_diff_max": difference_N.max(),
        "log_ppl_diff_min": difference_N.min(),
        "ppl_ratio": difference_N.clamp(-FARTHEST, FARTHEST).exp().mean(),
        "chi2_seq": (2 * log_ratio_N).exp().mean() - 1,
    }
    return {f"rollout_corr/{name}": value for name, value in found.items()}
