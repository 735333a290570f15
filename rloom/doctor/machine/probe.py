"""Imports modules in a process of its own and prints one line of JSON. Standard library only: it runs as a script.

A broken installation can fail in many ways at import, or end the process, so nothing heavy is imported elsewhere.
"""

import importlib
import json
import sys
import traceback
from types import TracebackType
from typing import Any


def probe(names: list[str]) -> dict[str, Any]:
    """`names`: modules, or module:attribute for a module that imports its parts lazily."""
    for name in names:
        module, _, attribute = name.partition(":")
        try:
            loaded = importlib.import_module(module)
            if attribute:
                getattr(loaded, attribute)
        except BaseException as error:  # an extension module may raise anything
            return {"failed": module, "error": summary(error), "packages": packages_in(error)}
    return {"torch": torch_facts()} if "torch" in sys.modules else {}


def summary(error: BaseException) -> str:
    last = traceback.format_exception_only(root(error))[-1].strip().splitlines()
    return last[0] if last else type(error).__name__


def root(error: BaseException) -> BaseException:
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


def packages_in(error: BaseException) -> list[str]:
    """Installed packages whose files are in the traceback of the first error, the outermost first."""
    return list(dict.fromkeys(folder for folder in map(package_of, files(root(error).__traceback__)) if folder))


def files(trace: TracebackType | None) -> list[str]:
    return [frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace)]


def package_of(file: str) -> str | None:
    _, installed, rest = file.replace("\\", "/").rpartition("site-packages/")
    return rest.split("/")[0].removesuffix(".py") if installed else None


def torch_facts() -> dict[str, Any]:
    torch = sys.modules["torch"]
    available = torch.cuda.is_available()
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "cuda": torch.version.cuda,
        "gpus": [f"{each.name}, {each.total_memory / 2**30:.0f} GiB" for each in properties] if available else [],
        "bfloat16": bool(available and torch.cuda.is_bf16_supported()),
    }


if __name__ == "__main__":
    print("\n" + json.dumps(probe(sys.argv[1:])))
