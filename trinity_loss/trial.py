"""A policy loss and its aggregation modes, tried on sequences made here when a configuration is made.

What a loss returns is known when it is called, and its first call should not be the first step of a training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trinity_loss.aggregation import AggregationMode
from trinity_loss.errors import ConfigError
from trinity_loss.metric_set import MetricSet, check_metric_name
from trinity_loss.registry import PolicyInputs, PolicyLoss, TokenLoss
from trinity_loss.selection import Ranks
from trinity_loss.tokens import ResponseTokens
from trinity_loss.totals import GroupCount, count_names, find_count

#: What else is logged under ``actor/``, by this package and by verl.
_TAKEN = {
    *("pg_loss", "entropy_loss", "kl_loss", "kl_coef", "off_policy_frac", "nonfinite_frac", "micro_batches"),
    *("loss", "grad_norm", "lr", "mfu", "entropy", "reward_kl_penalty", "reward_kl_penalty_coeff"),
}
_TAKEN_PREFIXES = ("trinity_loss/", "shadow/", "perf/")


def try_policy_loss(loss_mode: str, loss: PolicyLoss, arguments: Mapping[str, Any]) -> Iterator[TokenLoss]:
    """Calls a loss on two sequences (two groups of them, for a loss of groups), then with one of them fully masked.

    Yields:
        What it returned.

    Raises:
        ConfigError: It fails, writes into its inputs, returns something else than :class:`TokenLoss` describes, or
            numbers that are not finite.
    """
    for tokens in _sequences(1 if loss.mode is None else loss.mode.group_size):
        with _trying("loss_mode", loss_mode):
            inputs = _inputs(tokens, loss, arguments)
        written = _watch(_tensors(inputs))
        with _trying("loss_mode", loss_mode), torch.set_grad_enabled(not loss.analytic):
            result = loss(inputs, **arguments)
        if place := written():
            raise ConfigError(f"loss_mode {loss_mode!r} writes into {place}, which others read too: let it copy")
        if not loss.analytic and bool(tokens.counts.all()) and not result.values.requires_grad:
            raise ConfigError(
                f"loss_mode {loss_mode!r} gives values without a graph, so that it would train nothing; expected "
                "values that depend on inputs.log_prob (not detached, not whole numbers)"
            )
        for name, values in (("values", result.values), ("derivative", result.derivative)):
            if values is not None and not bool(torch.isfinite(values).all()):
                raise ConfigError(
                    f"loss_mode {loss_mode!r} gives {name} {values.tolist()} for counts {tokens.counts.tolist()} of "
                    "tokens; expected finite numbers, at uncounted tokens and in a fully masked sequence too"
                )
        yield result


@contextmanager
def _trying(field: str, name: str) -> Iterator[None]:
    """Makes whatever somebody's code raises, or ends the process with, a :class:`ConfigError` that names the field."""
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    except ConfigError as error:
        raise ConfigError(f"{field} is {name!r}: {error}") from error
    except (Exception, SystemExit) as error:
        did = "ended the process" if isinstance(error, SystemExit) else "failed"
        raise ConfigError(
            f"{field} is {name!r}, which {did} on two short sequences that it was tried on: "
            f"{type(error).__name__}: {error}"
        ) from error


def check_metrics(loss_mode: str, result: TokenLoss, taken_prefix: str | None) -> None:
    """Raises :class:`ConfigError` where a metric's name says another kind, stands twice or is another metric's.

    No name may begin with ``taken_prefix``, nor be what is logged anyway.
    """
    added = MetricSet()
    names = [*result.means, *result.maxima, *result.minima]
    with _trying("loss_mode", loss_mode):
        for kind, metrics in (("ratio", result.means), ("max", result.maxima), ("min", result.minima)):
            for name in metrics:
                check_metric_name(name, kind)  # type: ignore[arg-type]
        if result.add_metrics is not None:
            result.add_metrics(added)
    names += [*added.entries, *added.statistics, *added.constants]
    prefixes = _TAKEN_PREFIXES if taken_prefix is None else (*_TAKEN_PREFIXES, taken_prefix)
    seen = set(_TAKEN)
    for name in names:
        # verl puts actor/ before a key that does not begin with it.
        key = name.removeprefix("actor/")
        if key in seen or key.startswith(prefixes):
            raise ConfigError(f"loss_mode {loss_mode!r} has a metric {name!r}, which another metric overwrites")
        seen.add(key)


