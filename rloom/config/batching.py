"""How a role's keys cut its samples into passes; `rloom train` and `rloom plan` call the same functions. No torch here.

`sequence_ranks` ranks share each sequence: together they take as many times more.
"""

from rloom.config.reward_model_section import ClassifierKeys
from rloom.config.rollout_section import RolloutSection
from rloom.config.schema import Actor, Critic, Ref
from rloom.packing import MicroBatching


def training_batching(section: Actor | Critic, ranks: int, sequence_ranks: int = 1) -> MicroBatching:
    older, budget = section.ppo_micro_batch_size, section.ppo_max_token_len_per_gpu
    samples = section.ppo_micro_batch_size_per_gpu or of_one_rank(older, ranks, sequence_ranks)
    return micro_batching(samples, section.use_dynamic_bsz, budget * sequence_ranks)


def scoring_batching(section: RolloutSection | Ref, ranks: int, sequence_ranks: int = 1) -> MicroBatching:
    older, budget = section.log_prob_micro_batch_size, section.log_prob_max_token_len_per_gpu
    samples = section.log_prob_micro_batch_size_per_gpu or of_one_rank(older, ranks, sequence_ranks)
    return micro_batching(samples, section.log_prob_use_dynamic_bsz, budget * sequence_ranks)


def reward_batching(section: ClassifierKeys, ranks: int) -> MicroBatching:
    samples = section.micro_batch_size_per_gpu or of_one_rank(section.micro_batch_size, ranks, 1)
    return micro_batching(samples, section.use_dynamic_bsz, section.forward_max_token_len_per_gpu)


def of_one_rank(samples: int | None, ranks: int, sequence_ranks: int) -> int | None:
    """The older keys count the samples of all ranks together."""
    return None if samples is None else max(1, samples * sequence_ranks // ranks)


def micro_batching(samples: int | None, dynamic: bool | None, tokens: int) -> MicroBatching:
    return MicroBatching(tokens=tokens) if samples is None or dynamic else MicroBatching(samples=samples)
