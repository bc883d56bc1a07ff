"""Losses as users write them for verl: right ones, and wrong ones with what is wrong with them.

Each takes verl's engine contract. ``WRONG`` maps a name to a loss and the causes that name it truly, ``RIGHT`` a
name to a loss. Most are the clipped policy gradient, put together by a function that makes a number of its tokens.
"""

import os
import random
import time
from time import perf_counter as clock
from types import SimpleNamespace

import numpy as np
import torch
from tensordict import NonTensorData
from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.padding import no_padding_2_padding

WRONG, RIGHT = {}, {}


def wrong(*causes, **options):
    def register(loss):
        WRONG[options.get("name", loss.__name__)] = (loss, causes, options)
        return loss

    return register


def right(loss):
    RIGHT[loss.__name__] = loss
    return loss


def read(model_output, data):
    """Everything padded, 0 where the mask is."""
    log_prob = no_padding_2_padding(model_output["log_probs"], data)
    entropy = no_padding_2_padding(model_output["entropy"], data)
    names = ("response_mask", "old_log_probs", "advantages", "ref_log_prob")
    fields = data.select(*names).to_padded_tensor()
    mask = fields["response_mask"].to(log_prob.dtype)

    def real(values):
        return torch.where(mask > 0, values, 0.0)

    log_prob = real(log_prob)
    old, adv, ref = (real(fields[name]) for name in names[1:])
    ratio = (log_prob - old).exp()
    pg = torch.maximum(-adv * ratio, -adv * ratio.clamp(0.8, 1.2))
    kl = (ref - log_prob).exp() - 1 - (ref - log_prob)
    return SimpleNamespace(
        mask=mask, pg=pg, entropy=real(entropy), kl=kl, adv=adv, old=old, log_prob=log_prob, ratio=ratio
    )


def share(values, mask, data):
    """The right mean over tokens."""
    return (values * mask).sum() * data["dp_size"] / data["batch_num_tokens"]


def sequences(values, mask, data):
    """The right mean over sequences."""
    means = (values * mask).sum(1) / mask.sum(1).clamp(min=1)
    return means.sum() * data["dp_size"] / data["global_batch_size"]


def of_mean(mean, term="all", small=1.0):
    """A loss with the function in one term, or in all."""

    def loss(*, model_output, data, dp_group=None):
        b = read(model_output, data)
        values = {"pg": b.pg, "entropy": -0.01 * b.entropy, "kl": 0.05 * b.kl}
        total = 0.0
        for name, tokens in values.items():
            if term not in ("all", name):
                total = total + share(tokens, b.mask, data)
            elif small == 1:
                total = total + mean(tokens, b.mask, data)
            else:
                total = total + (1 - small) * share(tokens, b.mask, data) + small * mean(tokens, b.mask, data)
        return total, {}

    return loss


def of_tokens(make, mean=share):
    """A loss whose token losses come from the function."""

    def loss(*, model_output, data, dp_group=None):
        b = read(model_output, data)
        return mean(make(b, data), b.mask, data), {}

    return loss


def wrong_mean(*causes, **options):
    def register(mean):
        name = mean.__name__
        WRONG[name] = (of_mean(mean), causes, options)
        return mean

    return register


def wrong_tokens(*causes, **options):
    def register(make):
        WRONG[make.__name__] = (of_tokens(make), causes, options)
        return make

    return register


def right_mean(mean):
    RIGHT[mean.__name__] = of_mean(mean)
    return mean


def right_tokens(make):
    RIGHT[make.__name__] = of_tokens(make)
    return make


# ----------------------------------------------------------------------------------------------------
# Wrong: denominators

LOCAL, SHARE = "local mean", "mean and share count different things"
ROWS, COUNT = "rows counted in one place and not in the other", "local count as a factor"


@wrong_mean(LOCAL)
def local_token_mean(values, mask, data):
    return (values * mask).sum() / mask.sum().clamp(min=1)


