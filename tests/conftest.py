"""Shared by all tests: folders of tiny models."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import FAMILIES, save_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's name -> a Hugging Face folder, made once."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = save_model(tmp_path_factory.mktemp(family), FAMILIES[family]())
        return made[family]

    return folder


@pytest.fixture(params=FAMILIES)
def family_folder(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> Path:
    return model_folder(request.param)
