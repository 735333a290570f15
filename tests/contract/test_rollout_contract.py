"""What every rollout engine owes its caller. One suite for all of them; what only `native` promises comes last."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rloom.algos.aggregate import Counts
from rloom.algos.objectives import PolicyObjective
from rloom.algos.policy_losses import LossSettings
from rloom.batch import Batch
from rloom.engines.base import Placement
from rloom.engines.local import LocalEngine
from rloom.models.load import Lora
from rloom.models.network import PolicyNetwork
from rloom.rollout.base import Completion, Request, Rollout, Sampling
from rloom.rollout.hf import HfRollout
from rloom.rollout.native.engine import NativeRollout
from rloom.rollout.native.sampler import sample_tokens
from tests.helpers import CPU, a_batch, copied_policy, eager_model, engine_of, policy
from tests.requests import ask, sampled, trajectories

NEW_TOKENS = 10  # with the prompts below every answer outgrows the tiny models' window of 4
GREEDY = Sampling(max_new_tokens=NEW_TOKENS, temperature=0.0)
LUCKY = Sampling(max_new_tokens=NEW_TOKENS)
PROMPTS = [(11,), (5, 6, 7), (9, 8, 7, 6, 5, 4), (20, 30, 40, 50, 60, 10, 3, 4, 5), (5, 6, 7)]
REINFORCE = PolicyObjective("vanilla", LossSettings(), "token-mean", 0.0, None, "kl")


def native(network: PolicyNetwork, owner: LocalEngine, max_sequences: int = 64, **settings: Any) -> NativeRollout:
    rest = {"max_prefill_tokens": 1000, "memory_share": 0.5, "free_cache": True, **settings}
    return NativeRollout(network, owner=owner, max_sequences=max_sequences, **rest)


def hf(network: PolicyNetwork, owner: LocalEngine, max_sequences: int = 64) -> HfRollout:
    return HfRollout(network, owner=owner, pad_id=0, max_sequences=max_sequences, generate_kwargs={}, attention="eager")


ENGINES: Mapping[str, Callable[..., Rollout]] = {"native": native, "hf": hf}


@pytest.fixture(params=ENGINES)
def build(request: pytest.FixtureRequest) -> Callable[..., Rollout]:
    return ENGINES[request.param]


@pytest.fixture
def folder(model_folder: Callable[[str], Path]) -> Path:
    return model_folder("qwen2")


@dataclass(frozen=True)
class Bench:
    """A policy, the engine that trains it and the rollout engine that borrows its weights."""

    network: PolicyNetwork
    engine: LocalEngine
    rollout: Rollout

    @classmethod
    def at(
        cls,
        folder: Path,
        build: Callable[..., Rollout],
        *,
        placement: Placement = CPU,
        lora: Lora | None = None,
        temperature: float = 1.0,
        **settings: Any,
    ) -> "Bench":
        if lora is None:
            network = copied_policy(folder, temperature=temperature)
        else:
            network = policy(folder, lora=lora, temperature=temperature)
        engine = engine_of(network, placement)
        return cls(network, engine, build(network, engine, **settings))

    def write(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Completions in the order of the requests, each of them given exactly once."""
        found = list(self.rollout.generate(sampled(requests, sampling)))
        assert sorted(row for row, _ in found) == list(range(len(requests)))
        return [completion for _, completion in sorted(found, key=lambda pair: pair[0])]

    def tokens(self, requests: Sequence[Request], sampling: Sampling) -> list[list[int]]:
        return [completion.tokens_L.tolist() for completion in self.write(requests, sampling)]

    def learn(self, rate: float = 0.05) -> None:
        batch = a_batch()
        self.engine.forward_backward(batch, REINFORCE, Counts.of(batch, 16))
        assert self.engine.optim_step(rate).applied


def requests(prompts: Sequence[tuple[int, ...]] = PROMPTS, first_seed: int = 100) -> list[Request]:
    return [ask(tokens, seed) for seed, tokens in enumerate(prompts, start=first_seed)]


@torch.no_grad()
def greedy_by_hand(model: PreTrainedModel, prompt: tuple[int, ...]) -> list[int]:
    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@torch.no_grad()
def next_probabilities(folder: Path, prompt: tuple[int, ...], temperature: float = 1.0) -> Tensor:
    return (eager_model(folder)(torch.tensor([prompt])).logits[0, -1] / temperature).softmax(-1)


def as_batch(asked: Sequence[Request], completions: Sequence[Completion]) -> Batch:
    return Batch.pack(trajectories(asked, completions))


def assert_trainer_agrees(bench: Bench, sampling: Sampling, tolerance: float = 1e-4) -> None:
    asked = requests()
    batch = as_batch(asked, bench.write(asked, sampling))
    torch.testing.assert_close(bench.engine.score(batch), batch.rollout_logprobs_T, atol=tolerance, rtol=0)


