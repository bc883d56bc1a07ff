"""Losses of other frameworks, judged by the rules of these: the loops are written from their sources.

AReaL 1.0.4 ``FSDPEngine._compute_logprobs_and_loss``; NeMo-RL ``automodel_forward_backward``; slime and Miles
``loss_function`` with Megatron's schedule; transformers ``Trainer.training_step`` and TRL 1.16
``GRPOTrainer._compute_loss``; prime-rl ``compute_loss`` and what its trainer does with the gradients.
"""

import pickle
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from trinity_loss.errors import ConfigError
from trinity_loss.invariance import check_invariance, make_mini_batch
from trinity_loss.invariance.contracts import CONTRACTS, Played, contract_of
from trinity_loss.invariance.cuts import Cut
from trinity_loss.invariance.engine import run
from trinity_loss.losses_by_name import candidates

HERE = __name__


def ratio_loss(log_prob, old, advantages, mask):
    return torch.where(mask > 0, -advantages * (log_prob - old).exp(), 0.0)


# ----------------------------------------------------------------------------------------------------
# Losses as users of each framework write them


def areal(logprobs, entropy, input_data, reduce="mean"):
    mask = input_data["loss_mask"].bool()
    values = ratio_loss(logprobs, input_data["prox_logp"], input_data["advantages"], mask)
    if reduce == "sequences":
        bounds = input_data["cu_seqlens"].tolist()
        pieces = [(values[a:b].sum(), mask[a:b].sum().clamp(min=1)) for a, b in pairwise(bounds)]
        return torch.stack([total / count for total, count in pieces]).mean()
    return values.sum() / (mask.sum().clamp(min=1) if reduce == "mean" else 1)


areal_sum, areal_sequences = partial(areal, reduce="sum"), partial(areal, reduce="sequences")


def areal_with_limits(logprobs, entropy, input_data, vocab_min_logits, vocab_max_logits):
    assert vocab_min_logits.shape == vocab_max_logits.shape == logprobs.shape
    return areal(logprobs, entropy, input_data)


def weigh_sequences(input_data):
    return torch.tensor(len(input_data["cu_seqlens"]) - 1)


def weigh_pieces(input_data):
    return torch.tensor(1.0)


def nemo(next_token_logprobs, data, global_valid_seqs, global_valid_toks, local=False):
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    values = ratio_loss(next_token_logprobs, data["prev_logprobs"][:, 1:], data["advantages"][:, 1:], mask)
    loss = values.sum() / (mask.sum().clamp(min=1) if local else global_valid_toks)
    return loss, {"loss": loss.item(), "probs_ratio_max": float(values.detach().max())}


nemo_local = partial(nemo, local=True)


def nemo_sequences(next_token_logprobs, data, global_valid_seqs, global_valid_toks):
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    values = ratio_loss(next_token_logprobs, data["prev_logprobs"][:, 1:], data["advantages"][:, 1:], mask)
    return (values.sum(1) / mask.sum(1).clamp(min=1)).sum() / global_valid_seqs, {}


def slime(args, batch, logits, sum_of_sample_mean, rows=False):
    log_probs, end = [], 0
    for tokens, length in zip(batch["unconcat_tokens"], batch["response_lengths"], strict=True):
        end += len(tokens)
        piece = logits[0, end - length - 1 : end - 1].log_softmax(-1)
        log_probs.append(piece.gather(-1, tokens[len(tokens) - length :, None])[:, 0])
    old, advantages, mask = (torch.cat(batch[name]) for name in ("log_probs", "advantages", "loss_masks"))
    loss = sum_of_sample_mean(ratio_loss(torch.cat(log_probs), old, advantages, mask))
    return loss / (len(batch["response_lengths"]) if rows else 1), {"pg": loss.detach()}


slime_rows = partial(slime, rows=True)


def prime_rl(inputs, mean=False):
    values = ratio_loss(inputs.trainer_logprobs, inputs.inference_logprobs, inputs.advantages, inputs.loss_mask)
    total = inputs.loss_mask.sum().clamp(min=1)
    return SimpleNamespace(loss=values.sum() / (total if mean else 1), metrics={"size": values.sum() / total})


prime_rl_mean = partial(prime_rl, mean=True)
_SEEN = []


def prime_rl_adds_up(inputs):
    _SEEN.append(int(inputs.loss_mask.sum()))
    result = prime_rl(inputs)
    return SimpleNamespace(loss=result.loss / sum(_SEEN), metrics={})


def compute_loss_func(outputs, labels, num_items_in_batch, count=None):
    log_probs, labels = outputs.logits[:, :-1].log_softmax(-1), labels[:, 1:]
    picked = log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    mask = labels != -100
    return -(picked * mask).sum() / (num_items_in_batch if count is None else count(mask))


compute_local = partial(compute_loss_func, count=lambda mask: mask.sum().clamp(min=1))
compute_rows = partial(compute_loss_func, count=len)