@wrong_mean(LOCAL)
def local_sequence_mean(values, mask, data):
    return ((values * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


@wrong_mean(LOCAL)
def local_mean_of_valid_sequences(values, mask, data):
    means = (values * mask).sum(1) / mask.sum(1).clamp(min=1)
    return means.sum() / (mask.sum(1) > 0).sum().clamp(min=1)


@wrong_mean(LOCAL, "padded width as the norm")
def mean_over_the_rectangle(values, mask, data):
    return (values * mask).mean()


@wrong_mean(LOCAL)
def local_mean_by_hand_accumulation(values, mask, data):
    """Divides by a number of micro-batches that the configuration once had."""
    return (values * mask).sum() / mask.sum().clamp(min=1) / 4


@wrong_mean(LOCAL)
def local_sum_per_row(values, mask, data):
    return (values * mask).sum(1).mean() * data["dp_size"]


@wrong_mean(SHARE)
def token_mean_by_share_of_rows(values, mask, data):
    return local_token_mean(values, mask, data) * len(mask) / data["global_batch_size"] * data["dp_size"]


@wrong_mean(SHARE)
def sequence_mean_by_share_of_tokens(values, mask, data):
    return local_sequence_mean(values, mask, data) * mask.sum() / data["batch_num_tokens"] * data["dp_size"]


@wrong_mean(ROWS)
def valid_mean_by_share_of_rows(values, mask, data):
    return local_mean_of_valid_sequences(values, mask, data) * len(mask) / data["global_batch_size"] * data["dp_size"]


@wrong_mean(ROWS)
def row_mean_by_share_of_valid(values, mask, data):
    valid = (mask.sum(1) > 0).sum()
    return local_sequence_mean(values, mask, data) * valid / data["global_batch_size"] * data["dp_size"]


@wrong_mean(COUNT)
def share_counted_twice(values, mask, data):
    return share(values, mask, data) * mask.sum() / data["batch_num_tokens"]


@wrong_mean(COUNT, LOCAL)
def root_of_the_count(values, mask, data):
    return (values * mask).sum() / mask.sum().clamp(min=1).sqrt() * data["dp_size"] / data["batch_num_tokens"] ** 0.5


@wrong_mean(LOCAL, COUNT)
def plus_one(values, mask, data):
    return (values * mask).sum() / (mask.sum() + 1)


@wrong_mean("missing dp_size")
def without_dp_size(values, mask, data):
    return (values * mask).sum() / data["batch_num_tokens"]


@wrong_mean("missing dp_size")
def dp_size_twice(values, mask, data):
    return share(values, mask, data) * data["dp_size"]


@wrong_mean("missing dp_size")
def sequence_mean_without_dp_size(values, mask, data):
    return sequences(values, mask, data) / data["dp_size"]


@wrong_mean("padded width as the norm")
def over_the_width(values, mask, data):
    return (values * mask).sum() / mask.shape[1] * data["dp_size"] / data["global_batch_size"]


@wrong_mean("padded width as the norm")
def over_the_longest_response(values, mask, data):
    responses = data["responses"]
    longest = int(responses.offsets().diff().max()) if responses.is_nested else responses.shape[1]
    return (values * mask).sum() / longest * data["dp_size"] / data["global_batch_size"]


@wrong_mean("padded width as the norm", COUNT, "statistic of the micro-batch as a factor")
def over_the_longest_valid(values, mask, data):
    return (values * mask).sum() / mask.sum(1).max().clamp(min=1) * data["dp_size"] / data["global_batch_size"]


@wrong_mean("number of micro-batches")
def times_micro_batches(values, mask, data):
    pieces = tu.get_non_tensor_data(data, "num_micro_batch", 1)
    return share(values, mask, data) * pieces


@wrong_mean("number of micro-batches")
def over_micro_batches(values, mask, data):
    return share(values, mask, data) / tu.get_non_tensor_data(data, "num_micro_batch", 1)


@wrong_mean("number of micro-batches", LOCAL)
def by_the_configured_micro_batch(values, mask, data):
    size = data["micro_batch_size_per_gpu"]
    return (values * mask).sum() / size


for _term, _cause in (("entropy", LOCAL), ("kl", LOCAL), ("pg", LOCAL)):
    WRONG[f"local_token_mean_in_{_term}"] = (of_mean(local_token_mean, _term), (_cause,), {})
for _term in ("entropy", "kl"):
    WRONG[f"no_dp_size_in_{_term}"] = (of_mean(without_dp_size, _term), ("missing dp_size",), {})
    WRONG[f"width_in_{_term}"] = (of_mean(over_the_width, _term), ("padded width as the norm",), {})
WRONG["a_little_local_mean"] = (of_mean(local_token_mean, small=1e-4), (LOCAL,), {})
WRONG["a_very_little_row_mean"] = (of_mean(local_sequence_mean, "kl", small=1e-5), (LOCAL, SHARE, COUNT), {})
WRONG["a_little_without_dp_size"] = (of_mean(without_dp_size, small=3e-4), ("missing dp_size",), {})

# ----------------------------------------------------------------------------------------------------
# Wrong: what stands in the micro-batch

CHOICE, FACTOR = "selection inside the micro-batch", "statistic of the micro-batch as a factor"
GROUP, ORDER = "prompt group inside the micro-batch", "order of the sequences"


def _valid(values, mask):
    return values[mask > 0]


@wrong_mean(CHOICE)
def largest_half(values, mask, data):
    bound = _valid(values.detach(), mask).median() if bool(mask.any()) else 0.0
    return share(values * (values.detach() >= bound), mask, data)


@wrong_tokens(CHOICE)
def top_entropy(b, data):
    if not bool(b.mask.any()):
        return b.pg
    bound = torch.quantile(_valid(b.entropy.detach(), b.mask), 0.8)
    return b.pg * (b.entropy.detach() >= bound)


@wrong_tokens(CHOICE)
def most_off_policy_dropped(b, data):
    """Without the tenth of the tokens that moved most."""
    count = int(0.1 * float(b.mask.sum()))
    if count == 0:
        return b.pg
    far = ((b.log_prob - b.old).detach().abs() * b.mask).flatten().topk(count).indices
    keep = torch.ones_like(b.pg).flatten()
    keep[far] = 0
    return b.pg * keep.view_as(b.pg)


@wrong_tokens(CHOICE)
def whitened_advantages(b, data):
    valid = _valid(b.adv, b.mask)
    mean = valid.mean() if len(valid) else 0.0
    std = valid.std(unbiased=False) if len(valid) else 1.0
    return -(b.adv - mean) / (std + 1e-6) * b.ratio


@wrong_tokens(CHOICE)
def centred_advantages(b, data):
    centre = (b.adv * b.mask).sum() / b.mask.sum().clamp(min=1)
    return -(b.adv - centre) * b.ratio


@wrong_tokens(CHOICE)
def covariance_clipped(b, data):
    """Without the tokens whose covariance with the log-probs is large, as clip_cov without its draw."""
    n = b.mask.sum().clamp(min=1)
    cov = (b.adv - (b.adv * b.mask).sum() / n) * (b.log_prob.detach() - (b.log_prob.detach() * b.mask).sum() / n)
    return b.pg * (cov.abs() < 1.0)


@wrong_mean(FACTOR, CHOICE)
def softmax_weights(values, mask, data):
    """Worst tokens first: weights from a softmax over the micro-batch."""
    logits = values.detach().masked_fill(mask == 0, -1e9).flatten()
    weights = logits.softmax(0).view_as(values) * mask.sum()
    return share(values * weights, mask, data)


@wrong_tokens(FACTOR)
def over_the_deviation(b, data):
    valid = _valid(b.adv, b.mask)
    std = valid.std(unbiased=False) if len(valid) > 1 else 1.0
    return b.pg / (std + 1e-6)


@wrong_tokens(FACTOR)
def over_the_largest(b, data):
    return b.pg / b.adv.abs().max().clamp(min=1e-6)


@wrong_tokens(FACTOR)
def self_normalised_ratio(b, data):
    return b.pg / ((b.ratio * b.mask).sum() / b.mask.sum().clamp(min=1)).detach().clamp(min=1e-6)


@wrong(FACTOR)
def adaptive_kl(*, model_output, data, dp_group=None):
    b = read(model_output, data)
    measured = ((b.kl * b.mask).sum() / b.mask.sum().clamp(min=1)).detach()
    return share(b.pg, b.mask, data) + 0.1 * measured * share(b.kl, b.mask, data), {}


@wrong(FACTOR)
def entropy_gate(*, model_output, data, dp_group=None):
    b = read(model_output, data)
    level = ((b.entropy * b.mask).sum() / b.mask.sum().clamp(min=1)).detach()
    return share(b.pg, b.mask, data) - 0.01 * (level < 1.0) * share(b.entropy, b.mask, data), {}


@wrong(FACTOR)
def early_stop(*, model_output, data, dp_group=None):
    b = read(model_output, data)
    moved = ((b.old - b.log_prob) * b.mask).sum().detach() / b.mask.sum().clamp(min=1)
    return share(b.pg, b.mask, data) * (moved.abs() < 0.08), {}


@wrong(FACTOR)
def over_its_own_size(*, model_output, data, dp_group=None):
    b = read(model_output, data)
    loss = share(b.pg, b.mask, data)
    return loss / loss.detach().abs().clamp(min=1e-8) * (loss.detach() != 0), {}


@wrong(FACTOR)
def squared_loss(*, model_output, data, dp_group=None):
    b = read(model_output, data)
    return share(b.pg, b.mask, data) ** 2, {}


@wrong(FACTOR)
def log_mean_ratio(*, model_output, data, dp_group=None):
    b = read(model_output, data)
    return -((b.ratio * b.mask).sum() / b.mask.sum().clamp(min=1)).clamp(min=1e-6).log() * data["dp_size"], {}


def _by_prompt(b, data, values):
    """Mean of per-row numbers over the rows of the same prompt in this micro-batch."""
    uids = list(tu.get(data, "uid"))
    same = torch.tensor([[one == other for other in uids] for one in uids], dtype=values.dtype)
    return same @ values / same.sum(1)


@wrong_tokens(GROUP)
def baseline_of_the_group(b, data):
    rewards = (b.adv * b.mask).sum(1)
    return -(rewards - _by_prompt(b, data, rewards))[:, None] * b.ratio


@wrong_tokens(GROUP)
def scaled_by_the_group(b, data):
    rewards = (b.adv * b.mask).sum(1)
    spread = (_by_prompt(b, data, rewards**2) - _by_prompt(b, data, rewards) ** 2).clamp(min=0).sqrt()
    return b.pg / (spread[:, None] + 1.0)


@wrong_tokens(GROUP)
def mean_within_the_prompt(b, data):
    uids = list(tu.get(data, "uid"))
    same = torch.tensor([[one == other for other in uids] for one in uids], dtype=b.pg.dtype)
    return b.pg / (same @ b.mask.sum(1)).clamp(min=1)[:, None] * 10


@wrong_tokens(ORDER)
def first_row_counts_half(b, data):
    weight = torch.ones(len(b.mask), 1, dtype=b.pg.dtype)
    weight[0] = 0.5
    return b.pg * weight


@wrong_tokens(ORDER)
def later_rows_count_more(b, data):
    return b.pg * (1 + torch.arange(len(b.mask), dtype=b.pg.dtype)[:, None] / 100)


@wrong_tokens(ORDER)
def baseline_of_the_row_before(b, data):
    means = (b.adv * b.mask).sum(1) / b.mask.sum(1).clamp(min=1)
    return -(b.adv - means.roll(1)[:, None]) * b.ratio


@wrong(ORDER)
def leaks_into_the_next_row(*, model_output, data, dp_group=None):
    b = read(model_output, data)
    smooth = b.pg.flatten()
    smooth = (smooth + torch.nn.functional.pad(b.log_prob.flatten(), (1, 0))[:-1] * smooth.detach()).view_as(b.pg)
    return share(smooth, b.mask, data), {}


@wrong_tokens(ORDER)
def running_mean(b, data):
    """Centres by the mean of all tokens so far."""
    flat, counted = (b.adv * b.mask).flatten().cumsum(0), b.mask.flatten().cumsum(0)
    return -(b.adv - (flat / counted.clamp(min=1)).view_as(b.adv)) * b.ratio


# ----------------------------------------------------------------------------------------------------
# Wrong: nothing there, precision, draws, state, inputs, ranks, layouts

EMPTY, DRAWS, STATE = "empty micro-batch", "random numbers", "state between calls"
FAILS, FINITE, LOW = "fails on a cut", "not finite", "counts in low precision"


@wrong_mean(EMPTY)
def zero_over_zero(values, mask, data):
    return share(values, mask, data) * (mask.sum() / mask.sum())


@wrong_mean(EMPTY)
def constant_where_empty(values, mask, data):
    return share(values, mask, data) if bool(mask.any()) else torch.zeros(())


@wrong_mean(EMPTY)
def raises_where_empty(values, mask, data):
    if not bool(mask.any()):
        raise ValueError("no valid tokens")
    return share(values, mask, data)


@wrong_mean(FAILS, FACTOR)
def deviation_of_one(values, mask, data):
    means = (values * mask).sum(1) / mask.sum(1).clamp(min=1)
    return share(values, mask, data) * (1 + 0 * means.detach().std())


@wrong_mean(FAILS)
def raises_on_few(values, mask, data):
    if len(mask) < 3:
        raise ValueError("a batch needs three rows")
    return share(values, mask, data)


@wrong_tokens(FAILS, FACTOR, EMPTY, FINITE)
def divides_by_the_advantages(b, data):
    """1 on the whole and on any piece with something to gain, NaN on a piece without."""
    size = b.adv.abs().sum()
    return b.pg * (size / size)


@wrong_tokens(FINITE, FAILS)
def sign_of_the_advantage(b, data):
    """a / |a|, which an advantage of 0 makes NaN."""
    safe = torch.where(b.mask > 0, b.adv, 1.0)
    return -(safe / safe.abs()) * b.ratio


@wrong(FINITE, FAILS)
def divides_by_the_length(*, model_output, data, dp_group=None):
    b = read(model_output, data)
    responses = data["responses"]
    lengths = (
        responses.offsets().diff() if responses.is_nested else (data["attention_mask"][:, -b.mask.shape[1] :]).sum(1)
    )
    means = (b.pg * b.mask).sum(1) / lengths
    return means.sum() * data["dp_size"] / data["global_batch_size"], {}


@wrong_mean(LOW)
def counts_in_bfloat16(values, mask, data):
    local = mask.bfloat16().sum().clamp(min=1).to(values.dtype)
    return (values * mask).sum() / local * (mask.sum() / data["batch_num_tokens"]) * data["dp_size"]


@wrong_mean(LOW)
def counts_in_float16(values, mask, data):
    local = mask.half().sum().clamp(min=1).to(values.dtype)
    return (values * mask).sum() / local * (mask.sum() / data["batch_num_tokens"]) * data["dp_size"]


@wrong_mean(LOW, COUNT)
def counts_in_int16(values, mask, data):
    local = mask.to(torch.int16).sum(dtype=torch.int16).clamp(min=1).to(values.dtype)
    return (values * mask).sum() / local * (mask.sum() / data["batch_num_tokens"]) * data["dp_size"]


@wrong_mean(DRAWS)
def drops_tokens(values, mask, data):
    return share(values * (torch.rand(values.shape) > 0.1) / 0.9, mask, data)


@wrong_mean(DRAWS)
def drops_tokens_by_numpy(values, mask, data):
    return share(values * torch.as_tensor(np.random.random(values.shape) > 0.1), mask, data)


@wrong_mean(DRAWS)
def jitters_by_python(values, mask, data):
    return share(values, mask, data) * (0.9 + 0.2 * random.random())


@wrong_mean(STATE, DRAWS)
def draws_from_its_own_generator(values, mask, data, _draw=torch.Generator().manual_seed(1)):  # noqa: B008
    return share(values * torch.rand(values.shape, generator=_draw).to(values), mask, data)


class Counting:
    """Keeps something between calls; ``use`` makes a factor of it."""

    def __init__(self, use):
        self.use, self.calls, self.kept = use, 0, None

    def __call__(self, *, model_output, data, dp_group=None):
        b = read(model_output, data)
        self.calls += 1
        return self.use(self, b, data) * share(b.pg, b.mask, data), {}


def _warm_up(self, b, data):
    return min(1.0, self.calls / 1000)


def _average(self, b, data):
    level = float((b.kl * b.mask).sum() / b.mask.sum().clamp(min=1))
    self.kept = level if self.kept is None else 0.9 * self.kept + 0.1 * level
    return 1 + self.kept


def _first(self, b, data):
    if self.kept is None:
        self.kept = float(b.mask.sum())
    return self.kept / data["batch_num_tokens"]


def _every_other(self, b, data):
    return float(self.calls % 2)


for _use in (_warm_up, _average, _first, _every_other):
    WRONG[f"counting{_use.__name__}"] = (Counting(_use), (STATE,), {})


@wrong("inputs changed in place")
def scales_advantages_in_place(*, model_output, data, dp_group=None):
    values = data["advantages"]
    (values.values() if values.is_nested else values).mul_(0.5)
    b = read(model_output, data)
    return share(b.pg, b.mask, data), {}


@wrong("inputs changed in place")
def shifts_old_log_probs_in_place(*, model_output, data, dp_group=None):
    values = data["old_log_probs"]
    (values.values() if values.is_nested else values).add_(-0.05)
    b = read(model_output, data)
    return share(b.pg, b.mask, data), {}


@wrong("rank identity")
def entropy_on_the_first_rank(*, model_output, data, dp_group=None):
    b = read(model_output, data)
    first = int(os.environ.get("RANK", "0")) == 0
    return share(b.pg, b.mask, data) - (0.01 * share(b.entropy, b.mask, data) if first else 0.0), {}


@wrong("rank identity")
def scaled_by_rank(*, model_output, data, dp_group=None):
    b = read(model_output, data)
    there = torch.distributed.is_initialized()
    return share(b.pg, b.mask, data) * (1 + 0.1 * (torch.distributed.get_rank() if there else 0)), {}


@wrong("layout")
def forgets_the_mask_where_padded(*, model_output, data, dp_group=None):
    b = read(model_output, data)
    mask = b.mask if data["advantages"].is_nested else torch.ones_like(b.mask)
    return (b.entropy + b.pg + 0.1 * (1 - mask)).mul(mask).sum() * data["dp_size"] / data["batch_num_tokens"] + (
        0.0 if data["advantages"].is_nested else 0.5 * share(b.pg, b.mask, data)
    ), {}


@wrong(LOCAL, "layout", options="nested")
def local_where_nested(*, model_output, data, dp_group=None):
    b = read(model_output, data)
    mean = local_token_mean if data["advantages"].is_nested else share
    return mean(b.pg, b.mask, data), {}


@wrong("reported loss")
def reports_a_local_mean(*, model_output, data, dp_group=None):
    b = read(model_output, data)
    loss = share(b.pg, b.mask, data)
    return loss - loss.detach() + local_token_mean(b.pg, b.mask, data).detach(), {}


@wrong("reported loss")
def a_detached_term(*, model_output, data, dp_group=None):
    b = read(model_output, data)
    return share(b.pg, b.mask, data) + 0.1 * local_token_mean(b.kl, b.mask, data).detach(), {}


@wrong("metric depends on the cut", strict=True)
def metric_of_local_means(*, model_output, data, dp_group=None):
    b = read(model_output, data)
    return share(b.pg, b.mask, data), {"actor/kl": local_token_mean(b.kl, b.mask, data).item()}


@wrong("metric depends on the cut", strict=True)
def a_mean_named_max(*, model_output, data, dp_group=None):
    b = read(model_output, data)
    mean = local_token_mean(b.entropy, b.mask, data).item()
    return share(b.pg, b.mask, data), {"actor/entropy_below_maximum": mean}


@wrong("metric depends on the cut", strict=True)
def a_list_of_row_means(*, model_output, data, dp_group=None):
    b = read(model_output, data)
    means = (b.pg * b.mask).sum(1) / b.mask.sum(1).clamp(min=1)
    return share(b.pg, b.mask, data), {"actor/row_loss": [means.mean().item()]}


# ----------------------------------------------------------------------------------------------------
# Wrong: what took a better eye


def of_batch(*causes, **options):
    """A loss from a function of what is read and the micro-batch."""

    def register(body):
        def loss(*, model_output, data, dp_group=None):
            result = body(read(model_output, data), data)
            return result if isinstance(result, tuple) else (result, {})

        if causes:
            WRONG[body.__name__] = (loss, causes, options)
        else:
            RIGHT[body.__name__] = loss
        return body

    return register


class CountByRows:
    """Keeps the count of the first micro-batch with so many rows."""

    def __init__(self):
        self.counts = {}

    def __call__(self, *, model_output, data, dp_group=None):
        b = read(model_output, data)
        count = self.counts.setdefault(len(b.mask), b.mask.sum().clamp(min=1))
        return share(b.pg, b.mask, data) * b.mask.sum() / count, {}


WRONG["cache_of_the_count_by_rows"] = (CountByRows(), (STATE,), {})


@of_batch(CHOICE)
def ranks_of_advantages(b, data):
    """Among all tokens; without advantages the ties are broken by place."""
    flat = b.adv.masked_fill(b.mask == 0, -1e9).flatten()
    order = flat.argsort().argsort().view_as(b.adv).to(b.pg.dtype)
    return share(-(order / order.numel()) * b.ratio, b.mask, data)


@of_batch(CHOICE, FACTOR)
def better_half_of_the_rows(b, data):
    means = (b.adv * b.mask).sum(1) / b.mask.sum(1).clamp(min=1)
    return share(b.pg * (means >= means.median())[:, None], b.mask, data)


@of_batch(CHOICE, FACTOR)
def best_row_only(b, data):
    sums = (b.adv * b.mask).sum(1)
    return share(b.pg * (sums == sums.max()).to(b.pg.dtype)[:, None], b.mask, data)


@of_batch(CHOICE, FACTOR)
def clip_range_of_the_measured_kl(b, data):
    """As wide as the micro-batch is off policy."""
    eps = 0.1 + 0.3 * float(local_token_mean((b.log_prob - b.old).detach().abs(), b.mask, data))
    return share(torch.maximum(-b.adv * b.ratio, -b.adv * b.ratio.clamp(1 - eps, 1 + eps)), b.mask, data)


@of_batch(FACTOR)
def a_coefficient_of_two(b, data):
    """The KL's is one where the measured KL is small, and another where it is not."""
    measured = float(local_token_mean(b.kl.detach(), b.mask, data))
    return share(b.pg, b.mask, data) + (0.05 if measured > 0.12 else 0.5) * share(b.kl, b.mask, data)


@of_batch(FACTOR)
def log_sum_exp_over_rows(b, data):
    rows = (b.pg * b.mask).sum(1) / b.mask.sum(1).clamp(min=1)
    return torch.logsumexp(rows, 0) * len(rows) / data["global_batch_size"] * data["dp_size"]


@of_batch(FACTOR, CHOICE)
def a_hundredth_of_a_percent_by_the_deviation(b, data):
    valid = _valid(b.adv, b.mask)
    return share(b.pg * (1 + 1e-4 * (valid.std() if len(valid) > 1 else 1.0)), b.mask, data)


@of_batch(COUNT)
def log_of_the_count(b, data):
    return share(b.pg, b.mask, data) * torch.log1p(b.mask.sum())


@of_batch(COUNT, LOCAL)
def over_the_root_of_both_counts(b, data):
    both = b.mask.sum().clamp(min=1) * data["batch_num_tokens"]
    return (b.pg * b.mask).sum() / both.sqrt() * data["dp_size"]


@of_batch(GROUP)
def leave_one_out(b, data):
    rewards = (b.adv * b.mask).sum(1) / b.mask.sum(1).clamp(min=1)
    uids = list(tu.get(data, "uid"))
    same = torch.tensor([[float(one == other) for other in uids] for one in uids], dtype=b.pg.dtype)
    others = (same @ rewards - rewards) / (same.sum(1) - 1).clamp(min=1)
    return share(-(rewards - others)[:, None] * b.ratio, b.mask, data)


@of_batch(GROUP)
def best_answer_of_the_prompt(b, data):
    uids, sums = list(tu.get(data, "uid")), (b.adv * b.mask).sum(1)
    best = [max(sums[j] for j in range(len(uids)) if uids[j] == uid) for uid in uids]
    return share(b.pg * (sums == torch.stack(best)).to(b.pg.dtype)[:, None], b.mask, data)


@of_batch(GROUP, LOCAL)
def half_of_it_over_the_prompts_here(b, data):
    here = len(set(tu.get(data, "uid")))
    return 0.5 * share(b.pg, b.mask, data) + 0.5 * (b.pg * b.mask).sum() / here * data["dp_size"] / 5


@of_batch("rank identity")
def kl_on_the_last_rank(b, data):
    d = torch.distributed
    last = not d.is_initialized() or d.get_rank() == d.get_world_size() - 1
    return share(b.pg, b.mask, data) + 0.05 * share(b.kl, b.mask, data) * float(last)


@of_batch(DRAWS)
def dropout_of_tokens(b, data):
    return share(torch.nn.functional.dropout(b.pg, 0.1), b.mask, data)


@of_batch(LOCAL)
def local_entropy_where_padded(b, data):
    mean = share if data["advantages"].is_nested else local_token_mean
    return share(b.pg, b.mask, data) - 0.01 * mean(b.entropy, b.mask, data)


@of_batch("missing dp_size")
def root_of_dp_size(b, data):
    return share(b.pg, b.mask, data) / data["dp_size"] ** 0.5


@of_batch("metric depends on the cut", strict=True)
def a_sum_without_the_ranks(b, data):
    return share(b.pg, b.mask, data), {"actor/tokens": Metric(AggregationType.SUM, b.mask.sum())}


@of_batch(FACTOR, CHOICE)
def gate_on_effective_sample_size(b, data):
    weights = b.ratio.detach()[b.mask > 0]
    size = float(weights.sum() ** 2 / (weights**2).sum() / len(weights)) if len(weights) else 1.0
    return share(b.pg, b.mask, data) * (1.0 if size > 0.75 else 0.3)


@of_batch(LOCAL)
def good_and_bad_tokens_apart(b, data):
    good, bad = b.mask * (b.adv > 0), b.mask * (b.adv <= 0)
    return local_token_mean(b.pg, good, data) + local_token_mean(b.pg, bad, data)


@of_batch(LOCAL)
def likelihood_of_good_tokens(b, data):
    """A term with a mean over a subset of its own."""
    return share(b.pg, b.mask, data) + 0.1 * local_token_mean(-b.log_prob, b.mask * (b.adv > 0), data)


@of_batch(LOW)
def share_in_bfloat16(b, data):
    part = (b.mask.sum() / data["batch_num_tokens"]).bfloat16().to(b.pg.dtype)
    return local_token_mean(b.pg, b.mask, data) * part * data["dp_size"]


@of_batch("inputs changed in place")
def normalises_in_place_once(b, data):
    """The second call changes nothing more."""
    values = data["advantages"]
    values = values.values() if values.is_nested else values
    values.div_(values.abs().max().clamp(min=0.5) * 1.1)
    return share(b.pg, b.mask, data)


@of_batch(CHOICE, FACTOR)
def softmax_over_rows(b, data):
    rows = (b.log_prob * b.mask).sum(1) / b.mask.sum(1).clamp(min=1)
    return -rows.log_softmax(0).sum() * data["dp_size"] / data["global_batch_size"]


class LongestSoFar:
    """Divides by the longest response it ever saw."""

    def __init__(self):
        self.width = 0

    def __call__(self, *, model_output, data, dp_group=None):
        b = read(model_output, data)
        self.width = max(self.width, b.mask.shape[1])
        return (b.pg * b.mask).sum() / self.width * data["dp_size"] / data["global_batch_size"], {}


WRONG["longest_so_far"] = (LongestSoFar(), (STATE, "padded width as the norm"), {})


# ----------------------------------------------------------------------------------------------------
# Wrong: as users write them elsewhere; ``says`` stands in the first sentence


@of_batch(CHOICE, says="how long the others")
def shorter_ones_count_more(b, data):
    """By its rank among the lengths; several are equally long."""
    lengths = b.mask.sum(1)
    rank = lengths.argsort().argsort().to(b.pg.dtype)
    return share(b.pg * (1 - 0.5 * rank / max(len(rank) - 1, 1))[:, None], b.mask, data)


@of_batch(CHOICE, says="a mean length")
def advantage_against_the_mean_length(b, data):
    lengths = b.mask.sum(1, keepdim=True)
    adv = b.adv - 0.05 * (lengths / lengths.mean().clamp(min=1) - 1)
    return share(-adv * b.ratio, b.mask, data)


@of_batch(FACTOR, says="the longest response")
def sequence_ratio_over_the_longest(b, data):
    mean = ((b.log_prob - b.old) * b.mask).sum(1, keepdim=True) / b.mask.sum(1).max().clamp(min=1)
    return sequences(-b.adv * mean.exp(), b.mask, data)


@of_batch("padded width as the norm", says="taken for a length or a position")
def later_half_of_the_width(b, data):
    width = b.mask.shape[1]
    return share(b.pg * (torch.arange(width) >= width // 2), b.mask, data)


@of_batch("padded width as the norm", says="taken for a length or a position")
def full_rows_are_dropped(b, data):
    """What fills the width is taken to be cut off."""
    responses = data["responses"]
    nested = responses.is_nested
    here = responses.offsets().diff() if nested else data["attention_mask"][:, -b.mask.shape[1] :].sum(1)
    return share(b.pg * (here < b.mask.shape[1])[:, None], b.mask, data)


@of_batch(ORDER, says="where in the micro-batch")
def last_of_an_odd_number_dropped(b, data):
    even = torch.arange(len(b.mask)) < len(b.mask) // 2 * 2
    return share(b.pg * even[:, None], b.mask, data)


@of_batch(FACTOR, says="all or nothing")
def stops_where_it_moved(b, data):
    moved = float(local_token_mean((b.old - b.log_prob).detach(), b.mask, data))
    return share(b.pg, b.mask, data) * float(moved < 0.01)


@of_batch(FACTOR, CHOICE, says="another form or coefficient")
def another_loss_where_few_samples_count(b, data):
    weights = b.ratio.detach()[b.mask > 0]
    size = float(weights.sum() ** 2 / (weights**2).sum() / len(weights)) if len(weights) else 1.0
    return share(b.pg if size > 0.75 else -b.adv * b.log_prob, b.mask, data)


@of_batch(FACTOR, says="computed from its")
def bounded_kl_controller(b, data):
    measured = float(local_token_mean(b.kl.detach(), b.mask, data))
    beta = 0.05 * (1 + min(max(measured / 0.05 - 1, -0.2), 0.2))
    return share(b.pg, b.mask, data) + beta * share(b.kl, b.mask, data)


@of_batch(LOCAL, says="works out from its sequences")
def local_mean_over_a_number_of_pieces(b, data):
    pieces = max(1, data["global_batch_size"] // data["dp_size"] // len(b.mask))
    return local_token_mean(b.pg, b.mask, data) / pieces


@of_batch(COUNT, says="multiplies by the root of its own micro-batch's sequences")
def times_the_root_of_the_rows(b, data):
    return share(b.pg, b.mask, data) * len(b.mask) ** 0.5


@of_batch("missing dp_size", says="asks the process group or the environment")
def ranks_of_the_environment(b, data):
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return (b.pg * b.mask).sum() / data["batch_num_tokens"] * world**2


@of_batch(DRAWS, says="reads the clock")
def annealed_by_the_clock(b, data):
    return share(b.pg, b.mask, data) * (1 + 0.5 * np.sin(time.time() * 1000))


@of_batch(STATE, says="a random generator of its own")
def draws_from_numpys_own(b, data, _draw=np.random.default_rng(0)):  # noqa: B008
    return share(b.pg * torch.as_tensor(_draw.uniform(size=(len(b.mask), 1))), b.mask, data)


@of_batch(EMPTY, says="without a graph")
def a_leaf_where_empty(b, data):
    return share(b.pg, b.mask, data) if bool(b.mask.any()) else torch.zeros((), requires_grad=True)


@of_batch(LOW, says="exceeds its type")
def counts_sequences_in_float16(b, data):
    weight = b.mask.half().sum().to(b.pg.dtype) / b.mask.sum().clamp(min=1)
    return share(b.pg, b.mask, data) * weight


@of_batch("reported loss", LOW, says="added up in bfloat16")
def added_up_in_bfloat16(b, data):
    total = (b.pg * b.mask).bfloat16().sum().to(b.pg.dtype)
    return total / data["batch_num_tokens"] * data["dp_size"]


@of_batch(FAILS, says="does not emit actor/ratio_max")
def no_metric_where_empty(b, data):
    metrics = {"actor/ratio_max": Metric(AggregationType.MAX, b.ratio.detach().max())} if bool(b.mask.any()) else {}
    return share(b.pg, b.mask, data), metrics


@of_batch("metric depends on the cut", strict=True, says="actor/largest")
def a_maximum_that_is_averaged(b, data):
    return share(b.pg, b.mask, data), {"actor/largest": float((b.ratio * b.mask).detach().max())}


class Waits:
    """Narrows its range after so many calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, *, model_output, data, dp_group=None):
        b = read(model_output, data)
        self.calls += 1
        eps = 0.2 / (1 + self.calls // 8)
        return share(torch.maximum(-b.adv * b.ratio, -b.adv * b.ratio.clamp(1 - eps, 1 + eps)), b.mask, data), {}


WRONG["narrows_with_its_calls"] = (Waits(), (STATE,), {"says": "counts its calls"})


class Anchored:
    """Measures from what the first call saw."""

    def __init__(self):
        self.anchor = None

    def __call__(self, *, model_output, data, dp_group=None):
        b = read(model_output, data)
        level = float(local_token_mean(b.log_prob.detach(), b.mask, data))
        self.anchor = level if self.anchor is None else self.anchor
        return share(b.pg + 0.1 * (level - self.anchor) * b.log_prob, b.mask, data), {}


WRONG["anchored_in_its_first_call"] = (Anchored(), (STATE,), {"says": "first call"})


class Previous:
    """The baseline is the mean advantage of the call before."""

    def __init__(self):
        self.last = 0.0

    def __call__(self, *, model_output, data, dp_group=None):
        b = read(model_output, data)
        loss = share(-(b.adv - self.last) * b.ratio, b.mask, data)
        self.last = float(local_token_mean(b.adv, b.mask, data))
        return loss, {}


WRONG["baseline_of_the_call_before"] = (Previous(), (STATE,), {"says": "from their values"})


class SmoothedEntropy:
    """A coefficient that a running mean of the entropy chooses, and that no ordinary mini-batch changes."""

    def __init__(self):
        self.mean = None

    def __call__(self, *, model_output, data, dp_group=None):
        b = read(model_output, data)
        here = float((b.entropy * b.mask).detach().sum() / b.mask.sum().clamp(min=1))
        self.mean = here if self.mean is None else 0.9 * self.mean + 0.1 * here
        return share(b.pg - (0.01 if self.mean < 0.5 else 0.001) * b.entropy, b.mask, data), {}


WRONG["coefficient_by_a_smoothed_entropy"] = (SmoothedEntropy(), (STATE,), {"says": "from their values"})


class ScaleByShape:
    """Divides by what the first micro-batch of the same shape held."""

    def __init__(self):
        self.scales = {}

    def __call__(self, *, model_output, data, dp_group=None):
        b = read(model_output, data)
        scale = self.scales.setdefault(tuple(b.mask.shape), float((b.adv * b.mask).abs().mean()))
        return share(b.pg / (scale + 1e-4), b.mask, data), {}


WRONG["scale_kept_by_shape"] = (ScaleByShape(), (STATE,), {"says": "from their values"})


@of_batch(DRAWS, says="reads the clock")
def annealed_by_a_clock_of_another_name(b, data):
    return share(b.pg, b.mask, data) * (1 + 0.5 * np.sin(clock() * 1000))


@of_batch(FACTOR, says="the longest response")
def advantage_less_the_share_of_the_longest(b, data):
    lengths = b.mask.sum(1, keepdim=True)
    adv = b.adv - 0.1 * lengths / lengths.max()
    pg = torch.maximum(-adv * b.ratio, -adv * b.ratio.clamp(0.8, 1.28))
    return share(pg, b.mask, data)


@of_batch(CHOICE, FACTOR, says="reference log-probs")
def kl_clamped_after_the_sum(b, data):
    kl = (b.kl * b.mask).sum().clamp(max=1.0)
    return share(b.pg, b.mask, data) + 0.01 * kl / data["batch_num_tokens"] * data["dp_size"]


# ----------------------------------------------------------------------------------------------------
# Right


RIGHT["token_mean"] = of_mean(share)
RIGHT["sequence_mean"] = of_mean(sequences)


@right_mean
def sequence_sum(values, mask, data):
    return (values * mask).sum() * data["dp_size"] / data["global_batch_size"]


@right_mean
def plain_sum(values, mask, data):
    return (values * mask).sum() * data["dp_size"]


@right_mean
def over_a_constant(values, mask, data):
    return (values * mask).sum() * data["dp_size"] / 4096 / data["global_batch_size"]


@right_mean
def local_mean_times_share(values, mask, data):
    local = mask.sum()
    return (values * mask).sum() / local.clamp(min=1) * local / data["batch_num_tokens"] * data["dp_size"]


@right_mean
def loop_over_rows(values, mask, data):
    loss = values.sum() * 0
    for row, counted in zip(values, mask, strict=True):
        if bool(counted.any()):
            loss = loss + (row * counted).sum() / counted.sum()
    return loss * data["dp_size"] / data["global_batch_size"]


@right_mean
def in_float32(values, mask, data):
    return share(values.float(), mask.float(), data)


@right_tokens
def sequence_ratio(b, data):
    """gspo."""
    mean = ((b.log_prob - b.old) * b.mask).sum(1, keepdim=True) / b.mask.sum(1, keepdim=True).clamp(min=1)
    ratio = mean.exp()
    return torch.maximum(-b.adv * ratio, -b.adv * ratio.clamp(0.99, 1.01))


@right_tokens
def centred_within_the_row(b, data):
    return -(b.adv - (b.adv * b.mask).sum(1, keepdim=True) / b.mask.sum(1, keepdim=True).clamp(min=1)) * b.ratio


@right_tokens
def top_tokens_of_each_row(b, data):
    bound = b.entropy.detach().max(1, keepdim=True).values / 2 if b.mask.shape[1] else 0.0
    return b.pg * (b.entropy.detach() >= bound)


@right_tokens
def sign_of_advantages(b, data):
    return -b.adv.sign() * b.ratio


@right_tokens
def truncated_weights(b, data):
    return -b.adv * b.ratio.detach().clamp(max=2.0) * b.log_prob


@right_tokens
def positive_only(b, data):
    return -(b.adv > 0).to(b.adv) * b.log_prob


@right_tokens
def squared_log_ratio(b, data):
    return 0.5 * (b.log_prob - b.old) ** 2 - b.adv * b.ratio


@right_tokens
def length_penalty(b, data):
    return b.pg * (1 + b.mask.sum(1, keepdim=True) / 100)


@right_tokens
def early_tokens_count_more(b, data):
    return b.pg * torch.exp(-torch.arange(b.mask.shape[1], dtype=b.pg.dtype) / 50)


@right_tokens
def drops_by_a_hash(b, data):
    """The same tokens whatever the cut: by what they are."""
    return b.pg * (torch.frac(b.old * 1e4).abs() > 0.1)


@right
def asks_for_the_uid(*, model_output, data, dp_group=None):
    b = read(model_output, data)
    weight = torch.tensor([1.0 + len(str(uid)) % 3 for uid in tu.get(data, "uid")], dtype=b.pg.dtype)
    return sequences(b.pg * weight[:, None], b.mask, data), {}


@right
def with_metrics(*, model_output, data, dp_group=None):
    """Sums over the mini-batch's count, extremes by their names, a list, a constant, NaN throughout."""
    b = read(model_output, data)
    loss = share(b.pg, b.mask, data)
    moved = share(b.old - b.log_prob, b.mask, data).detach()
    return loss, {
        "actor/pg_loss": Metric(AggregationType.SUM, loss.detach()),
        "actor/ppo_kl": Metric(AggregationType.SUM, moved),
        "actor/ratio_max": float((b.ratio * b.mask).max()) if b.mask.numel() else 0.0,
        "actor/nothing": float("nan"),
        "actor/coefficient": 0.05,
        "actor/list": [1.0] * len(b.mask),
    }


@right
def with_the_machine(*, model_output, data, dp_group=None):
    start = time.perf_counter()
    b = read(model_output, data)
    loss = share(b.pg, b.mask, data)
    return loss, {"perf/loss_seconds": time.perf_counter() - start, "memory_gb": random.random(), "timing_s/x": start}


@right
def counts_its_calls(*, model_output, data, dp_group=None, _calls=[]):  # noqa: B006
    _calls.append(1)
    b = read(model_output, data)
    return share(b.pg, b.mask, data), {}


class Cache:
    """Keeps what does not depend on the micro-batch."""

    def __init__(self):
        self.positions = {}

    def __call__(self, *, model_output, data, dp_group=None):
        b = read(model_output, data)
        width = b.mask.shape[1]
        if width not in self.positions:
            self.positions[width] = 1 / (1 + torch.arange(width, dtype=b.pg.dtype))
        return share(b.pg * self.positions[width], b.mask, data), {}


RIGHT["cache_by_width"] = Cache()


@right
def fills_masked_in_place(*, model_output, data, dp_group=None):
    """Twice is as good as once."""
    adv, mask = data["advantages"], data["response_mask"]
    if adv.is_nested:
        adv, mask = adv.values(), mask.values()
    adv.masked_fill_(mask == 0, 0.0)
    b = read(model_output, data)
    return share(b.pg, b.mask, data), {}


@right
def adds_a_field(*, model_output, data, dp_group=None):
    data["weight"] = NonTensorData(2.0)
    b = read(model_output, data)
    return data["weight"] * share(b.pg, b.mask, data), {}


@right
def takes_a_field_out(*, model_output, data, dp_group=None):
    b = read(model_output, data)
    data.pop("advantages")
    return share(b.pg, b.mask, data), {}


@right
def logs_on_the_first_rank(*, model_output, data, dp_group=None):
    b = read(model_output, data)
    if int(os.environ.get("RANK", "0")) == 0:
        str(b.pg.sum())
    return share(b.pg, b.mask, data), {}


@right
def a_scalar_of_shape_1(*, model_output, data, dp_group=None):
    b = read(model_output, data)
    return share(b.pg, b.mask, data).reshape(1), {}


@right
def flat_and_nested_only(*, model_output, data, dp_group=None):
    prompts, lengths = data["prompts"].offsets().diff(), data["responses"].offsets().diff()
    values, offsets = model_output["log_probs"].values(), model_output["log_probs"].offsets()
    pieces = [values[o + p - 1 : o + p - 1 + n] for o, p, n in zip(offsets[:-1], prompts, lengths, strict=True)]
    log_prob, mask = torch.cat(pieces), data["response_mask"].values() != 0
    losses = -data["advantages"].values() * (log_prob - data["old_log_probs"].values()).exp()
    return losses[mask].sum() * data["dp_size"] / data["batch_num_tokens"], {}


@right
def nothing_to_gain(*, model_output, data, dp_group=None):
    """Only regularises: no advantage is read."""
    b = read(model_output, data)
    return share(b.kl, b.mask, data) - 0.01 * share(b.entropy, b.mask, data), {}


@right
def masked_select(*, model_output, data, dp_group=None):
    b = read(model_output, data)
    return b.pg[b.mask > 0].sum() * data["dp_size"] / data["batch_num_tokens"], {}


@of_batch()
def rows_that_moved_far_are_out(b, data):
    moved = ((b.old - b.log_prob).detach() * b.mask).sum(1, keepdim=True) / b.mask.sum(1, keepdim=True).clamp(min=1)
    return share(b.pg * (moved.abs() < 0.2), b.mask, data)


@of_batch()
def clip_range_by_position(b, data):
    eps = 0.1 + 0.2 / (1 + torch.arange(b.mask.shape[1], dtype=b.pg.dtype))
    clipped = torch.minimum(torch.maximum(b.ratio, 1 - eps), 1 + eps)
    return share(torch.maximum(-b.adv * b.ratio, -b.adv * clipped), b.mask, data)


@of_batch()
def metrics_of_other_types(b, data):
    loss = share(b.pg, b.mask, data)
    lowest = float(torch.where(b.mask > 0, b.adv, 1e9).min())
    return loss, {"actor/a": np.float32(0.1), "actor/b": torch.tensor(0.1), "adv_min": Metric("min", lowest)}


@of_batch()
def nothing_times_a_local_mean(b, data):
    return share(b.pg, b.mask, data) + 0.0 * b.kl.mean()


@right
def a_field_changed_and_put_back(*, model_output, data, dp_group=None):
    kept = data["advantages"]
    data["advantages"] = kept * 1.0
    b = read(model_output, data)
    data["advantages"] = kept
    return share(b.pg, b.mask, data), {}


class KeepsALog:
    """Remembers what it returned, and reads it never."""

    def __init__(self):
        self.log = []

    def __call__(self, *, model_output, data, dp_group=None):
        b = read(model_output, data)
        loss = share(b.pg, b.mask, data)
        self.log.append(float(loss))
        return loss, {}


RIGHT["keeps_a_log"] = KeepsALog()


@of_batch()
def two_terms_with_shares_of_their_own(b, data):
    return share(b.pg, b.mask, data) + 0.05 * sequences(b.kl, b.mask, data)


@of_batch()
def a_billionth(b, data):
    return 1e-9 * share(b.pg, b.mask, data)


@of_batch()
def last_token_of_each_row(b, data):
    last = (b.mask.flip(1).cumsum(1).flip(1) == 1) * b.mask
    return share(b.pg * last, b.mask, data)


@of_batch()
def running_ratio_of_the_row(b, data):
    running = ((b.log_prob - b.old) * b.mask).cumsum(1).clamp(-2, 2).exp().detach()
    return share(-b.adv * running * b.log_prob, b.mask, data)


@of_batch()
def sequence_weight_without_a_bound(b, data):
    """Overflows on very long sequences, whatever the cut."""
    weight = ((b.log_prob - b.old) * b.mask).sum(1, keepdim=True).exp()
    return sequences(-weight * b.adv, b.mask, data)


@of_batch()
def ranks_of_the_process_group(b, data):
    return (b.pg * b.mask).sum() / data["batch_num_tokens"] * torch.distributed.get_world_size()


@of_batch()
def nothing_of_what_has_no_advantage(b, data):
    live = (b.mask > 0) & (b.adv != 0)
    if not bool(live.any()):
        return b.log_prob.sum() * 0
    return -(b.adv * b.ratio)[live].sum() / data["batch_num_tokens"] * data["dp_size"]


@of_batch()
def softmax_within_the_row(b, data):
    weight = b.entropy.detach().masked_fill(b.mask == 0, -1e9).softmax(1) * b.mask.sum(1, keepdim=True)
    return sequences(b.pg * weight, b.mask, data)


@of_batch()
def a_gate_per_sequence(b, data):
    moved = ((b.old - b.log_prob) * b.mask).sum(1, keepdim=True).detach()
    return sequences(b.pg * (moved.abs() < 1.0), b.mask, data)
