"""Files of other projects, unchanged, from clones outside of this one. Tests of them are skipped where there are none.

RLOOM_PEERS: a folder with git directories OWNER+NAME/repo.
"""

import os
import subprocess
from pathlib import Path

import pytest

CLONES = os.environ.get("RLOOM_PEERS")


def extracted(repository: str, folder: Path, *paths: str) -> Path:
    if CLONES is None:
        pytest.skip("RLOOM_PEERS names no folder of clones")
    command = ["git", "-C", f"{CLONES}/{repository}/repo", "archive", "HEAD", *paths]
    archive = subprocess.run(command, capture_output=True)
    if archive.returncode:
        pytest.skip(f"there is no clone of {repository} that has {paths}")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder
