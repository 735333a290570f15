"""The shape of a source tree in numbers: what is long, what exists twice, what imports what, what one step runs.

    python -m tests.architecture.shape [TREE] [--step]

prints the numbers of TREE (by default of this one). All but the last are read from the syntax trees; nothing of rloom
is imported. `--step` adds the files on the way of one training step, which is counted by running it: `step_files`.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

# names of rollout engines, training strategies and reward kinds, as values of keys
KIND_NAMES = frozenset(
    {
        *("native", "hf", "vllm", "sglang", "trtllm"),
        *("fsdp", "fsdp2", "megatron"),
        *("rules", "function", "model", "judge", "remote"),
    }
)


@cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


@dataclass(frozen=True)
class Module:
    """A Python file of the package."""

    name: str  # rloom.config.load
    path: Path
    text: str
    known: frozenset[str]  # the modules of its tree

    @property
    def tree(self) -> ast.Module:
        return parse(self.path)

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def folder(self) -> Path:
        return self.path.parent

    def imports(self) -> tuple[str, ...]:
        """Full names of what it imports, wherever in the file: `from rloom.config import load` -> rloom.config.load."""
        return imports_of(self)

    def uses(self) -> set[str]:
        """The modules of rloom that it imports when it runs, also within functions; not those for type checkers."""
        found = {name for node in running_nodes(self.tree) for name in imported_names(node, self)}
        return {name for name in found & self.known if name != self.name}


@dataclass(frozen=True)
class Tree:
    root: Path

    @cached_property
    def modules(self) -> tuple[Module, ...]:
        files = sorted((self.root / "rloom").rglob("*.py"))
        known = frozenset(self.name_of(file) for file in files)
        return tuple(Module(self.name_of(file), file, file.read_text(encoding="utf-8"), known) for file in files)

    def name_of(self, file: Path) -> str:
        parts = file.relative_to(self.root).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def size(self, part: str = "rloom") -> tuple[int, int]:
        """(lines, files) of a package and its folders."""
        found = [module.lines for module in self.modules if under(module.name, part)]
        return sum(found), len(found)

    def files_per_folder(self) -> dict[str, int]:
        return dict(Counter(str(module.folder.relative_to(self.root)) for module in self.modules))

    def file_lengths(self) -> dict[str, int]:
        return {module.name: module.lines for module in self.modules}

    def function_lengths(self) -> dict[str, int]:
        return {
            f"{module.name}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
            for module in self.modules
            for node in ast.walk(module.tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }

    def repeated_classes(self) -> dict[str, list[str]]:
        """Class name -> the modules that define a class of this name, where they are several."""
        found = defaultdict(list)
        for module in self.modules:
            for node in ast.walk(module.tree):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(module.name)
        return {name: modules for name, modules in sorted(found.items()) if len(modules) > 1}

    def importers(self) -> dict[str, set[str]]:
        """Module -> the modules that import it."""
        found: dict[str, set[str]] = {module.name: set() for module in self.modules}
        for module in self.modules:
            for name in set(module.imports()) & found.keys() - {module.name}:
                found[name].add(module.name)
        return found

    def fragments(self, fewest_lines: int) -> dict[str, str]:
        """Short files that a single module imports, which is in their own folder -> that module."""
        places = {module.name: module for module in self.modules}
        found = {}
        for name, importers in self.importers().items():
            module = places[name]
            if module.lines >= fewest_lines or module.path.stem in ("__init__", "__main__") or len(importers) != 1:
                continue
            [importer] = importers
            if places[importer].folder == module.folder:
                found[name] = importer
        return found

    def import_circles(self) -> list[list[str]]:
        """Groups of modules of which each uses all others, directly or through others."""
        uses = {module.name: module.uses() for module in self.modules}
        reached = {name: reachable(name, uses) for name in uses}
        circles = {frozenset({name, *(n for n in found if name in reached[n])}) for name, found in reached.items()}
        return sorted(sorted(circle) for circle in circles if len(circle) > 1)

    def kind_comparisons(self) -> list[str]:
        """Places that compare a value with the name of an engine, a strategy or a reward kind, also by a constant."""
        constants = {
            target.id: node.value.value
            for module in self.modules
            for node in module.tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name) and node.value.value in KIND_NAMES
        }

        def is_kind(node: ast.AST) -> bool:
            if isinstance(node, ast.Tuple | ast.List | ast.Set):
                return any(is_kind(element) for element in node.elts)
            value = node.value if isinstance(node, ast.Constant) else constants.get(getattr(node, "id", ""))
            return isinstance(value, str) and value in KIND_NAMES

        def compares(node: ast.AST) -> bool:
            if isinstance(node, ast.MatchValue):
                return is_kind(node.value)
            if not isinstance(node, ast.Compare):
                return False
            # `"model" in contents` asks a container for an entry
            entry = isinstance(node.ops[0], ast.In | ast.NotIn)
            return any(map(is_kind, node.comparators if entry else (node.left, *node.comparators)))

        return [
            f"{module.path.relative_to(self.root)}:{node.lineno}"
            for module in self.modules
            for node in ast.walk(module.tree)
            if compares(node)
        ]


def under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def called_name(node: ast.Call) -> str:
    """`f` of `f()` and of `a.f()`; an expression that is called has no name."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


