"""Reads the tables in rloom/assets/tables: rules about keys, and the flags of other commands. They are data."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml

TABLES = Path(__file__).parent / "assets" / "tables"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's takes a tenth of the time


@cache
def read_table(name: str) -> Any:
    return yaml.load((TABLES / f"{name}.yaml").read_text(encoding="utf-8"), LOADER)
