"""The language of help texts: Chinese in a Chinese locale, else English."""

from collections.abc import Mapping


def is_chinese(environment: Mapping[str, str]) -> bool:
    chosen = next((environment[name] for name in ("LC_ALL", "LC_MESSAGES", "LANG") if environment.get(name)), "")
    return chosen.startswith("zh")
