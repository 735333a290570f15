"""The HTTP header Retry-After, by which a server says how long to wait before the next request."""

import email.utils
import re
from collections.abc import Mapping
from datetime import UTC, datetime

# of ASCII digits: str.isdigit also holds for characters such as "²", which float() refuses
NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")


def retry_after_s(headers: Mapping[str, str] | None, now: datetime | None = None) -> float | None:
    """Seconds, from a number of them or a date. None: no header, or one that is neither."""
    value = ((headers or {}).get("retry-after") or (headers or {}).get("Retry-After") or "").strip()
    if NUMBER.fullmatch(value):
        return max(0.0, float(value))
    try:
        moment = email.utils.parsedate_to_datetime(value)
    except (ValueError, TypeError, IndexError, OverflowError):  # OverflowError: a year of 20 digits
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - (now or datetime.now(UTC))).total_seconds())
