from dataclasses import fields
from pathlib import Path

import pytest
import torch

from rloom.algos.aggregate import AGGREGATIONS, Counts
from rloom.algos.correction import CorrectionSettings
from rloom.algos.estimators import AdvantageSettings
from rloom.algos.kl import KL_ESTIMATORS
from rloom.algos.objectives import PolicyObjective
from rloom.algos.policy_losses import LossSettings
from rloom.algos.registry import ALGORITHMS, POLICY_LOSSES, resolve_algorithm, resolve_policy_loss
from rloom.batch import TokenOutputs
from rloom.errors import ConfigError
from tests.algos_samples import MIXED

OUTSIDE = '''
from dataclasses import dataclass

from rloom.algos.estimators import broadcast_to_tokens
from rloom.algos.packed import Groups
from rloom.algos.policy_losses import TokenLoss
from rloom.algos.registry import Algorithm, PolicyLossEntry


@dataclass(frozen=True)
class Anything:
    """A class, because dataclasses need their module to be known."""


def signs(inputs, settings):
    groups, return_N = Groups.of(inputs.batch), inputs.return_N
    return broadcast_to_tokens(inputs, groups, (return_N - groups.mean(return_N)).sign())


def plain(terms, settings):
    return TokenLoss(-terms.advantages_T * terms.logprobs_T)


compared = Algorithm(signs, min_group=3)
by_answer = PolicyLossEntry(plain, aggregation="seq-mean-token-sum")
answer = 42


def lonely(inputs):
    return None
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_algos.py"
    path.write_text(OUTSIDE)
    return path


def test_every_entry_of_the_catalogue_is_here_with_its_needs() -> None:
    assert list(ALGORITHMS) == [
        "gae",
        "rloo",
        "grpo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
        "opo",
        "gpg",
        "grpo_passk",
    ]
    assert [name for name, entry in ALGORITHMS.items() if entry.needs_critic] == ["gae"]
    assert [name for name, entry in ALGORITHMS.items() if entry.needs_greedy] == ["remax"]
    whitened = ["gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
    assert [name for name, entry in ALGORITHMS.items() if entry.normalizes] == whitened
    assert [name for name, entry in ALGORITHMS.items() if entry.min_group == 1] == [
        "gae",
        "reinforce_plus_plus",
        "remax",
    ]
    assert list(POLICY_LOSSES) == [
        *("vanilla", "gspo", "sequence_ratio", "sapo", "gpg", "cispo", "clip_cov", "kl_cov", "geo_mean")
    ]
    assert [name for name, entry in POLICY_LOSSES.items() if entry.needs_old_logprobs] == ["clip_cov", "kl_cov"]
    assert [name for name, entry in POLICY_LOSSES.items() if entry.aggregation] == [
        *("gspo", "sequence_ratio", "sapo", "geo_mean")
    ]


def test_names_of_the_catalogue_resolve_to_its_entries() -> None:
    assert resolve_algorithm("rloo") is ALGORITHMS["rloo"]
    assert resolve_policy_loss("gspo") is POLICY_LOSSES["gspo"]


def test_an_estimator_from_a_file_works_with_default_needs(file: Path) -> None:
    entry = resolve_algorithm(f"{file}:signs")
    assert (entry.needs_critic, entry.min_group, entry.needs_greedy) == (False, 1, False)
    found = entry.advantage(MIXED.inputs(), AdvantageSettings())
    assert set(found.advantages_T.tolist()) == {-1.0, 0.0, 1.0}


def test_entries_from_outside_bring_their_own_needs(file: Path) -> None:
    assert resolve_algorithm(f"{file}:compared").min_group == 3
    assert resolve_policy_loss(f"{file}:by_answer").aggregation == "seq-mean-token-sum"
    assert resolve_policy_loss(f"{file}:plain").aggregation is None


def test_a_loss_from_a_module_trains(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(file.parent)
    mini, logprobs_T = MIXED.train_batch(), MIXED.numbers[2]

    def loss_of(name: str) -> float:
        objective = PolicyObjective(name, LossSettings(), "token-mean", 0.0, None, "kl")
        return float(objective(TokenOutputs(logprobs_T, torch.zeros_like(logprobs_T)), mini, Counts.of(mini, 16))[0])

    assert loss_of("my_algos:plain") == loss_of("gpg")


def test_a_relative_file_is_found_from_the_working_directory(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    assert resolve_algorithm("./my_algos.py:compared").min_group == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ppo", r"algorithm.adv_estimator=ppo: there is no such entry; use one of gae, rloo, .*my_module:my_function"),
        ("{folder}/none.py:f", r"adv_estimator=.*none.py:f: .*none.py does not exist; use FILE.py:NAME"),
        ("{folder}/my_algos.py:nothing", r"has no 'nothing'; it has .*signs, plain"),
        ("{folder}/my_algos.py:answer", r"answer is a int; use a function of \(inputs, settings\), or an Algorithm"),
        ("{folder}/my_algos.py:lonely", r"has the signature \(inputs\) .*; use a function of \(inputs, settings\)"),
        ("{folder}/broken.py:f", r"broken.py cannot be loaded \(ZeroDivisionError: division by zero\)"),
        ("no_such_module:f", r"the module 'no_such_module' cannot be imported .*put its folder on PYTHONPATH"),
        (":f", r"adv_estimator=:f"),
    ],
)
def test_a_name_that_leads_nowhere_says_where_it_ended(file: Path, name: str, message: str) -> None:
    (file.parent / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=message):
        resolve_algorithm(name.format(folder=file.parent))


def test_an_unknown_loss_is_named_with_those_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"policy_loss.loss_mode=ppo: there is no such entry; use one of vanilla, gspo"
    ):
        resolve_policy_loss("ppo")


DOCS = Path(__file__).parents[3] / "docs"


def test_every_entry_has_a_row_in_the_table() -> None:
    rows = [line for line in (DOCS / "algorithms.md").read_text().splitlines() if line.startswith("| `")]
    for name in [*ALGORITHMS, *POLICY_LOSSES, *AGGREGATIONS, "full"]:
        assert any(row.startswith(f"| `{name}` |") for row in rows), name
    for name in KL_ESTIMATORS:
        assert any(f"`{name}`" in row.split("|")[1] for row in rows), name
    for field in fields(CorrectionSettings):
        assert any(row.startswith(f"| `{field.name}` |") for row in rows), field.name


def test_the_example_of_the_guide_works(tmp_path: Path) -> None:
    guide = (DOCS / "extending.md").read_text()
    (tmp_path / "my_algos.py").write_text(guide.split("```python\n")[1].split("```")[0])
    found = resolve_algorithm(f"{tmp_path}/my_algos.py:above_mean").advantage(MIXED.inputs(), AdvantageSettings())
    assert set(found.advantages_T.tolist()) == {-1.0, 0.0, 1.0}
    assert resolve_algorithm(f"{tmp_path}/my_algos.py:above_mean_of_four").min_group == 4
    assert resolve_policy_loss(f"{tmp_path}/my_algos.py:unclipped").aggregation is None
    assert resolve_policy_loss(f"{tmp_path}/my_algos.py:unclipped_by_answer").aggregation == "seq-mean-token-mean"
