"""The keys of advantages and KL control."""

from typing import Literal

from rloom.config.section import Section, key, names_code, section

KL_ESTIMATOR = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"
]


class KlCtrl(Section):
    type: Literal["fixed", "adaptive"] = key("fixed", "adaptive: change the coefficient until the KL is `target_kl`.")
    kl_coef: float = key(0.001, "Coefficient of the KL in the reward; the initial value if adaptive.", ge=0)
    horizon: int = key(10000, "Samples over which the adaptive coefficient changes.", ge=1)
    target_kl: float = key(0.1, "Target of the adaptive coefficient.", gt=0)


class RolloutCorrection(Section):
    rollout_is: Literal["token", "sequence"] | None = key(
        None, "Weight the loss by the ratio of trainer to engine probability, of a token or of a whole answer."
    )
    bypass_mode: bool = key(
        False,
        "Take the rollout engine's log-probs as those of the old policy, which saves a scoring pass. The clipped ratio "
        "then corrects for the gap between engine and trainer.",
    )
    rollout_is_threshold: float = key(2.0, "Upper bound of the weights.", gt=0)
    rollout_is_batch_normalize: bool = key(False, "Scale the weights to mean 1 over the batch.")
    rollout_rs: Literal["token", "sequence", "geometric"] | None = key(
        None, "Reject tokens, or answers by the product or geometric mean of their ratios, if it is out of bounds."
    )
    rollout_rs_threshold: float | None = key(None, "Upper bound of the ratio.", gt=0)
    rollout_rs_threshold_lower: float | None = key(None, "Lower bound of the ratio. null: 1 / the upper bound.", gt=0)
    rollout_token_veto_threshold: float | None = key(
        None, "Reject an answer if one of its tokens has a ratio below this.", gt=0
    )

    @property
    def enabled(self) -> bool:
        return any(value is not None for value in (self.rollout_is, self.rollout_rs, self.rollout_token_veto_threshold))


class FilterGroups(Section):
    enable: bool = key(False, "Replace groups with equal scores by further prompts (DAPO's dynamic sampling).")
    max_num_gen_batches: int = key(10, "Stop the run if this many rounds of generation do not fill a step.", ge=1)


class AlgorithmSection(Section):
    adv_estimator: str = key(
        "gae",
        "The advantage estimator: gae (PPO, with a critic), rloo, grpo, reinforce_plus_plus, "
        "reinforce_plus_plus_baseline, remax, opo, gpg, grpo_passk, or your own as file.py:name.",
        needs_consent=names_code,
    )
    gamma: float = key(1.0, "Discount of later rewards.", ge=0, le=1)
    lam: float = key(0.95, "GAE's lambda. 0: one-step TD errors; 1: Monte Carlo returns.", ge=0, le=1)
    norm_adv_by_std_in_grpo: bool = key(
        True, "Divide the advantages of a group by their standard deviation. False: Dr. GRPO."
    )
    normalize_advantages: bool | None = key(
        None,
        "After the estimator: subtract the mean of the advantages and divide by their standard deviation, over the "
        "tokens of the whole step. null: as the estimator is defined; on for gae, reinforce_plus_plus and "
        "reinforce_plus_plus_baseline, off for the others.",
    )
    use_kl_in_reward: bool | None = key(
        None,
        "Subtract the KL to the reference from each token's reward. null: if a key of `kl_ctrl` is set, unless it is "
        "a fixed coefficient of 0.",
    )
    kl_penalty: KL_ESTIMATOR = key("kl", "Estimator of the KL in the reward, or of the KL that is only measured.")
    kl_metric: bool | None = key(
        None,
        "Without a KL in reward and loss: measure the KL to the reference, the model at the start, in each step, as "
        "`kl_divergence`. It costs a forward pass and, unless LoRA is used, the memory of the reference. null: if a "
        "key of `actor_rollout_ref.ref` is set and no key that chooses a KL.",
        same_run=True,
    )
    kl_ctrl: KlCtrl = section(KlCtrl, "Coefficient of the KL in the reward.")
    rollout_correction: RolloutCorrection = section(
        RolloutCorrection, "Correction of the difference between the engine's log-probs and the trainer's."
    )
    filter_groups: FilterGroups = section(FilterGroups, "Dynamic sampling.")