def trinity(logprob, old_logprob, action_mask, advantages, **kwargs):
    assert action_mask.dtype == torch.bool
    loss = ratio_loss(logprob, old_logprob, advantages, action_mask).sum() / action_mask.sum().clamp(min=1)
    return loss, {"pg_loss": loss.item()}


# ----------------------------------------------------------------------------------------------------
# Their loops, over sequences as plain vectors


def sequences(batch, old):
    log_probs = batch.log_probs.clone().requires_grad_()
    bounds = list(pairwise(batch.starts))
    values = ratio_loss(log_probs, batch.token_fields[old], batch.token_fields["advantages"], batch.response_mask)
    pieces = [(values[a:b], batch.response_mask[a:b]) for a, b in bounds]
    return log_probs, pieces


def flat(rows, pieces):
    return torch.cat([pieces[i][0] for i in rows]), torch.cat([pieces[i][1] for i in rows])


def loop_areal(cut, pieces, reduce, weigh):
    weights = [[weigh(rows, pieces) for rows in rank] for rank in cut]
    total, ranks = sum(map(sum, weights)), len(cut)
    loss = 0.0
    for rank, of_rank in zip(cut, weights, strict=True):
        for rows, weight in zip(rank, of_rank, strict=True):
            if weight:
                loss = loss + reduce(rows, pieces) * (weight / total * ranks) / ranks
    return loss


def token_mean(rows, pieces):
    values, mask = flat(rows, pieces)
    return values.sum() / mask.sum().clamp(min=1)


def token_sum(rows, pieces):
    return flat(rows, pieces)[0].sum()


def sample_means(rows, pieces):
    return sum(pieces[i][0].sum() / pieces[i][1].sum().clamp(min=1) for i in rows)


def valid(rows, pieces):
    return int(flat(rows, pieces)[1].sum())


def loop_nemo(cut, pieces, divisor):
    ranks = len(cut)
    return sum(token_sum(rows, pieces) / divisor(rows, pieces) * ranks for rank in cut for rows in rank) / ranks


def loop_slime(cut, pieces, scale=lambda rows: 1.0):
    ranks, samples = len(cut), sum(len(rows) for rank in cut for rows in rank)
    loss = 0.0
    for rank in cut:
        for rows in rank:  # loss_function, then Megatron's schedule, then its mean over data-parallel ranks.
            scaled = sample_means(rows, pieces) * scale(rows) * len(rank) / samples * ranks
            loss = loss + scaled / len(rank) / ranks
    return loss


def loop_slime_per_token(cut, pieces):
    counts = [max(int(pieces[i][1].sum()), 1) for rank in cut for rows in rank for i in rows]
    return sum(token_sum(rows, pieces) for rank in cut for rows in rank) / sum(counts)


def loop_prime_rl(cut, pieces, reduce):
    tokens = sum(valid(rows, pieces) for rank in cut for rows in rank)
    return sum(reduce([i], pieces) for rank in cut for rows in rank for i in rows) / tokens


def everything(pieces):
    return valid(range(len(pieces)), pieces)


LOOPS = {
    "areal": (
        "areal",
        areal,
        None,
        "old_log_probs",
        lambda cut, pieces: loop_areal(cut, pieces, token_mean, valid),
    ),
    "areal, a sum": (
        "areal",
        areal_sum,
        None,
        "old_log_probs",
        lambda cut, pieces: loop_areal(cut, pieces, token_sum, valid),
    ),
    "areal, weights": (
        "areal",
        areal_sequences,
        weigh_sequences,
        "old_log_probs",
        lambda cut, pieces: loop_areal(
            cut, pieces, lambda rows, p: sample_means(rows, p) / len(rows), lambda rows, _: len(rows)
        ),
    ),
    "nemo-rl": (
        "nemo-rl",
        nemo,
        None,
        "old_log_probs",
        lambda cut, pieces: loop_nemo(cut, pieces, lambda rows, p: everything(p)),
    ),
    "nemo-rl, local": (
        "nemo-rl",
        nemo_local,
        None,
        "old_log_probs",
        lambda cut, pieces: loop_nemo(cut, pieces, lambda rows, p: max(valid(rows, p), 1)),
    ),
    "slime": ("slime", slime, None, "old_log_probs", loop_slime),
    "slime, rows": (
        "slime",
        slime_rows,
        None,
        "old_log_probs",
        lambda cut, pieces: loop_slime(cut, pieces, lambda rows: 1 / len(rows)),
    ),
    "slime per token": ("slime-per-token", slime, None, "old_log_probs", loop_slime_per_token),
    "prime-rl": (
        "prime-rl",
        prime_rl,
        None,
        "rollout_log_probs",
        lambda cut, pieces: loop_prime_rl(cut, pieces, token_sum),
    ),
    "prime-rl, means": (
        "prime-rl",
        prime_rl_mean,
        None,
        "rollout_log_probs",
        lambda cut, pieces: loop_prime_rl(cut, pieces, sample_means),
    ),
    "trinity": (
        "trinity",
        trinity,
        None,
        "old_log_probs",
        lambda cut, pieces: sum(token_mean(rows, pieces) for rank in cut for rows in rank) / len(cut),
    ),
}
RAGGED = (((0, 3, 5, 9), (2,), (1, 7)), ((4,), (6, 8, 10), (11,)))


