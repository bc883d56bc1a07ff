"""A loss or a mode that is no such thing is refused when the configuration is made, in words."""

import math
import sys
import time
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from batches import cut, make_sequences, run, sequence
from forms import LAYOUTS
from ours import in_mode, run_ours

from trinity_loss import EnginePolicyLoss, LossConfig
from trinity_loss.aggregation import AggregationMode, TokenMean
from trinity_loss.errors import ConfigError
from trinity_loss.policy import sapo
from trinity_loss.registry import OverMiniBatch, PolicyInputs, TokenLoss, register_policy_loss

SAMPLES = make_sequences(7, seed=3)


def here(name):
    return f"{__name__}:{name}"


# Losses of users, each with one thing that it should not do.


def verls_signature(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None):
    return log_prob.mean(), {}


def values_and_dict(inputs):
    return -inputs.advantages * inputs.log_prob, {"actor/mine": 1.0}


def nothing(inputs):
    pass


def scalar(inputs):
    return (-inputs.advantages * inputs.log_prob).mean()


def per_sequence(inputs):
    return inputs.tokens.sum_per_sequence(inputs.log_prob)


def complex_values(inputs):
    return torch.complex(inputs.log_prob, inputs.log_prob)


def log_of_the_mask(inputs):
    return inputs.log_prob / inputs.tokens.mask


def over_its_counts(inputs):
    return inputs.log_prob * inputs.tokens.per_token(1 / inputs.tokens.counts)


def leaves(inputs):
    sys.exit("no such checkpoint")


def leaves_for_its_metrics(inputs):
    return TokenLoss(inputs.log_prob, add_metrics=leaves)


@register_policy_loss("leaves-early", over_mini_batch={"chosen": OverMiniBatch(lambda *_: sys.exit(0))})
def leaves_early(inputs):
    return inputs.log_prob


def unknown_field(inputs):
    return inputs.fields["returns"] * inputs.log_prob


def positional_argument(inputs, beta):
    return inputs.log_prob * beta


def keywords_only(*, inputs):
    return inputs.log_prob


def metric_per_sequence(inputs):
    return TokenLoss(inputs.log_prob, means={"actor/mine": inputs.tokens.counts})


def metric_of_words(inputs):
    return TokenLoss(inputs.log_prob, means={"actor/mine": "much"})


def named_min(inputs):
    return TokenLoss(inputs.log_prob, means={"actor/num_mini": inputs.log_prob})


def named_mean(inputs):
    return TokenLoss(inputs.log_prob, maxima={"actor/largest": inputs.log_prob})


def takes_our_name(inputs):
    return TokenLoss(inputs.log_prob, means={"actor/pg_loss": inputs.log_prob})


def takes_our_name_without_prefix(inputs):
    return TokenLoss(inputs.log_prob, means={"kl_coef": inputs.log_prob})


def takes_verls_name(inputs):
    return TokenLoss(inputs.log_prob, means={"grad_norm": inputs.log_prob})


def one_name_twice(inputs):
    return TokenLoss(inputs.log_prob, maxima={"max": inputs.log_prob, "actor/max": inputs.log_prob})


def correction(inputs):
    return TokenLoss(inputs.log_prob, means={"rollout_corr/kl": inputs.log_prob})


def added_name(inputs):
    def add(metrics):
        metrics.add_extreme("actor/top", "max", inputs.log_prob.amax())

    return TokenLoss(inputs.log_prob, add_metrics=add)


def rejecting(inputs):
    return TokenLoss(inputs.log_prob, kept=torch.ones_like(inputs.log_prob))


def clamps_its_input(inputs):
    return -inputs.advantages * (inputs.log_prob - inputs.old_log_prob.clamp_(min=-1))


def clamps_counts(inputs):
    return inputs.log_prob * inputs.tokens.per_token(1 / inputs.tokens.counts.clamp_(min=1))


def writes_through_data(inputs):
    inputs.advantages.data.mul_(2)
    return inputs.log_prob


def writes_into_log_prob(inputs):
    return inputs.log_prob.clamp_(min=-1)


class NoFunction:
    pass


