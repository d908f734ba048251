"""What the attention operators refuse of their options without asking a peer."""

from __future__ import annotations

from xstage.errors import XStageError

FALLBACKS = ("serial", "error")


def check_options(fallback: str, timeout_s: float, **at_least_one: int) -> None:
    """Refuse options by value.

    Args:
        at_least_one: numbers by their names.

    Raises:
        XStageError: an unknown fallback, a number below 1, or a time (s) that is not positive.
    """
    if fallback not in FALLBACKS:
        raise XStageError(f"fallback: {fallback!r} is not one of {', '.join(FALLBACKS)}")
    for name, number in at_least_one.items():
        if number < 1:
            raise XStageError(f"{name}: {number} is less than 1")
    if not timeout_s > 0:
        raise XStageError(f"timeout_s: {timeout_s} is not positive")
