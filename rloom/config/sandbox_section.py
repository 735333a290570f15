"""The keys of the sandbox in which generated code runs."""

from typing import Literal

from rloom.config.section import Section, key


class Sandbox(Section):
    timeout_s: float = key(
        15.0,
        "Wall time of one run of a program. A problem with inputs for stdin runs the program once for each test; other "
        "problems run all tests in one run.",
        gt=0,
    )
    total_timeout_s: float = key(60.0, "Wall time for all runs of one answer; tests left after it have failed.", gt=0)
    cpu_s: int = key(
        10,
        "Processor time of one run, for each process. A row can set less: time_limit_s in its ground truth, or a "
        "reference solution in extra_info.answer, of whose time an answer may take ten times, and at least 2 s.",
        ge=1,
    )
    memory_mb: int = key(1024, "Address space of each process, in MiB.", ge=64)
    file_mb: int = key(64, "Size of a file, and with namespaces of the whole scratch folder, in MiB.", ge=1)
    processes: int = key(8, "Processes and threads of one run, together.", ge=1)
    output_kb: int = key(
        1024, "What one run may print, and what one call of a function may return, in KiB; with more it is ended.", ge=1
    )
    partial_credit: bool = key(False, "Score the share of tests that passed, instead of 1 for all and 0 otherwise.")
    isolation: Literal["auto", "required", "none"] = key(
        "auto",
        "auto: namespaces, or else Landlock and seccomp; an error at the start where the machine has neither. "
        "required: namespaces, or an error. none: without namespaces and with whatever else the machine has, even "
        "nothing. What protects is listed at the start.",
        needs_consent=lambda value: value not in ("auto", "required"),  # generated code without a barrier
        same_run=True,
    )