@pytest.mark.parametrize("name", LOOPS)
def test_the_gradient_is_that_of_the_framework_s_own_loop(name):
    contract, loss, weigh, old, loop = LOOPS[name]
    batch, chosen = make_mini_batch(12, masked=3), CONTRACTS[contract]
    log_probs, pieces = sequences(batch, old)
    loop(RAGGED, pieces).backward()
    played = run(Played(chosen, loss, weigh), batch, Cut("even", RAGGED, chosen.layouts[0]), worker=False)
    torch.testing.assert_close(played.log_prob_gradient, log_probs.grad, rtol=1e-10, atol=1e-14)
    assert bool(log_probs.grad.any())


def test_nemo_adds_metrics_up_and_knows_extremes_by_name():
    batch = make_mini_batch(12)
    played = run(Played(CONTRACTS["nemo-rl"], nemo), batch, Cut("even", RAGGED, "nested"), worker=False)
    pieces = sequences(batch, "old_log_probs")[1]
    assert played.metrics["loss"] == pytest.approx(float(token_mean(range(12), pieces)), rel=1e-12)
    assert played.metrics["probs_ratio_max"] == pytest.approx(float(max(values.detach().max() for values, _ in pieces)))


@pytest.mark.parametrize(
    ("contract", "loss", "weigh", "cause", "change"),
    [
        ("areal", "areal", None, None, None),
        ("areal", "areal_with_limits", None, None, None),
        ("areal", "areal_sum", None, "local count as a factor", "return a mean over what loss_weight_fn counts"),
        ("areal", "areal_sequences", None, "mean and share count different things", "let loss_weight_fn count"),
        ("areal", "areal_sequences", "weigh_sequences", None, None),
        ("areal", "areal", "weigh_pieces", "local mean", "let loss_weight_fn count"),
        ("nemo-rl", "nemo", None, None, None),
        ("nemo-rl", "nemo_sequences", None, None, None),
        ("nemo-rl", "nemo_local", None, "local mean", "divide by global_valid_toks"),
        ("slime", "slime", None, None, None),
        ("miles", "slime", None, None, None),
        ("slime-per-token", "slime", None, None, None),
        ("slime", "slime_rows", None, "local mean", "return sum_of_sample_mean(values)"),
        ("prime-rl", "prime_rl", None, None, None),
        ("prime-rl", "prime_rl_mean", None, None, None),
        ("prime-rl", "prime_rl_adds_up", None, "state between calls", "keep nothing between calls"),
        ("trl", "compute_loss_func", None, None, None),
        ("trl", "compute_local", None, "local mean", "num_items_in_batch"),
        ("trl", "compute_rows", None, "number of micro-batches", "current_gradient_accumulation_steps"),
        ("trinity", "trinity", None, "local mean", "trinity_loss.trinity_rft"),
    ],
)
def test_a_loss_is_judged_by_the_rules_it_was_written_for(contract, loss, weigh, cause, change):
    weight_fn = f"{HERE}:{weigh}" if weigh else None
    (make,) = candidates(f"{HERE}:{loss}", None, contract, weight_fn)
    bound = make()
    report = check_invariance(bound, micro_batches=(1, 3), dp_sizes=(1, 2), dtype=getattr(torch, bound.contract.dtype))
    counting = [finding.name for finding in report.findings if finding.counts]
    assert (counting[:1] or [None]) == [cause], str(report)
    assert report.ok is (cause is None)
    assert (report.change or "").find(change or "") >= 0
    assert (report.change is None) is (change is None)
    assert report.to_dict()["contract"] == contract


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((f"{HERE}:areal", None, "no-such"), "expected one of verl, trinity, areal"),
        (("verl:gspo", None, "areal"), "is not written for --contract areal"),
        ((f"{HERE}:nemo", None, "nemo-rl", f"{HERE}:weigh_pieces"), "--weight-fn is AReaL's"),
        ((f"{HERE}:HERE", None, "areal"), "expected a callable"),
        ((f"{HERE}:areal", None, "trl"), "takes a subclass of GRPOTrainer, or a function of"),
    ],
)
def test_what_is_refused(arguments, says):
    with pytest.raises(ConfigError, match=says):
        [make() for make in candidates(*arguments)]


def test_every_contract_says_how_it_calls_and_adds():
    for contract in CONTRACTS.values():
        assert contract.takes
        assert contract.adds
        assert contract_of(contract.name) is contract


@pytest.mark.parametrize("name", CONTRACTS)
def test_a_contract_goes_from_process_to_process(name):
    """``--loss ours:all`` judges in two."""
    assert pickle.loads(pickle.dumps(CONTRACTS[name])) is CONTRACTS[name]
