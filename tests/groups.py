"""Which tests stay together in one of the processes of `make test`, and in which order groups start.

`durations.json` has the seconds of the groups that take longest. `make durations` writes it from the report of the last
`make test`.
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

RAY = "ray"
TOGETHER: Mapping[str, str] = {
    # one Ray cluster at a time: each starts more processes than there are cores, and waits for them with time limits
    "e2e/test_ray": RAY,
    "e2e/test_nodes": RAY,
    # ranks and workers are forked from a process that has imported torch and megatron-core, the workers of runs from
    # another one. Either takes more than ten seconds of a core to start, in each process of `make test` that needs it
    **dict.fromkeys(
        (
            *("unit/test_fsdp", "unit/test_fsdp_checkpoints", "unit/test_train_batch", "unit/test_ulysses"),
            *("unit/test_megatron", "unit/test_megatron_routing", "unit/test_megatron_weights"),
            *("unit/test_servers_client", "unit/test_servers_load", "unit/test_numbered"),
            *("unit/test_weight_sync", "unit/test_empty_copies"),
            *("e2e/test_workers", "e2e/test_megatron", "e2e/test_reward_model", "e2e/test_servers"),
            *("e2e/test_sft", "e2e/test_chat", "e2e/test_episodes", "e2e/test_episode_resume"),
            *("e2e/test_resume", "contract/test_worker_contract", "contract/test_group_contract"),
            *("e2e/test_ahead", "e2e/test_separate"),
        ),
        "forked",
    ),
    # they read the same syntax trees
    **dict.fromkeys(
        (
            *("architecture/test_sizes", "architecture/test_kinds", "architecture/test_catalogue"),
            *("architecture/test_imports", "architecture/test_config_keys", "architecture/test_chinese"),
        ),
        "architecture",
    ),
    # one browser
    "browser/test_overview": "browser",
    "browser/test_answers": "browser",
    "browser/test_episodes": "browser",
    "browser/test_measures": "browser",
    "browser/test_safety_and_looks": "browser",
    "browser/test_versions": "browser",
}
# no costly fixtures: any process takes any of their tests
APART = (
    "e2e/test_train",
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
DURATIONS_FILE = Path(__file__).with_name("durations.json")
DURATIONS: Mapping[str, float] = json.loads(DURATIONS_FILE.read_text())
LISTED_S = 2.0  # the order of shorter groups makes no difference


def group_of(nodeid: str) -> str:
    """A file is a group, since its fixtures are made once, unless it is named above. Folders in unit/ do not count."""
    path, _, test = nodeid.removeprefix("tests/").partition(".py::")
    folder, *_, name = path.split("/")
    file = f"{folder}/{name}"
    return f"{file}::{test}" if file in APART else TOGETHER.get(file, file)


def order_of(nodeid: str) -> float:
    """The longest first, so that all processes end at about the same time; Ray's before all others."""
    group = group_of(nodeid)
    return float("-inf") if group == RAY else -DURATIONS.get(group, 0.0)


def longest(report: Path) -> dict[str, float]:
    """Group -> seconds, of a report in JUnit's format."""
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        seconds[group_of(f"{case.attrib['file']}::{case.attrib['name']}")] += float(case.attrib["time"])
    return {group: round(taken, 1) for group, taken in seconds.most_common() if taken >= LISTED_S}


if __name__ == "__main__":
    DURATIONS_FILE.write_text(json.dumps(longest(Path(sys.argv[1])), indent=1) + "\n")
