"""Which rewards a run has, by name, and how they are mixed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rloom.config.reward_section import PartWeight
from rloom.config.schema import Config

# name of a part -> what may compute it; the first that is configured does
PARTS: Mapping[str, tuple[str, ...]] = {
    "rule_score": ("function", "rules"),
    "rm_score": ("model", "judge", "remote"),
    "api_score": ("judge",),
    "remote_score": ("remote",),
    "format_score": ("format",),
}
HOW_TO_SET = {
    "rules": "rules need no key",
    "function": "custom_reward_function.path",
    "model": "reward_model.path",
    "judge": "reward_model.api.enable",
    "remote": "reward_model.remote.urls",
    "format": "reward_model.format.pattern",
}
USUAL_NAME = {"function": "rule_score", "model": "rm_score", "judge": "api_score", "remote": "remote_score"}


@dataclass(frozen=True)
class RewardPart:
    name: str
    source: str  # a key of HOW_TO_SET
    weight: float = 1.0
    normalize: bool = False
    skip_failed: bool = False


def configured(config: Config) -> dict[str, bool]:
    """What can compute a reward -> whether the user set it. Rules are always there."""
    reward = config.reward_model
    return {
        "rules": True,
        "function": config.custom_reward_function.path is not None,
        "model": reward.model_path is not None,
        "judge": reward.api.enable,
        "remote": bool(reward.remote.addresses),
        "format": reward.format.pattern is not None,
    }


ACCURACY, SCORE = "accuracy", "score"


def validation_word(config: Config) -> str:
    """What validation measures: a rule or function decides whether an answer is right, also as a part of a mix; the
    scores of a reward model, a judge or a remote reward have a mean, which is no accuracy."""
    return ACCURACY if any(part.source in ("rules", "function") for part in reward_parts(config)) else SCORE


def reward_parts(config: Config) -> list[RewardPart]:
    """Of a checked configuration."""
    reward, found = config.reward_model, configured(config)
    if not reward.composite.enable:
        chosen = [source for source in USUAL_NAME if found[source]]
        source = chosen[0] if chosen else "rules"
        return [RewardPart(USUAL_NAME.get(source, "rule_score"), source, normalize=reward.normalize)]
    parts = []
    for name, given in reward.composite.weights.items():
        weight = given if isinstance(given, PartWeight) else PartWeight(weight=given)
        normalize = reward.composite.normalize if weight.normalize is None else weight.normalize
        source = next(source for source in PARTS[name] if found[source])
        parts.append(RewardPart(name, source, weight.weight, normalize, weight.failed == "skip"))
    return parts


def reward_faults(config: Config) -> Iterator[str]:
    reward = config.reward_model
    if reward.reward_manager == "batch" and config.custom_reward_function.path is None:
        yield (
            "reward_model.reward_manager=batch calls a function of yours with lists; name it with "
            "custom_reward_function.path=FILE, or use naive"
        )
    yield from composite_faults(config) if reward.composite.enable else single_faults(config)


def single_faults(config: Config) -> Iterator[str]:
    found = configured(config)
    chosen = [source for source in USUAL_NAME if found[source]]
    if len(chosen) > 1:
        keys = " and ".join(HOW_TO_SET[source] for source in chosen)
        weights = " ".join(f"+reward_model.composite.weights.{USUAL_NAME[source]}=0.5" for source in chosen)
        yield f"{keys} each set a reward; keep one, or mix them: reward_model.composite.enable=True {weights}"
    if found["format"]:
        yield (
            f"reward_model.format.pattern={config.reward_model.format.pattern}: a format reward is a part of a mix; "
            "set reward_model.composite.enable=True and +reward_model.composite.weights.format_score=0.1"
        )


def composite_faults(config: Config) -> Iterator[str]:
    section, key = config.reward_model.composite, "reward_model.composite.weights"
    found = configured(config)
    if not section.weights:
        yield f"reward_model.composite.enable=True: {key} is empty; set +{key}.rule_score=0.3 and so on"
    if config.reward_model.normalize:
        yield "reward_model.normalize=True: with a mix, use reward_model.composite.normalize"
    used = set()
    for name in section.weights:
        if name not in PARTS:
            yield f"{key}.{name}: there is no such part; use {', '.join(PARTS)}"
        elif not any(found[source] for source in PARTS[name]):
            ways = " or ".join(HOW_TO_SET[source] for source in PARTS[name])
            yield f"{key}.{name}={shown(section.weights[name])}: nothing computes it; set {ways}, or remove it"
        else:
            source = next(source for source in PARTS[name] if found[source])
            if source in used:
                yield f"{key}.{name}: another part is computed by the same {HOW_TO_SET[source]}; keep one"
            used.add(source)
    for source, is_set in found.items():
        if is_set and source not in used and source != "rules":
            yield f"{HOW_TO_SET[source]} is set, but no weight uses it; add it to {key}, or remove the key"
    weights = [given.weight if isinstance(given, PartWeight) else given for given in section.weights.values()]
    if weights and not any(weights):
        yield f"{key}: all weights are 0; give one part a weight"


def shown(given: float | PartWeight) -> str:
    return f"{given.weight if isinstance(given, PartWeight) else given:g}"