number = 3
analytic_without = register_policy_loss("trial-analytic", analytic=True)(lambda inputs: inputs.log_prob)
unsized = register_policy_loss("trial-unsized", analytic=True)(
    lambda inputs: TokenLoss(inputs.log_prob, torch.ones(()))
)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("verls_signature", r"verl's own policy losses, \(old_log_prob, log_prob"),
        ("values_and_dict", r"a tuple of a tensor of shape \[5\], a dict; expected one value per response token"),
        ("nothing", "a NoneType; expected one value"),
        ("scalar", r"values of the policy loss has shape \[\]; expected \[5\]"),
        ("per_sequence", r"shape \[2\]; expected \[5\]"),
        ("complex_values", "expected a tensor of real numbers"),
        ("log_of_the_mask", "gives values .*nan.*expected finite numbers"),
        ("over_its_counts", r"for counts \[2, 0\].*in a fully masked sequence too"),
        ("unknown_field", "failed on two short sequences that it was tried on: KeyError: 'returns'"),
        ("leaves", "ended the process on two short sequences that it was tried on: SystemExit: no such checkpoint"),
        ("leaves_for_its_metrics", "ended the process"),
        ("leaves_early", "ended the process .*SystemExit: 0"),
        ("positional_argument", r"takes \(inputs, beta\); expected a function of one PolicyInputs"),
        ("keywords_only", r"takes \(inputs\); expected a function of one PolicyInputs"),
        ("NoFunction", "is the class NoFunction; expected a function"),
        ("number", "is a int; expected a function"),
        ("metric_per_sequence", r"metric 'actor/mine'.*shape \[2\]; expected \[5\]"),
        ("metric_of_words", "metric 'actor/mine' of the policy loss is a str"),
        ("named_min", "'actor/num_mini' is a ratio, but verl reduces a key of this name as a min"),
        ("named_mean", "'actor/largest' is a max, but verl reduces a key of this name as a ratio"),
        ("takes_our_name", "metric 'actor/pg_loss', which another metric overwrites"),
        ("takes_our_name_without_prefix", "metric 'kl_coef', which another"),
        ("takes_verls_name", "metric 'grad_norm', which another"),
        ("one_name_twice", "metric 'actor/max', which another"),
        ("added_name", "'actor/top' is a max"),
        ("clamps_its_input", r"writes into inputs.fields\['old_log_probs'\]|writes into its inputs"),
        ("clamps_counts", "writes into inputs.tokens.counts"),
        ("writes_through_data", r"writes into inputs.fields\['advantages'\]"),
        ("writes_into_log_prob", "in-place operation"),
        ("analytic_without", "derivative of the policy loss is a NoneType"),
        ("unsized", r"derivative of the policy loss has shape \[\]"),
    ],
)
def test_a_loss_that_is_none(name, says):
    with pytest.raises(ConfigError, match=f"(?s)loss_mode.*{says}"):
        LossConfig(loss_mode=here(name))


def test_rejection_that_nobody_declared():
    with pytest.raises(ConfigError, match="count_rejected_tokens is False"):
        LossConfig(loss_mode=here("rejecting"), count_rejected_tokens=False)


def test_two_sources_of_one_metric():
    LossConfig(loss_mode=here("correction"))
    with pytest.raises(ConfigError, match="'rollout_corr/kl', which another"):
        LossConfig(loss_mode=here("correction"), rollout_metrics="token")


# Losses that are unusual and right.


def counted(inputs):
    """Booleans, whole numbers and plain numbers as metrics, a loss in float16."""
    high = inputs.log_prob.detach() > inputs.old_log_prob
    return TokenLoss(
        (-inputs.advantages * inputs.log_prob).to(torch.float64),
        means={"actor/high": high, "actor/flag": True, "actor/seven": 7},
        maxima={"actor/longest_max": inputs.tokens.per_token(inputs.tokens.counts), "actor/top_max": 2},
    )


reinforce = lambda inputs, *, baseline=0.0: -(inputs.advantages - baseline) * inputs.log_prob  # noqa: E731
with_baseline = partial(reinforce, baseline=0.5)
smooth = partial(sapo, tau_neg=2.0)


class Scaled:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, inputs: PolicyInputs):
        return -inputs.advantages * inputs.log_prob * self.scale

    @staticmethod
    def plain(inputs):
        return -inputs.advantages * inputs.log_prob


twice = Scaled(2.0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_of_every_kind_are_metrics(layout):
    high = [x > o for s in SAMPLES for x, o in zip(s.valid(s.log_probs), s.valid(s.old_log_probs), strict=True)]
    settings = in_mode("token-mean", loss_mode=here("counted"))
    for micro, ranks in ((1, 1), (3, 1), (2, 2)):
        metrics = run_ours(settings, cut(SAMPLES, micro, ranks, "uneven"), layout).metrics
        assert metrics["actor/high"] == pytest.approx(sum(high) / len(high))
        assert metrics["actor/flag"] == pytest.approx(1.0)
        assert metrics["actor/seven"] == pytest.approx(7.0)
        assert metrics["actor/longest_max"] == max(s.tokens for s in SAMPLES)
        assert metrics["actor/top_max"] == 2.0


@pytest.mark.parametrize(
    ("name", "factor", "shift"),
    [("reinforce", 1, 0), ("with_baseline", 1, 0.5), ("twice", 2, 0), ("Scaled.plain", 1, 0)],
)
def test_whatever_can_be_called(name, factor, shift):
    """A lambda, a partial, an object, a static method."""
    got = run_ours(
        in_mode("token-mean", loss_mode=here(name)), cut(SAMPLES, 3), "nested", leave_out=("rollout_is_weights",)
    )
    valid = [(x, a) for s in SAMPLES for x, a in zip(s.valid(s.log_probs), s.valid(s.advantages), strict=True)]
    assert got.loss == pytest.approx(sum(-factor * (a - shift) * x for x, a in valid) / len(valid), rel=1e-10)


def test_a_partial_of_a_registered_loss_stays_registered():
    config = LossConfig(loss_mode=here("smooth"))
    assert config.policy_loss.analytic
    assert config.policy_loss.arguments == {"tau_pos": 1.0, "tau_neg": 2.0}
    with pytest.raises(ConfigError, match=r"tau_neg.*above 0"):
        LossConfig(loss_mode=here("smooth"), loss_args={"tau_neg": 0})


def optioned(inputs, *, use_it: bool = False, level: float = 1.0, word: str = "a", threshold=None):
    return inputs.log_prob * level


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"use_it": "no"}, "true or false"),
        ({"use_it": 1}, "true or false"),
        ({"level": "1.0"}, "a finite number"),
        ({"level": True}, "a finite number"),
        ({"word": 3}, "a name"),
        ({"threshold": math.inf}, "a finite number"),
    ],
)
def test_arguments_are_of_the_kind_of_their_defaults(given, expected):
    with pytest.raises(ConfigError, match=rf"loss_args\['{next(iter(given))}'\] is .*; expected {expected}"):
        LossConfig(loss_mode=here("optioned"), loss_args=given)
    LossConfig(loss_mode=here("optioned"), loss_args={"use_it": True, "level": 2, "word": "b", "threshold": [1, 2]})


