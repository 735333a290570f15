"""The language of help texts, by the locale, and of a text, by its characters: Chinese or English."""

import re
from collections.abc import Mapping

CHINESE = re.compile("[\u4e00-\u9fff]")
KANA = re.compile("[\u3040-\u30ff]")  # Japanese has Chinese characters, too


def is_chinese(environment: Mapping[str, str]) -> bool:
    chosen = next((environment[name] for name in ("LC_ALL", "LC_MESSAGES", "LANG") if environment.get(name)), "")
    return chosen.startswith("zh")


def is_chinese_text(text: str) -> bool:
    return CHINESE.search(text) is not None and KANA.search(text) is None
