"""How a role's keys cut its samples into passes; `rloom train` and `rloom plan` call the same functions. No torch here.

Several ranks can get the same samples: `sequence_ranks` divide each sequence (Ulysses), so that together they take as
many times more tokens; `model_ranks` divide the model (Megatron), and each of them has all tokens.
"""

from rloom.config.reward_model_section import ClassifierKeys
from rloom.config.rollout_section import RolloutSection
from rloom.config.schema import Actor, Critic, Ref
from rloom.packing import MicroBatching


def ranks_per_share(role: Actor | Critic, ranks: int) -> int:
    """Ranks that get the same samples. The reference has the actor's; a single rank (evaluation) divides nothing."""
    return 1 if ranks == 1 else role.ulysses_sequence_parallel_size * model_ranks(role, ranks)


def model_ranks(role: Actor | Critic, ranks: int) -> int:
    """Ranks that divide one copy of the model by tensor and pipeline parallelism."""
    return role.megatron.model_ranks if ranks > 1 and role.strategy == "megatron" else 1


def training_batching(
    section: Actor | Critic, ranks: int, sequence_ranks: int = 1, model_ranks: int = 1
) -> MicroBatching:
    older, budget = section.ppo_micro_batch_size, section.ppo_max_token_len_per_gpu
    samples = section.ppo_micro_batch_size_per_gpu or of_one_rank(older, ranks, sequence_ranks * model_ranks)
    return micro_batching(samples, section.use_dynamic_bsz, budget * sequence_ranks)


def scoring_batching(
    section: RolloutSection | Ref, ranks: int, sequence_ranks: int = 1, model_ranks: int = 1
) -> MicroBatching:
    older, budget = section.log_prob_micro_batch_size, section.log_prob_max_token_len_per_gpu
    samples = section.log_prob_micro_batch_size_per_gpu or of_one_rank(older, ranks, sequence_ranks * model_ranks)
    return micro_batching(samples, section.log_prob_use_dynamic_bsz, budget * sequence_ranks)


def reward_batching(section: ClassifierKeys, ranks: int) -> MicroBatching:
    samples = section.micro_batch_size_per_gpu or of_one_rank(section.micro_batch_size, ranks, 1)
    return micro_batching(samples, section.use_dynamic_bsz, section.forward_max_token_len_per_gpu)


def of_one_rank(samples: int | None, ranks: int, ranks_per_share: int) -> int | None:
    """The older keys count the samples of all ranks together."""
    return None if samples is None else max(1, samples * ranks_per_share // ranks)


def micro_batching(samples: int | None, dynamic: bool | None, tokens: int) -> MicroBatching:
    return MicroBatching(tokens=tokens) if samples is None or dynamic else MicroBatching(samples=samples)
