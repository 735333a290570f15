"""How far the way of one training step is, in files."""

import pytest

from tests.architecture.shape import ROOT, step_files

MOST_FILES = 90  # 100 before folders became the layers


@pytest.mark.long  # a minute; the rules of test_sizes.py hold what makes the way short
def test_one_step_runs_through_few_files() -> None:
    files = step_files(ROOT)
    assert {"training/loop.py", "rollout/native/engine.py", "rewards/pool_worker.py", "view/server.py"} <= set(files)
    assert len(files) <= MOST_FILES, files
