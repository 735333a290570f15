"""`rloom judge try --prompt P --response R`"""

from collections.abc import Sequence

from rloom.cli.parsing import USER_ERRORS, CommandParser, epilog
from rloom.config.load import load_config
from rloom.console import run_safely, split_hydra_flags


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser("rloom judge", description="The API judge of reward_model.api.")
    commands = parser.add_subparsers(dest="command", required=True)
    attempt = commands.add_parser(
        "try",
        usage="%(prog)s --prompt TEXT --response TEXT [--ground_truth TEXT] [key=value ...]",
        help="score one answer; exit 1 without a score",
        description="One call of the judge, without the cache: request, answer, score, tokens and cost.",
        allow_abbrev=False,
        **epilog(
            "rloom judge try --prompt '1 + 1' --response 2 reward_model.api.type=openai",
            f"0 a score · 1 no score · {USER_ERRORS}",
        ),
    )
    attempt.add_argument("--prompt", required=True)
    attempt.add_argument(
        "--response", required=True, action="append", help="several with reward_model.api.mode=groupwise"
    )
    attempt.add_argument("--ground_truth")
    given, rest = parser.parse_known_args(arguments)

    def run() -> int:
        from rloom.config.reward_sections import check_judge
        from rloom.rewards.judge.judge import try_judge

        overrides, source = split_hydra_flags(rest)
        settings = check_judge(load_config(overrides, **source).reward_model.api, responses=len(given.response))
        without_cache = settings.model_copy(update={"cache_dir": None, "budget": None})
        return 0 if try_judge(without_cache, given.prompt, given.response, given.ground_truth) else 1

    return run_safely(run)