@cache
def imports_of(module: Module) -> tuple[str, ...]:
    return tuple(name for node in ast.walk(module.tree) for name in imported_names(node, module))


def imported_names(node: ast.AST, module: Module) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0 and node.module, f"{module.name}: imports are absolute"
        # the module, where the name is one; else the package that defines the name
        full = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        is_ours = node.module.startswith("rloom")
        return [node.module if is_ours and name not in module.known else name for name in full.values()]
    if isinstance(node, ast.Call) and called_name(node) in ("import_module", "import_library"):
        return [str(part.value) for part in node.args[:1] if isinstance(part, ast.Constant)]
    return []


def running_nodes(tree: ast.Module) -> Iterator[ast.AST]:
    """All nodes but those that only type checkers read."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            waiting += ast.iter_child_nodes(node)


def reachable(start: str, uses: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = uses[waiting.pop()] - found
        found |= new
        waiting += new
    return found


# Put into a folder of PYTHONPATH: every Python process of the run imports it when it starts.
HOOK = """
import os, sys, threading

FOLDER, PACKAGE = os.environ["SHAPE_FOLDER"], os.environ["SHAPE_PACKAGE"]
ROOTS = {("data/prompts.py", "load_prompts"), ("training/steps.py", "take_step"), ("trainer/steps.py", "take_step")}
IS_DRIVER = os.environ.pop("SHAPE_DRIVER", None) is not None
MAIN = threading.main_thread().ident
seen, inside, began = set(), 0, not IS_DRIVER


def hook(frame, event, _):
    global inside, began
    code = frame.f_code
    if event not in ("call", "return") or not code.co_filename.startswith(PACKAGE):
        return
    file = code.co_filename[len(PACKAGE):]
    is_root = (file, code.co_name) in ROOTS
    if event == "return":
        inside -= is_root
        return
    inside += is_root
    began = began or (is_root and code.co_name == "take_step")
    on_main = IS_DRIVER and threading.get_ident() == MAIN
    if file in seen or not (inside if on_main else began):
        return
    # 1: a function, not the body of a class or a module; nor one that a module calls while it is imported
    if code.co_flags & 1 and not (frame.f_back and frame.f_back.f_code.co_name == "<module>"):
        seen.add(file)
        with open(os.path.join(FOLDER, str(os.getpid())), "a") as out:
            out.write(file + chr(10))


threading.setprofile(hook)
sys.setprofile(hook)
"""

RUN = """
import json, sys, threading, urllib.request
from pathlib import Path
import rloom
from rloom.view.access import ViewAccess
from rloom.view.run_cache import RunCache
from rloom.view.server import ViewServer

