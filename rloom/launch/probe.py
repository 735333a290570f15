"""Before a run: a rollout engine with a model of its own computes what the trainer computes.

Such an engine repacks the weights that it is sent, in a way of its own for each family. A short answer and its
log-probs in both show a family for which that goes wrong.
"""

from rloom.batch import Batch
from rloom.engines.base import Engine
from rloom.engines.distributed import all_gather_objects
from rloom.errors import ModelError
from rloom.rollout.base import Request, Rollout, Sampling
from rloom.training.scoring import PendingAnswer
from rloom.types import Prompt, Score

TOKENS = 8  # of the prompt and of the answer
FIRST_TOKEN = 3  # lower ones are special tokens in many vocabularies
# mean difference of log-probs; bfloat16 kernels differ by 0.01 to 0.05, wrong weights by more than 1
LARGEST_DIFFERENCE = 0.3


def check_agreement(
    rollout: Rollout | None, actor: Engine, name: str, longest: int, temperature: float, *, alone: bool = True
) -> None:
    """All ranks of the actor call it together, those without a rollout engine too. `alone`: there is one rank."""
    prompt = tuple(range(FIRST_TOKEN, FIRST_TOKEN + min(TOKENS, longest - 1)))
    sampling = Sampling(min(TOKENS, longest - len(prompt)), temperature=temperature, ignore_eos=True)
    own = None if rollout is None else dict(rollout.generate([Request(prompt, sampling, seed=0)]))[0]
    completion = next(found for found in ([own] if alone else all_gather_objects(own)) if found is not None)
    answer = PendingAnswer(Prompt(0, (), "", prompt, ""), 0, completion, "", ()).trajectory(Score(1.0))
    batch = Batch.pack([answer])
    difference = float((actor.score(batch) - batch.rollout_logprobs_T)[batch.mask_T].abs().mean())
    if not difference <= LARGEST_DIFFERENCE:  # nan, too
        raise ModelError(
            f"actor_rollout_ref.rollout.name={name}: its log-probs differ from the trainer's by {difference:.2g} on "
            "average, with the same weights: it does not compute this model as the trainer does; use "
            "actor_rollout_ref.rollout.name=native or hf"
        )
