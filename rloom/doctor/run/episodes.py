"""Checks of answers of several turns: endings, calls of tools, environments, pasts that the template rewrites."""

from rloom.doctor.run.finding import Advice, Cause, Change, Fault, Finding, Severity, Support
from rloom.doctor.run.history import FEWEST_CERTAIN, FEWEST_STEPS, ROLLOUT, SCORE, History

TURNS = f"{ROLLOUT}.multi_turn"
LONGEST = "data.max_response_length"

REWRITTEN = 0.1  # of the episodes
AT_LIMIT, AT_LIMIT_CERTAIN, AT_LIMIT_ALMOST_ALL = 0.3, 0.5, 0.9  # of the episodes
FAILING, FAILING_CERTAIN, FAILING_MOST = 0.01, 0.05, 0.5  # of the episodes
TIMEOUTS, TIMEOUTS_CERTAIN = 0.05, 0.15  # of the calls
ERRORS, ERRORS_RISEN, ERRORS_CERTAIN = 0.5, 0.2, 0.7  # of the calls
UNUSED = 0.02  # calls an episode
CALLS_SHARE, CALLS_CORRELATION = 0.2, 0.3  # of the scores' variance, as for the length

# (metric, what it is a limit of)
LIMITS = {
    "episode/ended/turn_limit": f"{TURNS}.max_assistant_turns",
    "episode/ended/token_limit": LONGEST,
    "episode/ended/user_turn_limit": f"{TURNS}.max_user_turns",
    "episode/ended/episode_token_limit": f"{TURNS}.max_episode_length",
    "episode/ended/turn_token_limit": f"{TURNS}.max_turn_length",
    "episode/ended/time_limit": f"{TURNS}.episode_timeout_s",
}


def doubled(history: History, key: str, why: str) -> list[Advice]:
    value = history.number(key, 0.0)
    return [Change(key, int(2 * value) if value == int(value) else 2 * value, why, "higher")] if value else []


def late(history: History, name: str) -> float:
    """Mean of the last third of the steps; 0: not measured."""
    series = history.series(name)
    return series.tail.mean if len(series) else 0.0


REWRITES = Fault(
    "past_rewritten",
    Severity.NOTE,
    "The chat template rewrites the past of episodes",
    (
        Cause(
            "the template writes earlier answers in another way once messages follow, for example without their "
            "reasoning",
            advice=lambda history: [
                "set actor_rollout_ref.model.custom_chat_template to a template that writes earlier answers as they "
                "were sampled",
            ],
        ),
    ),
    ("episode/rewritten_past",),
)


def past_rewritten(history: History) -> Finding | None:
    share, repeated = history.series("episode/rewritten_past"), late(history, "episode/repeated_tokens")
    if len(share) < FEWEST_STEPS or share.tail.mean <= REWRITTEN:
        return None
    evidence = [
        f"episode/rewritten_past: in {share.tail.mean:.0%} of the episodes of the last {len(share.tail)} steps the "
        f"template wrote the past in another way",
        f"episode/repeated_tokens: {repeated:,.0f} tokens of an episode are read once more, in "
        f"{late(history, 'episode/branches'):.1f} branches",
    ]
    return REWRITES.found(history, share.span, evidence, certain=False)


def limit_of(history: History) -> str:
    """The metric of the limit that most episodes reach."""
    return max(LIMITS, key=lambda name: late(history, name))


def ends_at(name: str) -> Cause:
    key = LIMITS[name]
    return Cause(
        f"{key} is too small for this task, or the policy does not end its episodes",
        lambda history: limit_of(history) == name,
        lambda history: [
            *doubled(history, key, "room for whole episodes"),
            *(doubled(history, "data.max_length", "room for whole episodes") if key == LONGEST else []),
            "look at the endings: `rloom view` shows every turn of an answer",
        ],
    )


AT_LIMITS = Fault(
    "episodes_at_limit", Severity.WARNING, "Episodes end at a limit", tuple(map(ends_at, LIMITS)), tuple(LIMITS)
)


