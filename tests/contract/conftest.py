"""Every engine, and a small model for it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine_subjects import ENGINES, NEED_RANKS, Subject


@pytest.fixture(params=ENGINES)
def subject(request: pytest.FixtureRequest) -> Subject:
    if request.param in NEED_RANKS:
        request.getfixturevalue("one_rank")
    return ENGINES[request.param]


@pytest.fixture
def folder(model_folder: Callable[[str], Path]) -> Path:
    return model_folder("qwen2")