def test_greedy_tokens_are_those_of_a_plain_loop_without_a_cache(
    build: Callable[..., Rollout], family_folder: Path
) -> None:
    model = eager_model(family_folder)
    expected = [greedy_by_hand(model, prompt) for prompt in PROMPTS]
    completions = Bench.at(family_folder, build).write(requests(), GREEDY)
    assert [completion.tokens_L.tolist() for completion in completions] == expected
    assert not any(completion.finished for completion in completions)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampled_logprobs_are_the_trainers(
    build: Callable[..., Rollout], family_folder: Path, temperature: float
) -> None:
    bench = Bench.at(family_folder, build, temperature=temperature)
    assert_trainer_agrees(bench, replace(LUCKY, temperature=temperature))


def test_logprobs_are_those_before_top_k_and_top_p_cut_the_distribution(
    build: Callable[..., Rollout], folder: Path
) -> None:
    assert_trainer_agrees(Bench.at(folder, build, temperature=1.3), replace(LUCKY, temperature=1.3, top_k=3, top_p=0.8))


def test_an_adapter_speaks_in_the_rollout_too(build: Callable[..., Rollout], folder: Path) -> None:
    bench = Bench.at(folder, build, lora=Lora(rank=4))
    before = bench.tokens(requests(), GREEDY)
    bench.learn(rate=0.1)
    assert bench.tokens(requests(), GREEDY) != before
    assert_trainer_agrees(bench, LUCKY)


def test_an_update_is_seen_by_the_next_generation(build: Callable[..., Rollout], folder: Path, tmp_path: Path) -> None:
    bench = Bench.at(folder, build)
    before = bench.tokens(requests(), GREEDY)
    bench.learn()
    bench.rollout.load_weights(iter(()), version=1)  # it reads the actor's own parameters
    bench.network.module.save_pretrained(tmp_path)
    model = eager_model(tmp_path)
    after = bench.tokens(requests(), GREEDY)
    assert after == [greedy_by_hand(model, prompt) for prompt in PROMPTS]
    assert after != before


