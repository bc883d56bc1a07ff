"""Whose fault a deviation is: read from passes that differ in one thing each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trinity_loss.verl.gradients import noise, off

#: What a verdict may say, in the order of the number in ``audit/fault``.
VERDICTS = ("faultless", "loss", "model", "engine")
_FINER = 10  # How much smaller a deviation of log-probs is that tells of a cause where the gradient is off.
_NOTHING = 1e-3  # A metric below it is compared with it.
_HALVES = 0.999  # Share of a gradient's numbers that a bfloat16 holds, where it was rounded to one.


def judge(found: dict[str, Any]) -> tuple[str, str]:
    """One of :data:`VERDICTS`, and the sentence.

    Args:
        found: What the audit measured, with ``replay``, whether the loss by itself depends on the cut, and ``random``,
            what draws random numbers.
    """
    tolerance, first, cuts = found["tolerance"], found["runs"][0], cuts_of(found)

    def beyond(name: str, tolerance: float = tolerance) -> list[dict[str, Any]]:
        limit = max(tolerance, 3 * noise(cuts, name))
        return sorted((run for run in cuts if off(run, name) > limit), key=lambda run: -off(run, name))

    if unread := _not_finite(first):
        return unread
    if not found["replay"]["ok"]:
        return "loss", f"the loss: {found['replay']['sentence']}"
    if noise(cuts, "log_probs") > tolerance:
        return "model", _of_randomness(found)
    # A gradient is more sensitive than the log-probs that it comes from.
    strange = beyond("log_probs", tolerance / _FINER) if beyond("all") else beyond("log_probs")
    if strange:
        return "model", _of_model(found, strange[0])
    if alone := beyond("loss gradient"):
        deviation = percent(off(alone[0], "loss gradient"))
        return "loss", (
            f"the loss: at {alone[0]['name']} its gradient by the log-probs is {deviation} off, though the model gave "
            "the same log-probs"
        )
    halves = max(run["gradient"]["all"]["halves"] for run in (first, *cuts)) if found["dtype"] == "float32" else 0.0
    if odd := beyond("all"):
        return "engine", _of_engine(found, odd, halves)
    if halves > _HALVES:
        return "engine", _reduced_in_halves(halves)
    if all(run["name"] == "repeat" for run in cuts):
        return "faultless", (
            "the mini-batch was computed in no other cut, so that nothing is known of model and engine; the loss tried "
            f"by itself: {found['replay']['sentence']}"
        )
    if not first["gradient"]["all"]["norm"]:
        return "faultless", (
            "the parameters' gradient is 0 in every pass (no token in the mask, or no advantage): it tells nothing of "
            f"loss and engine; the loss tried by itself: {found['replay']['sentence']}"
        )
    largest = max((off(run) for run in cuts), default=0.0)
    again = noise(cuts)
    level = "as far as the repeated pass, which is noise" if again and largest <= 3 * again else "which is rounding"
    return "faultless", (
        f"loss, model and engine give the same gradient in all {len(cuts)} passes; the largest deviation is "
        f"{percent(largest)}, {level} ({found['dtype']})"
    )


def cuts_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The passes that are compared with the mini-batch as configured, the repeated one among them; no experiments."""
    return [run for run in found["runs"][1:] if not run["against"] and not run["name"].startswith(("no ", "same "))]


def _not_finite(first: dict[str, Any]) -> tuple[str, str] | None:
    """What is to be said where there are no numbers to compare."""
    of_tokens = {name: distance["norm"] for name, distance in first["tokens"].items()}
    if not math.isfinite(of_tokens.get("log_probs", 0.0)):
        return "model", "the model: its log-probs are not finite, in the mini-batch as configured"
    if not math.isfinite(of_tokens.get("loss gradient", 0.0)):
        return "loss", "the loss: its gradient by the log-probs, which are finite, is not"
    if not math.isfinite(first["gradient"]["all"]["norm"]):
        return "engine", (
            "the engine: log-probs and the loss's gradient are finite, and the parameters' gradient is not, in the "
            "mini-batch as configured (in float16 the loss may be scaled too much: verl leaves out such a step)"
        )
    return None


