"""The denominator of the policy ratio, by the versions of the weights that generated a batch. Imports no torch.

A version is the number of the step after which the weights were sent. The staleness of an answer is the trainer's
version less that of its oldest token. Three policies take part (decoupled PPO: Hilton et al. 2021, Fu et al. 2025):

    behaviour   generated the tokens; its log-probs are those that the rollout engine reported for each token
    proximal    the trainer's at the beginning of the step; the clip range is measured from it
    current     the one that is updated

Recomputed log-probs are those of the proximal policy. Above staleness 0 it did not generate the tokens, so that
ratios to it alone leave out behaviour -> proximal: token weights min(proximal / behaviour, threshold) add it. Bypass
mode takes the ratio to the behaviour policy itself.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from rloom.algos.needs import LOSS_KEY
from rloom.algos.rejection import Threshold, multiplies_an_answer

CORRECTION_KEY = "algorithm.rollout_correction"
TOKEN, THRESHOLD = "token", 2.0  # the weights above staleness 0 where none are set


class Denominator(Enum):
    """Where the log-probs in the denominator of the ratio come from."""

    UPDATE = "update"  # the pass of the update itself: in a step's only update, current and proximal are one policy
    TRAINER = "trainer"  # a scoring pass at the beginning of the step: the proximal policy
    ROLLOUT = "rollout"  # the rollout engine: the behaviour policy


@dataclass(frozen=True)
class RatioSettings:
    """How the ratio of a run is computed, as its keys are set."""

    bypass_mode: bool = False
    rollout_is: str | None = None
    rollout_is_threshold: Threshold = THRESHOLD
    rollout_rs: str | None = None
    weights_refused: bool = False  # the user set rollout_is=null
    needs_old_logprobs: bool = False  # a loss, a KL or a correction that was set reads them even in a single update
    updates: int = 1  # of a step: mini-batches times epochs
    loss_mode: str = "vanilla"
    ratio_of_answers: bool = False  # of the loss: LossNeeds


@dataclass(frozen=True)
class RatioChoice:
    """What a step does."""

    denominator: Denominator
    rollout_is: str | None  # weights proximal / behaviour; None: none
    rollout_is_threshold: Threshold


def choose(settings: RatioSettings, staleness: int) -> RatioChoice:
    """`staleness`: the largest that the run allows. For settings without `ratio_faults`."""
    threshold = settings.rollout_is_threshold
    if settings.bypass_mode:
        return RatioChoice(Denominator.ROLLOUT, None, threshold)
    weighted = settings.rollout_is is not None or settings.rollout_rs is not None  # measured over the whole batch
    recomputed = settings.updates > 1 or settings.needs_old_logprobs or weighted
    weights = settings.rollout_is or (TOKEN if staleness > 0 else None)
    return RatioChoice(Denominator.TRAINER if recomputed else Denominator.UPDATE, weights, threshold)


def ratio_faults(settings: RatioSettings, staleness: int, *, mixed: bool) -> Iterator[str]:
    """`staleness`: the largest that the run allows. `mixed`: an answer may have tokens of several versions."""
    if staleness > 0 and not settings.bypass_mode and settings.weights_refused:
        yield (
            f"{CORRECTION_KEY}.rollout_is=null with answers that are up to {staleness} versions old: the old log-probs "
            "would be those of newer weights than the ones that generated the answers, and nothing would correct for "
            f"it. Use {CORRECTION_KEY}.rollout_is=token, or {CORRECTION_KEY}.bypass_mode=True, which takes the "
            "log-probs of the rollout engine"
        )
    if not mixed:
        return
    for setting in multiplies_an_answer(settings.rollout_is, settings.rollout_rs):
        yield (
            f"{CORRECTION_KEY}.{setting} with answers whose tokens come from several versions of the weights: the "
            "product of their ratios grows with the length and reaches the bounds in most answers. Use "
            f"{CORRECTION_KEY}.rollout_is=token, and to reject {CORRECTION_KEY}.rollout_rs=geometric or seq_mean_k3"
        )


def ratio_notices(settings: RatioSettings, *, mixed: bool) -> Iterator[str]:
    """gspo and geo_mean average the log-ratio over an answer, so that it does not grow with the length. The paper of
    gspo names partial rollouts and the engine's own likelihoods as a use (Zheng et al. 2025, section 5.4); its ratio is
    defined for one old policy, which the proximal policy of decoupled PPO is."""
    if mixed and settings.bypass_mode and settings.ratio_of_answers:
        yield (
            f"{LOSS_KEY}={settings.loss_mode} with {CORRECTION_KEY}.bypass_mode=True and answers whose tokens come "
            "from several versions of the weights: the ratio of an answer is a mean over these versions; "
            f"{CORRECTION_KEY}.bypass_mode=False compares all tokens with one policy"
        )
