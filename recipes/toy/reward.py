"""The toy task's reward, in the signature that verl calls."""

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any) -> dict:
    """Return the share of digits in the answer, and whether it begins with the sum's first digit."""
    digits = sum(character in "0123456789" for character in solution_str)
    return {"score": digits / max(1, len(solution_str)), "acc": float(solution_str[:1] == ground_truth[:1])}