def _of_randomness(found: dict[str, Any]) -> str:
    again = next((run for run in found["runs"] if run["name"] == "same random numbers"), None)
    change = percent(noise(found["runs"], "log_probs"))
    if again is not None and off(again, "log_probs") <= found["tolerance"]:
        source = f" ({', '.join(found['random'])})" if found["random"] else ""
        return (
            f"the model: its log-probs change by {change} when the same mini-batch is computed again, and not when the "
            f"random numbers are the same: dropout or another random layer is on{source}"
        )
    return f"the model: its log-probs change by {change} when the same mini-batch is computed again, whatever is random"


def _of_model(found: dict[str, Any], run: dict[str, Any]) -> str:
    text = f"the model: its log-probs are {percent(off(run, 'log_probs'))} off at {run['name']}"
    unbounded = next((r for r in found["runs"] if r["against"] == "no expert capacity"), None)
    if unbounded is not None and off(unbounded, "log_probs") < off(run, "log_probs") / _FINER:
        return (
            f"{text}; without the capacity of experts they are not: which tokens of a sequence are dropped depends on "
            "the others in its micro-batch"
        )
    both = [r for r in found["runs"][1:] if {"first in a row", "behind others"} <= set(r["tokens"])]
    if any(off(r, "first in a row") <= found["tolerance"] < off(r, "behind others") for r in both):
        return (
            f"{text}; sequences that stand first in a micro-batch keep theirs and those behind them do not: attention "
            "leaks between packed sequences"
        )
    causes = ["the others (packing, capacity of experts)", "rounding"]
    if found["random"] and not any(r["name"] == "repeat" for r in found["runs"]):
        causes.append(f"random numbers ({', '.join(found['random'])}), which the pass repeat would tell")
    return f"{text}: what it computes of a sequence depends on {' or on '.join(causes)}"


def _of_engine(found: dict[str, Any], odd: Sequence[dict[str, Any]], halves: float) -> str:
    first, run = found["runs"][0], odd[0]
    deviation = run["gradient"]["all"]
    text = (
        f"the engine: log-probs and loss agree, and the parameters' gradient is {percent(off(run))} off "
        f"at {run['name']}"
    )
    counts = [(r["gradient"]["all"], r["micro_batches"] / first["micro_batches"]) for r in found["runs"][1:]]
    scaled = [(d, n) for d, n in counts if n != 1 and d["cosine"] > 0.99]
    for power, what in ((-1, "divides by"), (1, "multiplies by")):
        if scaled and all(abs(d["ratio"] / n**power - 1) < 0.02 for d, n in scaled):
            return (
                f"{text}; it is {deviation['ratio']:.3g} times as long: the engine {what} the number of micro-batches"
            )
    router = next((r for r in found["runs"] if r["against"] == "no router loss"), None)
    if router is not None and off(router) < max(off(run) / _FINER, found["tolerance"]):
        return f"{text}; without the auxiliary loss of the router it is not: that loss is averaged per micro-batch"
    if halves > _HALVES:
        return f"{text}; {_reduced_in_halves(halves).removeprefix('the engine: ')}"
    group = max((n for n in run["gradient"] if n != "all"), key=lambda n: run["gradient"][n]["error"])
    return f"{text}, most in the {group} ({percent(run['gradient'][group]['error'])})"


def _reduced_in_halves(share: float) -> str:
    return (
        f"the engine: the gradient's numbers ({share:.1%}) have the few digits of bf16: it is reduced or summed in bf16"
    )


def apart(value: float, reference: float) -> float:
    """Relative difference of two numbers."""
    return abs(value - reference) / max(abs(value), abs(reference)) if value != reference else 0.0


def worst_metric(run: dict[str, Any], first: dict[str, Any]) -> tuple[float, str]:
    """How far the metric is off that is furthest off, and which it is."""
    pairs = {
        name: (value, first["metrics"][name])
        for name, value in run["metrics"].items()
        if name in first["metrics"] and "micro_batches" not in name
    }
    # What is next to nothing, as the KL divergence from a policy to itself, is rounding.
    apart = ((abs(a - b) / max(abs(a), abs(b), _NOTHING), name) for name, (a, b) in pairs.items())
    return max(apart, default=(0.0, ""))


def percent(error: float) -> str:
    """A relative deviation, readable."""
    if not math.isfinite(error):
        return "not finite"
    return f"{error:.2%}" if error >= 1e-3 else f"{error:.0e}" if error else "0"