def try_mode(field: str, name: str, mode: AggregationMode, values: Tensor, tokens: ResponseTokens) -> None:
    """Aggregates token losses once.

    Args:
        field: Which field of the configuration, for errors.
        name: What it is.
        mode: The mode of that name.
        values: Token losses [N], or one value per group.
        tokens: Their tokens.

    Raises:
        ConfigError: It fails, its total is unknown, or its count or weights are no such thing.
    """
    written = _watch(_tensors_of_tokens(tokens, values.dtype))
    with _trying(field, name):
        if mode.total is not None:
            find_count(mode.total)
        count, numerator = mode.local_count(tokens), mode.numerator(values, tokens)
        weights = mode.token_weights(tokens, values.dtype) if mode.is_linear else mode.linearize(values, tokens)[1]
    if place := written():
        raise ConfigError(f"{field} is {name!r}, which writes into {place}, which others read too: let it copy")
    results = {"local_count": (count, ()), "numerator": (numerator, ()), "token weights": (weights, values.shape)}
    for what, (given, shape) in results.items():
        if not isinstance(given, Tensor) or given.shape != shape:
            got = f"shape {list(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
            raise ConfigError(f"{field} is {name!r}, whose {what} is {got}; expected a tensor of shape {list(shape)}")
        if not bool(torch.isfinite(given).all()) or (what == "local_count" and bool(given < 0)):
            raise ConfigError(f"{field} is {name!r}, whose {what} is {given.tolist()}; expected finite numbers")


def trial_tokens() -> tuple[ResponseTokens, ...]:
    """What modes are tried on: two sequences, each its own prompt group; then one of them fully masked."""
    counts = [name for name in count_names() if isinstance(find_count(name), GroupCount)]
    return tuple(
        replace(tokens, groups=dict.fromkeys(counts, tokens.group_by(torch.arange(tokens.num_slots))))
        for tokens in _sequences(1)
    )


def _sequences(group_size: int) -> Iterator[ResponseTokens]:
    lengths = torch.tensor([3, 2] * group_size)
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    mask = torch.ones(int(offsets[-1]), dtype=torch.bool)
    mask[1] = False
    yield ResponseTokens.from_jagged(mask, offsets)
    mask = mask.clone()
    mask[int(offsets[group_size]) :] = False
    yield ResponseTokens.from_jagged(mask, offsets)


def _inputs(tokens: ResponseTokens, loss: PolicyLoss, arguments: Mapping[str, Any]) -> PolicyInputs:
    weights = tokens.indicator(torch.float32)
    steps = torch.arange(tokens.size) % 3
    own = {
        "old_log_probs": -1 - 0.1 * steps,
        "ref_log_prob": -1.2 - 0.1 * steps,
        "rollout_log_probs": -1.1 - 0.1 * steps,
        "advantages": 1.0 - steps,
    }
    fields = {name: own.get(name, 1.0) * weights for name in loss.fields}
    log_prob = (-0.9 - 0.2 * steps) * weights
    if not loss.analytic:
        log_prob.requires_grad_()
    inputs = PolicyInputs(tokens, log_prob, fields, weights.clone() if bool(tokens.counts.all()) else None)
    complete, numbers = {**loss.arguments, **arguments}, torch.arange(tokens.size)
    for name, made in loss.needed_over_mini_batch(arguments).items():
        fields[name] = made.make(inputs, numbers, Ranks(), complete)
    return inputs


def _tensors(inputs: PolicyInputs) -> dict[str, Tensor]:
    known = {f"fields[{name!r}]": values for name, values in inputs.fields.items()} | {"log_prob": inputs.log_prob}
    known |= _tensors_of_tokens(inputs.tokens, inputs.log_prob.dtype)
    if inputs.rollout_is_weights is not None:
        known["rollout_is_weights"] = inputs.rollout_is_weights
    return {f"inputs.{name}": tensor for name, tensor in known.items()}


def _tensors_of_tokens(tokens: ResponseTokens, dtype: torch.dtype) -> dict[str, Tensor]:
    assert tokens.offsets is not None
    known = {"mask": tokens.mask, "counts": tokens.counts, "offsets": tokens.offsets, "lengths": tokens.lengths}
    known |= {"sequence": tokens.sequence, "indicator": tokens.indicator(dtype)}
    known |= {f"groups[{name!r}].num_tokens": groups.num_tokens for name, groups in tokens.groups.items()}
    return {f"tokens.{name}": tensor for name, tensor in known.items()}


def _watch(known: Mapping[str, Tensor]) -> Callable[[], str | None]:
    """Tells from now on which tensor was written into, be it with the same numbers: on others they may differ."""
    before = {name: (tensor._version, tensor.detach().clone()) for name, tensor in known.items()}

    def written() -> str | None:
        now = ((name, tensor, *before[name]) for name, tensor in known.items())
        return next((n for n, t, version, old in now if t._version != version or not torch.equal(t, old)), None)

    return written