def test_training_goes_on_undisturbed_after_a_rollout(build: Callable[..., Rollout], folder: Path) -> None:
    calm, busy = Bench.at(folder, build), Bench.at(folder, build)
    for bench in (calm, busy):
        for _ in range(2):
            bench.learn()
            if bench is busy:
                bench.tokens(requests(), LUCKY)
    for one, other in zip(calm.network.module.parameters(), busy.network.module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_generating_draws_nothing_from_the_global_generator(build: Callable[..., Rollout], folder: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    Bench.at(folder, build).tokens(requests(), LUCKY)
    assert torch.equal(torch.rand(3), expected)


def cut(tokens: list[int], stops: set[int]) -> list[int]:
    """Up to the first stop token, that one included."""
    place = next((i for i, token in enumerate(tokens) if token in stops), len(tokens))
    return tokens[: place + 1]


def test_a_stop_token_ends_an_answer_and_belongs_to_it(build: Callable[..., Rollout], folder: Path) -> None:
    bench = Bench.at(folder, build)
    whole = bench.tokens(requests(), GREEDY)
    stops = (whole[0][0], whole[1][4], whole[2][-1])  # at once, in the middle, with the last token allowed
    expected = [cut(tokens, set(stops)) for tokens in whole]
    completions = bench.write(requests(), replace(GREEDY, stop_ids=stops))
    assert [completion.tokens_L.tolist() for completion in completions] == expected
    assert [len(completion.logprobs_L) for completion in completions] == [len(tokens) for tokens in expected]
    assert [completion.finished for completion in completions] == [tokens[-1] in stops for tokens in expected]
    assert len(expected[0]) == 1 and {len(tokens) for tokens in expected} != {1}


def test_ignore_eos_writes_to_the_limit_whatever_is_written(build: Callable[..., Rollout], folder: Path) -> None:
    bench = Bench.at(folder, build)
    whole = bench.tokens(requests(), GREEDY)
    sampling = replace(GREEDY, stop_ids=(whole[0][0], whole[1][2]), ignore_eos=True)
    completions = bench.write(requests(), sampling)
    assert [completion.tokens_L.tolist() for completion in completions] == whole
    assert not any(completion.finished for completion in completions)


def test_only_the_stop_tokens_of_the_request_stop(build: Callable[..., Rollout], folder: Path) -> None:
    bench = Bench.at(folder, build)
    whole = bench.tokens(requests(), GREEDY)
    bench.network.decoder.base.generation_config.eos_token_id = whole[0][0]
    assert bench.tokens(requests(), GREEDY) == whole


def test_a_models_own_generation_settings_do_not_bend_the_policy(build: Callable[..., Rollout], folder: Path) -> None:
    """Some models ship a repetition penalty; the trainer knows nothing of it."""
    bench = Bench.at(folder, build)
    whole = bench.tokens(requests(), GREEDY)
    own = bench.network.decoder.base.generation_config
    own.repetition_penalty, own.no_repeat_ngram_size, own.min_new_tokens, own.suppress_tokens = 5.0, 1, 3, [whole[0][1]]
    assert bench.tokens(requests(), GREEDY) == whole
    own.top_k, own.top_p, own.min_p, own.temperature = 1, 0.1, 0.9, 0.01
    assert len({tuple(tokens) for tokens in bench.tokens(requests([PROMPTS[1]] * 20), LUCKY)}) > 10


@pytest.mark.parametrize("limit", [1, 4])
def test_no_answer_is_longer_than_allowed(build: Callable[..., Rollout], folder: Path, limit: int) -> None:
    bench = Bench.at(folder, build)
    whole = bench.tokens(requests(), GREEDY)
    assert bench.tokens(requests(), replace(GREEDY, max_new_tokens=limit)) == [tokens[:limit] for tokens in whole]


def test_answers_to_one_prompt_differ_and_repeat_with_their_seeds(build: Callable[..., Rollout], folder: Path) -> None:
    asked = requests([PROMPTS[1]] * 6)
    bench = Bench.at(folder, build)
    first = bench.tokens(asked, LUCKY)
    assert len({tuple(tokens) for tokens in first}) == 6
    assert bench.tokens(asked, LUCKY) == first
    assert Bench.at(folder, build).tokens(asked, LUCKY) == first
    assert bench.tokens(requests([PROMPTS[1]] * 6, first_seed=900), LUCKY) != first


def test_more_requests_than_fit_at_once_are_all_answered(build: Callable[..., Rollout], folder: Path) -> None:
    expected = Bench.at(folder, build).tokens(requests(), GREEDY)
    assert Bench.at(folder, build, max_sequences=2).tokens(requests(), GREEDY) == expected


def test_no_requests_give_no_answers(build: Callable[..., Rollout], folder: Path) -> None:
    assert Bench.at(folder, build).write([], LUCKY) == []


def nucleus(probabilities: Tensor, top_k: int, top_p: float) -> set[int]:
    """By hand: the likeliest k, and of those the fewest whose share of the k's probability reaches p."""
    order = sorted(range(len(probabilities)), key=lambda token: -float(probabilities[token]))[:top_k]
    total, allowed, sum_so_far = sum(float(probabilities[token]) for token in order), set(), 0.0
    for token in order:
        allowed.add(token)
        sum_so_far += float(probabilities[token]) / total
        if sum_so_far >= top_p:
            break
    return allowed


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (64, 0.6), (5, 0.7), (64, 0.01)])
def test_top_k_and_top_p_allow_exactly_the_right_tokens(
    build: Callable[..., Rollout], folder: Path, top_k: int, top_p: float
) -> None:
    prompt = PROMPTS[2]
    allowed = nucleus(next_probabilities(folder, prompt, 3.0), top_k, top_p)
    sampling = Sampling(max_new_tokens=1, temperature=3.0, top_k=top_k, top_p=top_p)
    drawn = Bench.at(folder, build, max_sequences=400, temperature=3.0).tokens(requests([prompt] * 400), sampling)
    assert {token for [token] in drawn} == allowed
    assert len(allowed) < 30


def test_top_k_of_one_is_greedy(build: Callable[..., Rollout], folder: Path) -> None:
    bench = Bench.at(folder, build)
    assert bench.tokens(requests(), replace(LUCKY, top_k=1)) == bench.tokens(requests(), GREEDY)


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_draws_follow_the_softmax(build: Callable[..., Rollout], folder: Path, temperature: float) -> None:
    sampling = Sampling(max_new_tokens=1, temperature=temperature)
    bench = Bench.at(folder, build, max_sequences=4000)
    drawn = torch.tensor(bench.tokens(requests([PROMPTS[1]] * 4000), sampling)).squeeze(1)
    share = torch.bincount(drawn, minlength=64) / 4000
    expected = next_probabilities(folder, PROMPTS[1], temperature)
    assert float((share - expected).abs().max()) < 0.03
    assert 0.05 < float(expected.max()) < 0.95


def test_in_bfloat16_the_logprobs_stay_near_the_trainers(build: Callable[..., Rollout], family_folder: Path) -> None:
    bench = Bench.at(family_folder, build, placement=Placement(torch.device("cpu"), torch.bfloat16))
    asked = requests(PROMPTS * 2)
    batch = as_batch(asked, bench.write(asked, LUCKY))
    difference_T = (bench.engine.score(batch) - batch.rollout_logprobs_T)[batch.mask_T].abs()
    # bfloat16 rounds a logit of 4 to 8 to 1/32; which way depends on the order in which a CPU sums
    assert float(difference_T.mean()) < 1 / 32