calls = []


def writes_now_and_then(inputs):
    calls.append(inputs)
    old = inputs.old_log_prob
    return -inputs.advantages * (inputs.log_prob - (old.clamp_(min=-1) if old.min() < -9 else old))


def test_a_loss_that_writes_later_is_stopped_then():
    """What the trial could not see: the KL against the old log-probs would be wrong, so nothing is computed."""
    loss = EnginePolicyLoss(LossConfig(loss_mode=here("writes_now_and_then")))
    assert math.isfinite(run(loss, cut(SAMPLES), "nested", with_entropy=False).loss)
    far = (sequence(2, log_probs=-10.0, old_log_probs=-10.0, advantages=1.0),)
    with pytest.raises(ConfigError, match="writes into its inputs"):
        run(loss, cut(far), "nested", with_entropy=False)


def random(inputs):
    return inputs.log_prob * torch.rand_like(inputs.log_prob)


def test_the_trial_changes_no_random_numbers():
    torch.manual_seed(0)
    expected = torch.rand(3).tolist()
    torch.manual_seed(0)
    LossConfig(loss_mode=here("random"))
    assert torch.rand(3).tolist() == expected


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_configuration_may_be_made_without_gradients(mode):
    with mode():
        LossConfig(loss_mode="gmpo", loss_agg_mode=here("Squared"))


# Modes.


@dataclass(frozen=True)
class Squared(TokenMean):
    def numerator(self, losses, tokens):
        return (losses.square() * tokens.mask).sum()


class Uncounted(TokenMean):
    total = "batch_num_wishes"


class CountsEach(TokenMean):
    def local_count(self, tokens):
        return tokens.counts


class PlainCount(TokenMean):
    def local_count(self, tokens):
        return 3


class WeighsSequences(TokenMean):
    def token_weights(self, tokens, dtype):
        return tokens.counts.to(dtype)


class DividesByNothing(TokenMean):
    def sequence_weights(self, tokens, dtype):
        return 1 / tokens.counts.to(dtype)


class Unfinished(AggregationMode):
    pass


class Leaves(TokenMean):
    def local_count(self, tokens):
        sys.exit(1)


def leaves_for_a_mode(**arguments):
    sys.exit(1)


def no_mode(**arguments):
    return 3


def takes_nothing():
    return TokenMean()


@pytest.mark.parametrize("field", ["loss_agg_mode", "entropy_agg_mode", "kl_agg_mode"])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Uncounted", "'batch_num_wishes'; expected one of batch_num_tokens, global_batch_size"),
        ("CountsEach", r"local_count is shape \[2\]; expected a tensor of shape \[\]"),
        ("PlainCount", "local_count is a int; expected a tensor"),
        ("WeighsSequences", r"RuntimeError|shape \[2\]; expected a tensor of shape \[5\]"),
        ("DividesByNothing", "numerator is nan; expected finite numbers"),
        ("Unfinished", "NotImplementedError"),
        ("Leaves", "ended the process .*SystemExit: 1"),
        ("leaves_for_a_mode", "makes no mode: SystemExit: 1"),
        ("no_mode", "makes a int; expected an AggregationMode"),
        ("takes_nothing", "makes no mode: .*unexpected keyword argument"),
        ("number", "makes no mode: .*not callable"),
    ],
)
def test_a_mode_that_is_none(field, name, says):
    with pytest.raises(ConfigError, match=rf"(?s)loss_agg_mode is '{here(name)}'.*{says}|{field} is .*{says}"):
        LossConfig(**{field: here(name)})


def test_what_the_trial_costs():
    """A configuration is made a few times a run; a few milliseconds are nothing, seconds would be."""
    start = time.thread_time()
    for _ in range(10):
        LossConfig()
    assert time.thread_time() - start < 1
