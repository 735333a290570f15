"""What comes before rloom: the oldest Python, and pip's settings for uv."""

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

from rloom.import_path import OLDEST_PYTHON
from tests.architecture.source import ROOT

PYTHON_3_8 = "import sys; sys.version_info = (3, 8, 18); sys.version = '3.8.18 (default)'; "
READ_BY_OLDER_ONES = ("__init__.py", "__main__.py", "import_path.py")
PIP_SETTINGS = """[global]
find-links = /a
    /b
trusted-host = one
    two
cert = /c.pem
proxy = http://p:1
timeout = 60
"""


def test_the_files_that_an_older_python_reads_are_valid_in_it() -> None:
    for name in READ_BY_OLDER_ONES:
        ast.parse((ROOT / "rloom" / name).read_text(), feature_version=(3, 8))


def test_the_oldest_python_is_that_of_the_package() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert declared == f">={'.'.join(map(str, OLDEST_PYTHON))}"


def test_an_older_python_gets_one_line() -> None:
    code = f"{PYTHON_3_8}sys.argv = ['-m']; import rloom"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    said = f"rloom needs Python 3.11 or newer; {sys.executable} is Python 3.8\n"
    assert (done.returncode, done.stderr) == (2, said)
    code = f"{PYTHON_3_8}import rloom"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.endswith(f"ImportError: {said}")


def test_train_sh_refuses_an_older_python_before_it_sets_up(tmp_path: Path) -> None:
    for name in ("Makefile", "train.sh", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    older = tmp_path / "python3.8"
    older.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{PYTHON_3_8}exec(sys.argv[1])" "$2"\n')
    older.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    environment = {**kept, "PYTHON": str(older)}
    done = subprocess.run(
        ["bash", str(tmp_path / "train.sh")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and not (tmp_path / ".venv").exists()
    assert done.stderr.startswith(f"rloom needs Python 3.11 or newer; {older} is Python 3.8.18. Name another one: ")


def test_uv_gets_pips_settings(tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text(PIP_SETTINGS)
    (tmp_path / "Makefile").write_text(
        f"include {ROOT / 'Makefile'}\nshow:\n\t@{sys.executable} -m pip config list | awk -F= '$(SETTINGS)'\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    done = subprocess.run(
        ["make", "--silent", "show"],
        cwd=tmp_path,
        env=kept | {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert {
        "export UV_FIND_LINKS='/a /b'",
        "export UV_INSECURE_HOST='one two'",
        "export SSL_CERT_FILE='/c.pem'",
        "export ALL_PROXY='http://p:1'",
        "export UV_HTTP_TIMEOUT='60'",
    } <= {*done.stdout.splitlines()}
    assert "UV_CONFIG_FILE" not in done.stdout
