"""Tests that need a CUDA device. Without one nothing of this folder is imported."""

from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.gpu)


@pytest.hookimpl(optionalhook=True)
def pytest_report_collectionfinish() -> str:
    return "" if torch.cuda.is_available() else "tests/gpu: torch sees no CUDA device"
