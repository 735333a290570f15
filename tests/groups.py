"""Which tests stay together in one of the processes of `make test`, and which groups start first."""

from collections.abc import Mapping

TOGETHER: Mapping[str, str] = {
    # one Ray cluster at a time: each starts more processes than there are cores, and waits for them with time limits
    "e2e/test_ray": "ray",
    "e2e/test_nodes": "ray",
    "contract/test_worker_contract": "ray",
    "contract/test_group_contract": "ray",
    # one set of processes serves them all
    "unit/test_fsdp": "ranks",
    "unit/test_fsdp_checkpoints": "ranks",
    "unit/test_ulysses": "ranks",
    # one browser
    "browser/test_overview": "browser",
    "browser/test_answers": "browser",
    "browser/test_safety_and_looks": "browser",
}
# no costly fixtures: any process takes any of their tests
APART = (
    "e2e/test_train",
    "e2e/test_resume",
    "e2e/test_python_api",
    "e2e/test_examples",
    "documents/test_in_order",
    "documents/test_runs",
    "e2e/test_bad_input",
    "e2e/test_doctor_runs",
    "unit/test_families",
    "gpu/test_gpu",
    "gpu/test_family_passes",
)
LONGEST = (
    "ray",
    "ranks",
    "browser",
    "e2e/test_workers",
    "e2e/test_servers",
    "e2e/test_sft",
    "unit/test_compiled",
    "unit/test_native_graph_decoder",
    "contract/test_engine_contract",
    "unit/test_sandbox",
    "contract/test_rollout_contract",
    "unit/test_train_batch",
    "unit/test_servers_client",
    "unit/test_judge_faults",
    "unit/test_code_limits",
    "unit/test_code_verdicts",
    "unit/test_rewards_code",
    "unit/test_rewards_pool",
    "e2e/test_chat",
    "e2e/test_mismatch",
)


def group_of(nodeid: str) -> str:
    """A file is a group, since its fixtures are made once, unless it is named above."""
    file = nodeid.split("::")[0].removeprefix("tests/").removesuffix(".py")
    return nodeid if file in APART else TOGETHER.get(file, file)


def order_of(nodeid: str) -> int:
    """The longest first and single tests last, so that all processes end at about the same time."""
    group = group_of(nodeid)
    if group in LONGEST:
        return LONGEST.index(group)
    return len(LONGEST) + ("::" in group)
