"""The sandbox with hostile programs: with namespaces and without, as this user and as another one."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rloom.rewards.sandbox import seccomp
from rloom.rewards.sandbox.client import Sandbox, SandboxError, check_sandbox, description
from rloom.rewards.sandbox.settings import Protections, SandboxJob
from tests.sandbox_programs import ENDLESS, LIMITS, PROGRAMS, ROOT, SECRET

NOBODY = 65_534
SYSTEM_PYTHON = "/usr/bin/python3"
EXPECTED = {**PROGRAMS, **ENDLESS, "after": ("", r"^$")}


def namespaces_work() -> bool:
    try:
        check_sandbox(LIMITS, "required")
    except SandboxError:
        return False
    return True


def system_python() -> str:
    """An interpreter that every user can read, for programs that run as another user."""
    found = shutil.which(SYSTEM_PYTHON)
    code = "import sys; print(sys.version_info >= (3, 11))"
    if found is None or subprocess.run([found, "-c", code], capture_output=True, text=True).stdout != "True\n":
        pytest.skip(f"no Python 3.11 at {SYSTEM_PYTHON}")
    return found


def arguments(who: str) -> dict[str, Any]:
    if who == "this user":
        return {"args": [sys.executable]}
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    if who == "root with a readable interpreter":
        return {"args": [system_python()]}
    readable = all(os.stat(folder).st_mode & 0o005 == 0o005 for folder in (ROOT, *ROOT.parents))
    if not readable:
        pytest.skip("another user cannot read the repository")
    return {"args": [system_python()], "user": NOBODY, "group": NOBODY, "extra_groups": []}


def outcomes(who: str, isolation: str) -> dict[str, dict[str, Any]]:
    given = arguments(who)
    environment = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(Path.home()), "API_KEY": SECRET}
    given["args"] += ["-m", "tests.sandbox_programs", isolation]
    done = subprocess.run(**given, env=environment, cwd="/", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["title"]: line for line in lines}


def check(found: dict[str, dict[str, Any]]) -> None:
    assert found.keys() == {*EXPECTED, "sandbox"}
    for title, (_, reason) in EXPECTED.items():
        outcome = found[title]
        assert re.search(reason, outcome["error"]), outcome
        assert "ESCAPED" not in outcome["text"], outcome
        assert SECRET not in outcome["text"], outcome
        assert outcome["left"] == 0, outcome  # no process of the program is left
    assert found["after"]["text"] == "[]\n"  # an empty scratch folder again


@pytest.mark.parametrize("who", ["this user", pytest.param("another user", marks=pytest.mark.slow)])
def test_with_namespaces_every_hostile_program_is_contained(who: str) -> None:
    if not namespaces_work():
        pytest.skip("this machine has no unprivileged namespaces")
    found = outcomes(who, "required")
    check(found)
    assert found["sandbox"]["fork"] is True


@pytest.mark.parametrize(
    "who",
    [
        "this user",
        pytest.param("root with a readable interpreter", marks=pytest.mark.long),
        pytest.param("another user", marks=pytest.mark.long),
    ],
)
def test_without_namespaces_every_hostile_program_is_contained(who: str) -> None:
    if not has_landlock_and_seccomp():
        pytest.skip("this kernel has no Landlock or no seccomp")
    found = outcomes(who, "none")
    check(found)
    if who == "root with a readable interpreter":
        assert 60_706 <= found["sandbox"]["uid"] <= 61_183
    if who == "another user":
        assert found["sandbox"]["uid"] is None


def has_landlock_and_seccomp() -> bool:
    sandbox = Sandbox(LIMITS, "none")
    try:
        return sandbox.protections.landlock and sandbox.protections.seccomp
    finally:
        sandbox.close()


@pytest.fixture(scope="module", params=["auto", "none"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    made = Sandbox(LIMITS, request.param)
    yield made
    made.close()


def run(sandbox: Sandbox, code: str, stdin: str = "") -> tuple[str, str | None]:
    outcome = sandbox.run(SandboxJob((code,), module_name="__main__", stdin=stdin))
    return outcome.run.stdout, outcome.error


def test_a_program_reads_stdin_and_writes_files_in_an_empty_folder(sandbox: Sandbox) -> None:
    code = "import os\nopen('a', 'w').write(input() + '!')\nprint(open('a').read(), os.listdir('.'))"
    assert run(sandbox, code, "héllo\nmore") == ("héllo! ['a']\n", None)
    assert run(sandbox, "import os; print(os.listdir('.'))") == ("[]\n", None)


def test_the_standard_library_works_with_extension_modules_and_files(sandbox: Sandbox) -> None:
    code = "import asyncio, decimal, hashlib, sqlite3, tempfile, zlib\n"
    code += "print(hashlib.md5(b'').hexdigest()[:4], tempfile.TemporaryFile().write(b'12'))\n"
    code += "async def seven(): return 7\nprint(asyncio.run(seven()))"
    assert run(sandbox, code) == ("d41d 2\n7\n", None)


def test_numpy_can_be_imported_where_it_is_installed(sandbox: Sandbox) -> None:
    pytest.importorskip("numpy")
    assert run(sandbox, "import numpy as np; print(int(np.arange(4) @ np.arange(4)))") == ("14\n", None)


def test_rloom_and_other_installed_packages_are_not_there(sandbox: Sandbox) -> None:
    for package in ("rloom", "pydantic"):
        assert f"No module named '{package}'" in (run(sandbox, f"import {package}")[1] or "")


def test_the_scratch_folder_is_removed_with_what_is_in_it() -> None:
    made = Sandbox(LIMITS, "none")
    code = "import os; print(os.getcwd()); os.mkdir('a'); open('a/b', 'w'); os.chmod('a', 0)"
    scratch = Path(run(made, code)[0].strip())
    assert scratch.parent.name.startswith("rloom-sandbox-")
    assert scratch.parent.exists()
    assert not scratch.exists()
    made.close()
    assert not scratch.parent.exists()


def test_a_launcher_that_was_killed_is_an_error_and_is_replaced() -> None:
    made = Sandbox(LIMITS, "auto")
    made.run(SandboxJob(("pass",)))
    assert made._launcher is not None
    made._launcher._process.kill()
    with pytest.raises(SandboxError, match="the sandbox's launcher failed"):
        made.run(SandboxJob(("pass",)))
    assert made.run(SandboxJob(("pass",))).error is None
    made.close()


def test_required_isolation_is_an_error_where_namespaces_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, uid: int) -> bool:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("rloom.rewards.sandbox.namespaces.map_ids", refuse)
    with pytest.raises(SandboxError, match=r"reward_model\.sandbox\.isolation=required: .*Operation not permitted"):
        check_sandbox(LIMITS, "required")
    line = check_sandbox(LIMITS, "auto")
    assert "no namespaces: the ids of the user namespace cannot be mapped" in line


def test_the_line_at_the_start_lists_what_is_there_and_what_is_not() -> None:
    full = Protections(namespaces=True, uid=60_706, seccomp=True, landlock=False, fork=True, memory=True)
    assert description(full) == (
        "Generated code runs in a sandbox with time, memory, file, process and output limits, user, mount, pid, "
        "network, ipc and uts namespaces, a uid of its own, a seccomp filter (no sockets), one memory limit for all "
        "processes of a program."
    )
    bare = Protections(
        namespaces=False,
        uid=None,
        seccomp=False,
        landlock=False,
        fork=True,
        memory=False,
        faults={"seccomp": "EPERM"},
    )
    assert description(bare) == (
        "Generated code runs in a sandbox with time, memory, file, process and output limits. Not protected on this "
        "machine: reading and writing the files that this user may read and write; reading the environment of this "
        "user's processes; the network; signals to this user's processes; the number of files in the scratch folder; "
        "the memory of several processes together (each has the limit). (no seccomp: EPERM)"
    )


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_decides_by_number_and_argument_on_both_architectures(machine: str) -> None:
    column = ["x86_64", "aarch64"].index(machine)
    policy = seccomp.Policy(only_own_signals=True, forbid_processes=True)
    filter_ = seccomp.own_filter(policy, 77, machine)
    allow, refuse, kill = 0x7FFF0000, 0x00050001, 0x80000000
    architecture = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]

    def decision(number: int, argument: int = 0, of: int = architecture) -> int:
        return interpret(filter_, {0: number, 4: of, 16: argument & 0xFFFFFFFF})

    socket, read, openat = (41, 198)[column], (0, 63)[column], (257, 56)[column]
    assert [decision(read), decision(openat), decision(socket)] == [allow, allow, refuse]
    kill_call = seccomp.KILL[column]
    assert [decision(kill_call, pid) for pid in (77, 0, -77, 78, 1, -1)] == [allow] * 3 + [refuse] * 3
    assert [decision(seccomp.PRLIMIT[column], pid) for pid in (0, 77, 78)] == [allow, allow, refuse]
    clone = seccomp.CLONE[column]
    thread, process, user_namespace = 0x3D0F00, 0x1200011, 0x10010000
    assert [decision(clone, flags) for flags in (thread, process, user_namespace)] == [allow, refuse, refuse]
    assert decision(seccomp.CLONE3[column]) == 0x00050000 | 38  # ENOSYS
    assert decision(read, of=0x40000003) == kill  # the 32-bit interface
    if machine == "x86_64":
        assert decision(0x40000000 + read) == kill


def interpret(program: bytes, data: dict[int, int]) -> int:
    """The four instructions of classic BPF that the filter uses, as the kernel defines them."""
    lines = list(struct.iter_unpack("<HBBI", program))
    at = value = 0
    while True:
        code, if_true, if_false, constant = lines[at]
        if code == 0x06:
            return constant
        if code == 0x20:
            value = data[constant]
            at += 1
            continue
        holds = {0x15: value == constant, 0x35: value >= constant, 0x45: bool(value & constant)}[code]
        at += 1 + (if_true if holds else if_false)
