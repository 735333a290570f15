"""The rollout contract (tests/contract/) on vLLM. The tests are those of the other engines; only `build` differs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rloom.rollout.base import Rollout
from tests.contract.test_rollout_contract import (  # noqa: F401
    Bench,
    test_a_models_own_generation_settings_do_not_bend_the_policy,
    test_a_stop_token_ends_an_answer_and_belongs_to_it,
    test_an_adapter_speaks_in_the_rollout_too,
    test_an_update_is_seen_by_the_next_generation,
    test_answers_to_one_prompt_differ_and_repeat_with_their_seeds,
    test_draws_follow_the_softmax,
    test_generating_draws_nothing_from_the_global_generator,
    test_greedy_tokens_are_those_of_a_plain_loop_without_a_cache,
    test_ignore_eos_writes_to_the_limit_whatever_is_written,
    test_logprobs_are_those_before_top_k_and_top_p_cut_the_distribution,
    test_more_requests_than_fit_at_once_are_all_answered,
    test_no_answer_is_longer_than_allowed,
    test_no_requests_give_no_answers,
    test_only_the_stop_tokens_of_the_request_stop,
    test_sampled_logprobs_are_the_trainers,
    test_top_k_and_top_p_allow_exactly_the_right_tokens,
    test_top_k_of_one_is_greedy,
    test_training_goes_on_undisturbed_after_a_rollout,
)
from tests.contract.test_rollout_requests import (  # noqa: F401
    test_a_cancelled_request_is_not_reported_and_the_others_are_as_ever,
    test_requests_join_while_others_run_whatever_their_sampling,
)
from tests.helpers import FAMILIES


@pytest.fixture
def folder(model_folder: Callable[[str], Path]) -> Path:
    return model_folder("qwen2")


@pytest.fixture(params=FAMILIES)
def family_folder(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> Path:
    return model_folder(request.param)


@pytest.fixture
def bench(build: Callable[..., Rollout], folder: Path) -> Bench:
    return Bench.at(folder, build, max_sequences=2)