# --- what only native promises


@pytest.fixture(scope="module")
def expected(model_folder: Callable[[str], Path]) -> list[Completion]:
    """Twelve answers of uneven length, all written at once."""
    return Bench.at(model_folder("mistral"), native).write(requests(MANY), UNEVEN)


MANY = [*PROMPTS, *PROMPTS, (3,), (3,)]
UNEVEN = Sampling(max_new_tokens=14, stop_ids=tuple(range(3, 12)))


def assert_same_answers(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    assert [one.tokens_L.tolist() for one in found] == [one.tokens_L.tolist() for one in expected]
    assert [one.finished for one in found] == [one.finished for one in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.logprobs_L, other.logprobs_L, atol=1e-4, rtol=0)


@pytest.mark.parametrize("max_sequences", [1, 3, 64])
@pytest.mark.parametrize("max_prefill_tokens", [1, 10, 1000])
def test_an_answer_does_not_depend_on_its_company(
    model_folder: Callable[[str], Path], expected: list[Completion], max_sequences: int, max_prefill_tokens: int
) -> None:
    bench = Bench.at(
        model_folder("mistral"), native, max_sequences=max_sequences, max_prefill_tokens=max_prefill_tokens
    )
    assert_same_answers(bench.write(requests(MANY), UNEVEN), expected)
    assert len({len(completion.tokens_L) for completion in expected}) > 3  # they leave at different times


def test_an_answer_does_not_depend_on_the_order_of_the_requests(
    model_folder: Callable[[str], Path], expected: list[Completion]
) -> None:
    bench = Bench.at(model_folder("mistral"), native, max_sequences=5)
    turned = bench.write(requests(MANY)[::-1], UNEVEN)
    assert_same_answers(turned[::-1], expected)


def test_an_answer_does_not_depend_on_what_was_generated_before(
    model_folder: Callable[[str], Path], expected: list[Completion]
) -> None:
    bench = Bench.at(model_folder("mistral"), native, max_sequences=3)
    abandoned = bench.rollout.generate(sampled(requests(MANY[::-1], first_seed=5), UNEVEN))
    next(iter(abandoned))
    abandoned.close()
    assert_same_answers(bench.write(requests(MANY), UNEVEN), expected)


def test_answers_are_given_as_they_finish(model_folder: Callable[[str], Path], expected: list[Completion]) -> None:
    bench = Bench.at(model_folder("mistral"), native)
    lengths = [len(completion.tokens_L) for _, completion in bench.rollout.generate(sampled(requests(MANY), UNEVEN))]
    assert lengths == sorted(len(completion.tokens_L) for completion in expected)


def test_the_prompt_of_several_answers_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench.at(folder, native)
    read: list[int] = []
    hidden = bench.network.decoder.packed_hidden

    def counted(tokens_T: Tensor, *rest: Any) -> Tensor:
        read.append(len(tokens_T))
        return hidden(tokens_T, *rest)

    monkeypatch.setattr(bench.network.decoder, "packed_hidden", counted)
    bench.tokens(requests([PROMPTS[3]] * 5), replace(LUCKY, max_new_tokens=3))
    assert read == [9, 5, 5]  # one prompt of 9 tokens, then a token for each of 5 answers


def test_sleep_gives_the_cache_back_where_that_is_asked_for(folder: Path) -> None:
    for free_cache in (True, False):
        bench = Bench.at(folder, native, free_cache=free_cache)
        first = bench.tokens(requests(), GREEDY)
        assert bench.rollout.slot_cache is not None
        bench.rollout.sleep()
        assert (bench.rollout.slot_cache is None) == free_cache
        bench.rollout.wake()
        assert bench.tokens(requests(), GREEDY) == first


def test_a_uniform_number_picks_the_token_whose_share_it_falls_into() -> None:
    logits_BV = torch.tensor([0.1, 0.2, 0.0, 0.7]).log().expand(5, 4)
    uniform_B = torch.tensor([0.0, 0.05, 0.15, 0.301, 0.99999])
    token_B, logprob_B = sample_tokens(logits_BV, uniform_B, Sampling(max_new_tokens=1))
    assert token_B.tolist() == [0, 0, 1, 3, 3]
    torch.testing.assert_close(logprob_B.exp(), torch.tensor([0.1, 0.1, 0.2, 0.7, 0.7]))
    cut_B, logprob_B = sample_tokens(logits_BV, uniform_B, Sampling(max_new_tokens=1, top_k=2))
    assert cut_B.tolist() == [1, 1, 1, 3, 3]  # shares 2/9 and 7/9
    torch.testing.assert_close(logprob_B.exp(), torch.tensor([0.2, 0.2, 0.2, 0.7, 0.7]))
