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
    clone = f"{CLONES}/{repository}/repo"
    if not Path(clone).is_dir():
        pytest.skip(f"there is no clone of {repository}")
    # a path that the clone does not have is a failure: the file has moved, and the test has to follow it
    archive = subprocess.run(["git", "-C", clone, "archive", "HEAD", *paths], capture_output=True)
    assert archive.returncode == 0, archive.stderr.decode()
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder
