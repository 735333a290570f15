"""`rloom reward try`: score one answer by hand, in a worker process as a training run does, and show what was found."""

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from fractions import Fraction
from pathlib import Path
from typing import Any

from rloom.cli.parsing import CommandParser
from rloom.config.load import load_config
from rloom.console import run_safely
from rloom.errors import RewardError
from rloom.language import translate
from rloom.rewards.pool import RulePool
from rloom.rewards.routing import check_sources, rule_for
from rloom.rewards.rules.numbers import canonical
from rloom.terminal import padded, printable
from rloom.types import Sample, Score


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser("rloom reward", description="Rules and your own reward functions.")
    commands = parser.add_subparsers(dest="command", required=True)
    usage = "%(prog)s [FILE] [--source S] [--ground_truth T] [options] [reward_model.sandbox.KEY=VALUE ...]"
    add_arguments(commands.add_parser("try", usage=usage, help="score an answer by hand"))
    keys = [argument for argument in arguments if argument.startswith("reward_model.sandbox.")]
    given = parser.parse_args([argument for argument in arguments if argument not in keys])
    return run_safely(lambda: try_answer(given, load_config(keys).reward_model.sandbox.model_dump()))


EXAMPLES = """
  rloom reward try answer.txt --source openai/gsm8k --ground_truth 18
  echo 'It is 18.' | rloom reward try - --source openai/gsm8k --ground_truth 18 --method flexible
  rloom reward try --response 'so \\boxed{0.5}' --source lighteval/MATH --ground_truth '\\frac12'
  rloom reward try program.md --source mbpp --ground_truth '{"test_list": ["assert f(1) == 2"]}' \\
      reward_model.sandbox.timeout_s=5
  rloom reward try answer.txt --function my_reward.py:reward_func --column solution=18
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = f"examples:\n{EXAMPLES}", argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", nargs="?", metavar="FILE", help="text file with one answer; - reads stdin")
    parser.add_argument("--response", metavar="TEXT", help="the answer, instead of a file")
    parser.add_argument("--source", metavar="S", help="data source, which chooses the rule")
    parser.add_argument("--ground_truth", metavar="T")
    parser.add_argument("--prompt", metavar="TEXT", default="", help="the question, for functions that read it")
    parser.add_argument("--function", metavar="FILE[:NAME]", help="your own function, instead of a rule")
    parser.add_argument("--batch", action="store_true", help="the function takes lists (reward_manager=batch)")
    parser.add_argument("--method", help="of the rule for openai/gsm8k: strict or flexible")
    for flag, what in (("--reward_kwargs", "of the function"), ("--column", "of the row, also in extra_info")):
        parser.add_argument(flag, nargs="+", action="extend", default=[], metavar="NAME=VALUE", help=what)
    parser.add_argument("--timeout_s", type=float, default=10.0, help="reward_model.timeout_s (default 10)")


def try_answer(given: argparse.Namespace, sandbox: Mapping[str, Any]) -> int:
    """0 with a score, 1 with a failed one. `sandbox`: reward_model.sandbox, for rules that run generated code."""
    kwargs = _values("--reward_kwargs", given.reward_kwargs) | ({"method": given.method} if given.method else {})
    path, name = _function(given.function)
    if path is None:
        if given.source is None:
            raise RewardError("--source is missing: it chooses the rule; or use --function FILE for your own function")
        check_sources({given.source: []}, kwargs)
    columns = _values("--column", given.column)
    sample = Sample(
        data_source=given.source or "",
        prompt=given.prompt,
        response=_response(given),
        ground_truth=given.ground_truth,
        extra_info=columns,
        columns={"prompt": given.prompt, **columns},
    )
    pool = RulePool(
        num_workers=1,
        timeout_s=given.timeout_s,
        path=path,
        name=name,
        reward_kwargs=kwargs,
        whole_groups=given.batch,
        sandbox=sandbox,
    )
    with closing(pool):
        pool.check()
        [[score]] = asyncio.run(pool.score([(sample,)]))
    if path is None:
        found = "nothing" if score.ok and score.prediction is None else score.prediction
        print(render(sample, score, _describe_rule(sample.data_source), found, _parsed_truth(sample)))
    else:
        print(render(sample, score, f"{name} of {path}", score.prediction, sample.ground_truth))
    return 0 if score.ok else 1


def render(sample: Sample, score: Score, scorer: str, extracted: str | None, truth: str | None) -> str:
    rows = {
        "scored by": scorer,
        "response": translate(f"{len(sample.response)} characters"),
        "extracted": extracted,
        "ground truth": truth,
        "score": "failed" if score.value is None else f"{score.value:g}",
        **{name: f"{value:g}" for name, value in score.parts.items()},
        "detail": score.detail,
        "reason": score.reason and translate(score.reason),
    }
    indent = "\n" + " " * 14
    shown = [
        f"{padded(translate(name), 12)}  {indent.join(text.splitlines())}"
        for name, text in rows.items()
        if text is not None
    ]
    return printable("\n".join(shown))


def _response(given: argparse.Namespace) -> str:
    if (given.file is None) == (given.response is None):
        raise RewardError("give one answer: a FILE with its text, - for stdin, or --response TEXT")
    if given.response is not None:
        return str(given.response)
    if given.file == "-":
        return sys.stdin.read()
    try:
        return Path(given.file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RewardError(f"{given.file}: cannot be read as text ({error}); use a text file, or --response") from error


def _function(given: str | None) -> tuple[str | None, str]:
    """`my.py:name` -> ("my.py", "name")."""
    if given is None:
        return None, "compute_score"
    path, colon, name = given.rpartition(":")
    return (path, name) if colon and name.isidentifier() else (given, "compute_score")


def _values(flag: str, pairs: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise RewardError(f"{flag} {pair}: write it as NAME=VALUE")
        try:
            values[name] = json.loads(text)
        except json.JSONDecodeError:
            values[name] = text
    return values


def _describe_rule(data_source: str) -> str:
    rule = rule_for(data_source)
    assert rule is not None  # check_sources
    module = sys.modules[rule.compute_score.__module__]
    return f"rules/{module.__name__.rpartition('.')[2]}.py, {str(module.__doc__).splitlines()[0]}"


def _parsed_truth(sample: Sample) -> str:
    """As the rule reads it. A fault of it is the reason of the failed score."""
    rule = rule_for(sample.data_source)
    assert rule is not None  # check_sources
    try:
        truth = rule.true_answer(sample.data_source, sample.ground_truth)
    except ValueError:
        return f"{sample.ground_truth!r}, which cannot be parsed"
    if rule.sandboxed:
        parts = json.loads(str(sample.ground_truth)).items()
        return "\n".join(f"{name}: {_summary(value)}" for name, value in parts if value)
    return canonical(truth) if isinstance(truth, Fraction) else str(truth)


def _summary(value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value)} entries"
    text = str(value).strip()
    return text if len(text) <= 80 and "\n" not in text else f"{len(text.splitlines())} lines"