def episodes_at_limit(history: History) -> Finding | None:
    found = {name: history.series(name) for name in LIMITS if len(history.series(name)) >= FEWEST_STEPS}
    if not found:
        return None
    share, name = sum(series.tail.mean for series in found.values()), limit_of(history)
    if name not in found:
        return None
    largest = found[name]
    if share <= AT_LIMIT or (largest.trend is not None and largest.trend.falls):  # it learns to end them
        return None
    evidence = [
        f"{share:.0%} of the episodes of the last {len(largest.tail)} steps end at a limit",
        f"{name}: {largest.tail.mean:.0%}, {largest.values[0]:.0%} in step {largest.steps[0]}; "
        f"{LIMITS[name]}={history.config.get(LIMITS[name])}",
    ]
    certain = share > AT_LIMIT_CERTAIN and len(largest) >= FEWEST_CERTAIN and not history.score_rises
    all_cut = share > AT_LIMIT_ALMOST_ALL and not history.score_rises
    severity = Severity.ERROR if all_cut else None
    return AT_LIMITS.found(history, largest.tail.span, evidence, certain=certain, severity=severity)


def steps_time_out(history: History) -> Support:
    share, failed = late(history, "episode/ended/environment_timeout"), late(history, "episode/failed")
    if not share or share < 0.5 * failed:
        return share > 0
    return f"episode/ended/environment_timeout: {share:.1%} of the episodes of the last steps"


def agents_ask_nothing(history: History) -> Support:
    share, failed = late(history, "agent/without_answer"), late(history, "episode/failed")
    if not share or share < 0.5 * failed:
        return share > 0
    return f"agent/without_answer: {share:.1%} of the episodes of the last steps"


ENVIRONMENTS = Fault(
    "environment_failures",
    Severity.WARNING,
    "Environments fail",
    (
        Cause(
            "the environment raises an error, or its process ends; the console prints the most common reasons",
            advice=lambda history: ["correct the environment for the answers that the run's warnings name"],
        ),
        Cause(
            f"a step takes longer than {TURNS}.tool_timeout_s",
            steps_time_out,
            lambda history: doubled(history, f"{TURNS}.tool_timeout_s", "time for a slow step"),
        ),
        Cause(
            "the agent returns without an answer of the policy",
            agents_ask_nothing,
            lambda history: ["send the agent's requests to base_url (OPENAI_BASE_URL, ANTHROPIC_BASE_URL)"],
        ),
    ),
    ("episode/failed",),
)


def environment_failures(history: History) -> Finding | None:
    failed = history.series("episode/failed")
    if len(failed) < FEWEST_STEPS or failed.mean <= FAILING:
        return None
    evidence = [
        f"episode/failed: {failed.mean:.1%} of the episodes, {failed.tail.mean:.1%} in the last "
        f"{len(failed.tail)} steps; they have no score and are not trained"
    ]
    return ENVIRONMENTS.found(
        history,
        failed.span,
        evidence,
        certain=failed.mean > FAILING_CERTAIN and len(failed) >= FEWEST_CERTAIN,
        severity=Severity.ERROR if failed.mean > FAILING_MOST else None,
    )


TIMED_OUT = Fault(
    "tool_timeouts",
    Severity.WARNING,
    "Tools reach their time limit",
    (
        Cause(
            "a tool waits for something, or does not end for some arguments",
            advice=lambda history: ["look at the calls that `rloom view` shows with an error"],
        ),
        Cause(
            f"{TURNS}.tool_timeout_s is too small",
            advice=lambda history: doubled(history, f"{TURNS}.tool_timeout_s", "time for a slow tool"),
        ),
    ),
    ("tool/timeouts",),
)


def tool_timeouts(history: History) -> Finding | None:
    share = history.series("tool/timeouts")
    if len(share) < FEWEST_STEPS or share.tail.mean <= TIMEOUTS:
        return None
    evidence = [
        f"tool/timeouts: {share.tail.mean:.0%} of the calls of the last {len(share.tail)} steps took longer than "
        f"{TURNS}.tool_timeout_s={history.config.get(f'{TURNS}.tool_timeout_s')}; tool/seconds/mean "
        f"{late(history, 'tool/seconds/mean'):.3g}"
    ]
    certain = share.tail.mean > TIMEOUTS_CERTAIN and len(share) >= FEWEST_CERTAIN
    return TIMED_OUT.found(history, share.tail.span, evidence, certain=certain)