result = rloom.train(json.loads(sys.argv[1]))
server = ViewServer(0, RunCache([result.run_dir]), ViewAccess("t" * 22))
threading.Thread(target=server.serve_forever, daemon=True).start()
for path in ("metrics", "timeline", "train/1/prompts", "train/1/prompts/0"):
    address = f"http://127.0.0.1:{server.server_port}/api/runs/0/{path}?token={'t' * 22}"
    assert urllib.request.urlopen(address, timeout=60).status == 200
server.shutdown()
"""

STEP_KEYS = {
    "algorithm.adv_estimator": "grpo",
    "actor_rollout_ref.rollout.name": "native",
    "actor_rollout_ref.rollout.n": 4,
    "data.train_batch_size": 8,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
    "trainer.total_training_steps": 1,
    "trainer.save_freq": 1,
    "trainer.test_freq": -1,
    "trainer.val_before_train": False,
    "trainer.n_gpus_per_node": 1,
    "trainer.device": "cpu",
    "trainer.logger": ["console"],
}


def step_files(root: Path) -> list[str]:
    """The files of rloom/ on the way of one training step, from the rows of a data file to the page of `rloom view`.

    A GRPO step of the embedded model in one process, with the native engine and a rule reward, is run and profiled
    (sys.setprofile, in all threads and in the reward processes). A file is on the way if a function of it runs

    - in the main thread, while prompts are loaded or while `StepLoop.take_step` runs: sampling, scoring, advantages,
      updates, the new weights for the engine, metrics, the checkpoint
    - in another thread or a child process, from the beginning of the step on: scoring, dumps, and at the end the
      viewer's server, which is asked for the metrics, the timeline, the prompts of the step and one prompt's answers.

    What builds the run, and what runs only while a module is imported, does not count.
    """
    with tempfile.TemporaryDirectory() as folder:
        found, hook = Path(folder, "found"), Path(folder, "hook")
        found.mkdir()
        hook.mkdir()
        (hook / "sitecustomize.py").write_text(HOOK)
        environment = {
            **os.environ,
            "PYTHONPATH": f"{hook}{os.pathsep}{root}",
            "SHAPE_FOLDER": str(found),
            "SHAPE_PACKAGE": f"{root / 'rloom'}{os.sep}",
            "SHAPE_DRIVER": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        keys = json.dumps({**STEP_KEYS, "trainer.default_local_dir": f"{folder}/run"})
        command = [sys.executable, "-c", RUN, keys]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the step could not be run:\n{done.stdout}{done.stderr}")
        return sorted({line for file in found.iterdir() for line in file.read_text().splitlines()})


def longest(lengths: dict[str, int]) -> tuple[str, int]:
    return max(lengths.items(), key=lambda entry: entry[1])


def numbers(tree: Tree) -> dict[str, Any]:
    return {
        "lines, files": tree.size(),
        "config: lines, files": tree.size("rloom.config"),
        "largest folder": longest(tree.files_per_folder()),
        "longest file": longest(tree.file_lengths()),
        "longest function": longest(tree.function_lengths()),
        "files under 40 lines with one importer, in their folder": len(tree.fragments(40)),
        "class names that exist twice": len(tree.repeated_classes()),
        "comparisons with names of engines, strategies, reward kinds": len(tree.kind_comparisons()),
        "import circles": len(tree.import_circles()),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.architecture.shape")
    parser.add_argument("tree", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--step", action="store_true", help="run one training step and count its files")
    given = parser.parse_args(arguments)
    tree = Tree(given.tree.resolve())
    for name, value in numbers(tree).items():
        print(f"{name}: {value if isinstance(value, int) else ', '.join(map(str, value))}")
    print("files per folder:", tree.files_per_folder())
    print("twice:", tree.repeated_classes())
    print("circles:", tree.import_circles())
    print("comparisons:", *tree.kind_comparisons())
    if given.step:
        files = step_files(tree.root)
        print(f"files on the way of one step: {len(files)}", *files)


if __name__ == "__main__":
    main(sys.argv[1:])
