"""Imports of packages that are not installed, in a process as users' code has it."""

import subprocess
import sys
import textwrap

import pytest


def run(tmp_path, code, **packages):
    """Run it with stand-ins, beside packages of these names and files."""
    for name, files in packages.items():
        for path, text in files.items():
            file = tmp_path / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    start = "import sys; sys.path.append(sys.argv[1]); from rloom.episodes.stand_ins import install_stand_ins as s; s()"
    command = [sys.executable, "-c", f"{start}\n{textwrap.dedent(code)}", str(tmp_path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_names_are_found_where_the_package_is_missing(tmp_path):
    code = """
        from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
        from verl.utils.profiler import simple_timer
        from verl.utils import rollout_trace
        import verl.workers.rollout.replica as replica
        from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor
        import verl.experimental.agent_loop
        timing = {}
        with simple_timer("a", timing):
            pass
        assert issubclass(AgentLoopBase, verl.experimental.agent_loop.AgentLoopBase), "one class under both names"
        out = AgentLoopOutput(prompt_ids=[1], response_ids=[2], response_mask=[1], metrics=timing)
        print(out.response_mask, rollout_trace.rollout_trace_op(len)([1]), replica.TokenOutput(token_ids=[]).token_ids)
        print("torch" in sys.modules)
    """
    found = run(tmp_path, code)
    assert found.stdout == "[1] 1 []\nFalse\n", found.stderr


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("import verl.trainer.main_ppo", "verl.trainer"),
        ("from verl.utils import hf_tokenizer", "'hf_tokenizer' from verl.utils"),
        ("from verl.utils.profiler import nothing", "'nothing' from verl.utils.profiler"),
    ],
)
def test_a_name_that_has_no_stand_in_is_an_import_error_that_says_so(tmp_path, statement, name):
    found = run(tmp_path, f"try:\n    {statement}\nexcept ImportError as error:\n    print(error)")
    assert name in found.stdout and "install verl" in found.stdout, found.stderr


def test_an_installed_package_is_never_replaced(tmp_path):
    real = {"__init__.py": "", "utils/__init__.py": "here = 1"}
    code = """
        from verl.utils import here
        print(here)
        try:
            import verl.utils.profiler
        except ModuleNotFoundError as error:
            print(error)
    """
    found = run(tmp_path, code, verl=real)
    assert found.stdout == "1\nNo module named 'verl.utils.profiler'\n", found.stderr


def test_other_packages_are_as_before(tmp_path):
    found = run(tmp_path, "try:\n    import verlx\nexcept ModuleNotFoundError as error:\n    print(error)")
    assert found.stdout == "No module named 'verlx'\n", found.stderr