def errors_rise(history: History) -> Support:
    trend = history.series("tool/errors").trend
    return trend is not None and trend.rises


TOOL_ERRORS = Fault(
    "tool_errors",
    Severity.WARNING,
    "Calls of tools fail",
    (
        Cause(
            "the policy has learned to write calls that fail: the reward pays for a call, whatever it returns",
            errors_rise,
            lambda history: ["give no reward for a call that fails"],
        ),
        Cause(
            "the calls are not in the form that is read, or name tools or arguments that do not exist",
            lambda history: not errors_rise(history),
            lambda history: [
                "look at the calls that `rloom view` shows with an error",
                "describe each tool and its arguments in its docstring",
            ],
        ),
        Cause("the tool itself raises errors", advice=lambda history: ["call the tool with the same arguments"]),
    ),
    ("tool/errors",),
)


def tool_errors(history: History) -> Finding | None:
    errors = history.series("tool/errors")
    if len(errors) < FEWEST_STEPS:
        return None
    risen = bool(errors_rise(history)) and errors.tail.mean - errors.head.mean > ERRORS_RISEN
    trend = errors.trend
    if not risen and (errors.tail.mean <= ERRORS or (trend is not None and trend.falls)):
        return None
    evidence = [
        f"tool/errors: {errors.tail.mean:.0%} of the calls of the last {len(errors.tail)} steps failed, "
        f"{errors.head.mean:.0%} in the first {len(errors.head)}"
    ]
    certain = len(errors) >= FEWEST_CERTAIN and (risen or errors.tail.mean > ERRORS_CERTAIN)
    return TOOL_ERRORS.found(history, errors.span, evidence, certain=certain)


def never_called(history: History) -> Support:
    return max(history.series("tool/calls").values, default=0.0) == 0


TOOLS_UNUSED = Fault(
    "tools_unused",
    Severity.WARNING,
    "Tools are not called",
    (
        Cause(
            "the chat template does not list the tools, or the model writes calls in a form that is not read",
            never_called,
            lambda history: [
                "use a model whose chat template has tools",
                "say in the prompt which tool to use and how a call is written",
                f"set {TURNS}.format to the form of this model",
            ],
        ),
        Cause(
            "the policy has learned to answer without tools: the reward does not need them",
            lambda history: not never_called(history),
            lambda history: ["use problems that need the tool, or leave the tools out"],
        ),
    ),
    ("tool/calls",),
)


def tools_unused(history: History) -> Finding | None:
    calls = history.series("tool/calls")
    if len(calls) < FEWEST_STEPS or calls.tail.mean > UNUSED:
        return None
    evidence = [
        f"tool/calls: {calls.tail.mean:.3g} calls an episode in the last {len(calls.tail)} steps, "
        f"{calls.values[0]:.3g} in step {calls.steps[0]}"
    ]
    return TOOLS_UNUSED.found(
        history, calls.tail.span, evidence, certain=bool(never_called(history)) and len(calls) >= FEWEST_CERTAIN
    )


CALLS_REWARDED = Fault(
    "tool_calls_rewarded",
    Severity.WARNING,
    "The reward depends on the number of calls of tools",
    (
        Cause(
            "the reward pays for calling a tool, whether or not the answer is right",
            advice=lambda history: ["pay for right answers alone, or give a call far less weight than a right answer"],
        ),
    ),
    ("tool/calls",),
)


def tool_calls_rewarded(history: History) -> Finding | None:
    """Needs a correctness apart from the score: calls that help to find right answers are what is wanted."""
    if not len(history.series("tool/calls")) or all(a.right is None for a in history.samples.answers):
        return None
    found = history.samples.calls_share
    if found is None or found[0] < CALLS_SHARE or found[1] < CALLS_CORRELATION:
        return None
    evidence = [
        f"{found[0]:.0%} of the variance of the scores inside groups goes with the number of calls among equally right "
        f"answers: more calls score higher (correlation {found[1]:.2f})"
    ]
    return CALLS_REWARDED.found(history, history.series(SCORE).span, evidence, certain=True)
