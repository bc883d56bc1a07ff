"""The check finds each usual fault and names it, and lets right losses pass."""

import re
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from oracle import MODES
from ours import in_mode
from verl.workers.utils.padding import no_padding_2_padding

from trinity_loss import EnginePolicyLoss, LossConfig
from trinity_loss.errors import ConfigError, FieldShapeError, MissingFieldError, TotalsError
from trinity_loss.invariance import (
    CAUSES,
    ContractError,
    MiniBatch,
    assert_invariant,
    check_invariance,
    load_mini_batch,
    make_mini_batch,
)
from trinity_loss.invariance.cuts import Cut, all_cuts, dynamic, even, uneven, whole
from trinity_loss.invariance.engine import reduce_metrics, run
from trinity_loss.invariance.figure import draw
from trinity_loss.invariance.layouts import build
from trinity_loss.invariance.rows import Deviation

quick = partial(check_invariance, batch=make_mini_batch(14), micro_batches=(1, 3), dp_sizes=(1, 2))


# ----------------------------------------------------------------------------------------------------
# Losses of a user: the same clipped policy gradient, entropy and KL, put together in different ways


class UserLoss:
    """A loss as people write it for verl: padded tensors, and a function that makes a number of each term.

    ``mean(values, mask, data)`` is the right one unless a test plants a fault; ``only`` plants it in one term.
    """

    def __init__(self, mean, *, only=None, metrics=None, select=True, terms=("pg", "entropy", "kl")):
        self.mean, self.only, self.emit, self.select, self.terms = mean, only, metrics, select, terms

    def __call__(self, *, model_output, data, dp_group):
        from verl.workers.utils.padding import no_padding_2_padding

        log_prob = no_padding_2_padding(model_output["log_probs"], data)
        entropy = no_padding_2_padding(model_output["entropy"], data)
        fields = data.select("response_mask", "old_log_probs", "advantages", "ref_log_prob").to_padded_tensor()
        mask = fields["response_mask"].to(log_prob.dtype)

        def chosen(values):
            return torch.where(mask > 0, values, 0.0) if self.select else values

        ratio = chosen(log_prob - fields["old_log_probs"]).exp()
        advantages = chosen(fields["advantages"])
        difference = chosen(fields["ref_log_prob"] - log_prob)
        values = {
            "pg": torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)),
            "entropy": -0.01 * chosen(entropy),
            "kl": 0.05 * (difference.exp() - 1 - difference),
        }
        loss = sum(
            (self.mean if self.only in (None, name) else token_mean)(values[name], mask, data) for name in self.terms
        )
        return loss, self.emit(values, mask) if self.emit else {}


def token_mean(values, mask, data):
    return (values * mask).sum() * data["dp_size"] / data["batch_num_tokens"]


def sequence_mean(values, mask, data):
    per_sequence = (values * mask).sum(1) / mask.sum(1).clamp(min=1)
    return per_sequence.sum() * data["dp_size"] / data["global_batch_size"]


def local_token_mean(values, mask, data):
    return (values * mask).sum() / mask.sum().clamp(min=1)


def local_sequence_mean(values, mask, data):
    return ((values * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()


def without_dp_size(values, mask, data):
    return (values * mask).sum() / data["batch_num_tokens"]


def dp_size_twice(values, mask, data):
    return (values * mask).sum() * data["dp_size"] ** 2 / data["batch_num_tokens"]


def over_the_width(values, mask, data):
    return (values * mask).sum() / mask.shape[1] * data["dp_size"] / data["global_batch_size"]


def largest_half(values, mask, data):
    """Keeps the tokens above the micro-batch's own median."""
    bound = values.detach()[mask > 0].median() if bool(mask.any()) else 0.0
    return token_mean(values * (values.detach() >= bound), mask, data)


def whitened(values, mask, data):
    """Subtracts the micro-batch's own mean from every token's weight."""
    centre = (values * mask).sum().detach() / mask.sum().clamp(min=1)
    return token_mean(values * (1 + centre), mask, data) + 0.1 * token_mean(values * values.detach(), mask, data)


def row_share_of_valid_mean(values, mask, data):
    """A mean over the rows that have a token, weighted by the share of all rows."""
    per_sequence = (values * mask).sum(1) / mask.sum(1).clamp(min=1)
    valid = (mask.sum(1) > 0).sum().clamp(min=1)
    return per_sequence.sum() / valid * len(mask) / data["global_batch_size"] * data["dp_size"]


def row_share_of_token_mean(values, mask, data):
    """A mean over tokens, weighted by the share of rows."""
    return local_token_mean(values, mask, data) * len(mask) / data["global_batch_size"] * data["dp_size"]


def times_micro_batches(values, mask, data):
    return token_mean(values, mask, data) * (data["num_micro_batch"] if "num_micro_batch" in data.keys() else 1)  # noqa: SIM118


def by_place(values, mask, data):
    """Weighs the first sequence of a micro-batch as half."""
    weight = torch.ones(len(mask), 1, dtype=values.dtype)
    weight[0] = 0.5
    return token_mean(values * weight, mask, data)


def zero_over_zero(values, mask, data):
    return token_mean(values, mask, data) * (mask.sum() / mask.sum())


FAULTS = {
    local_token_mean: "local mean",
    local_sequence_mean: "local mean",
    without_dp_size: "missing dp_size",
    dp_size_twice: "missing dp_size",
    over_the_width: "padded width as the norm",
    largest_half: "selection inside the micro-batch",
    row_share_of_valid_mean: "rows counted in one place and not in the other",
    row_share_of_token_mean: "mean and share count different things",
    times_micro_batches: "number of micro-batches",
    zero_over_zero: "empty micro-batch",
}


@pytest.mark.parametrize("mean", [token_mean, sequence_mean])
def test_right_losses_pass(mean):
    report = quick(UserLoss(mean))
    assert report.ok
    assert report.findings == ()
    assert report.max_relative_error < 1e-12
    assert {row.cut.layout for row in report.rows} == {"nested", "padded"}
    assert set(report.rows[0].gradients) == {"gradient", "pg", "kl", "entropy"}
    assert report.accuracy < 1e-5


@pytest.mark.parametrize("mean", FAULTS, ids=lambda mean: mean.__name__)
def test_each_fault_is_named(mean):
    report = quick(UserLoss(mean))
    assert not report.ok
    assert [finding.name for finding in report.findings] == [FAULTS[mean]]
    assert report.sentence in str(report)


@pytest.mark.parametrize("term", ["pg", "entropy", "kl"])
@pytest.mark.parametrize("mean", [local_token_mean, without_dp_size, over_the_width], ids=lambda m: m.__name__)
def test_a_fault_in_one_term_is_told_from_the_others(mean, term):
    """The entropy is a hundredth of the policy gradient, which hides it in the sum."""
    report = quick(UserLoss(mean, only=term))
    assert [finding.name for finding in report.findings] == [FAULTS[mean]]
    assert {"pg": "policy gradient", "entropy": "entropy", "kl": "KL"}[term] in report.sentence
    off = {name for row in report.rows for name, d in row.gradients.items() if d.worst > 1e-6}
    assert off == {"gradient", term}


@pytest.mark.parametrize(("dtype", "epsilon"), [(torch.float64, 1e-9), (torch.float32, 1e-6)])
def test_rounding_and_little_more_are_told_apart(dtype, epsilon):
    """Three ranks round, no cell more than that; a factor of 1 + epsilon on the pieces is in every cell."""
    loss_fn, batch = EnginePolicyLoss(LossConfig()), make_mini_batch(14)

    def off(*, model_output, data, dp_group):
        loss, metrics = loss_fn(model_output=model_output, data=data, dp_group=dp_group)
        return loss * (1 if len(data) == batch.num_sequences else 1 + epsilon), metrics

    options = {"batch": batch, "micro_batches": (1, 3), "dp_sizes": (1, 3), "layouts": ("nested",), "dtype": dtype}
    right, wrong = check_invariance(loss_fn, **options), check_invariance(off, tolerance=epsilon / 2, **options)
    error = max(d.error for row in right.rows for d in row.gradients.values())
    assert 0 < error < torch.finfo(dtype).eps
    assert right.ok
    assert not wrong.ok
    pieces = [row for row in wrong.rows if row.cut.micro_batches * len(row.cut.ranks) > 1]
    assert all(row.gradients["gradient"].error == pytest.approx(epsilon, rel=0.2) for row in pieces)


def test_a_loss_that_raises_where_it_is_looked_into():
    """One that refuses a micro-batch that holds more than the totals say; that is no reason to say nothing."""
    loss_fn = EnginePolicyLoss(LossConfig())

    def off(*, model_output, data, dp_group):
        if len(data) > data["global_batch_size"]:
            raise TotalsError("more rows than there are")
        loss, metrics = loss_fn(model_output=model_output, data=data, dp_group=dp_group)
        return loss * (1 if len(data) == 14 else 1.0001), metrics

    report = quick(off)
    assert [finding.name for finding in report.findings] == ["unexplained"]
    assert "TotalsError" in report.sentence


def test_two_faults_are_both_named():
    def both(values, mask, data):
        return over_the_width(values, mask, data) / data["dp_size"]

    names = {finding.name for finding in quick(UserLoss(both)).findings}
    assert names == {"padded width as the norm", "missing dp_size"}


def test_weights_from_the_micro_batch_are_a_selection():
    names = [finding.name for finding in quick(UserLoss(whitened)).findings]
    assert names
    assert names[0] == "selection inside the micro-batch"


def test_a_place_in_the_micro_batch():
    report = quick(UserLoss(by_place))
    assert not report.ok


def test_the_sentence_says_how_much_and_why():
    loss = UserLoss(local_sequence_mean, terms=("pg",))
    sentence = quick(loss).sentence
    assert re.fullmatch(
        r"gradient is \d\.\d+ times too large at 3 micro-batches, nested layout: "
        "the loss averages over its own micro-batch's sequences",
        sentence,
    )
    assert "2 times too small at 1 micro-batch, 2 ranks, nested layout" in quick(UserLoss(without_dp_size)).sentence


def test_a_loss_for_padded_rows_alone_is_looked_into():
    def loss(*, model_output, data, dp_group=None):
        log_probs, mask = no_padding_2_padding(model_output["log_probs"], data), data["response_mask"]
        ratio = (log_probs - data["old_log_probs"]).exp()
        return -(ratio * data["advantages"])[mask.bool()].sum() / data["batch_num_tokens"], {}

    sentence = quick(loss).sentence
    assert "padded layout" in sentence
    assert "not multiplied by dp_size" in sentence


def test_masked_values_are_reported_and_count_if_strict():
    loss = UserLoss(token_mean, select=False)
    lenient, strict = quick(loss), quick(loss, strict=True)
    for report in (lenient, strict):
        assert [finding.name for finding in report.findings] == ["masked NaN"]
        assert "old_log_probs" in report.findings[0].text
    assert lenient.ok
    assert not strict.ok


def test_metrics_are_reported_and_count_if_strict():
    """Plain floats are averaged by verl without weights."""

    def mean_kl(values, mask):
        return {"actor/kl": ((values["kl"] * mask).sum() / mask.sum().clamp(min=1)).item(), "actor/constant": 3.0}

    loss = UserLoss(token_mean, metrics=mean_kl)
    lenient, strict = quick(loss), quick(loss, strict=True)
    assert lenient.ok
    assert not strict.ok
    assert [finding.name for finding in lenient.findings] == ["metric depends on the cut"]
    assert lenient.findings[0].text.startswith("actor/kl reads ")
    assert "constant" not in lenient.findings[0].text
    assert lenient.rows[0].metrics["actor/constant"].error == 0


def test_a_reported_loss_that_is_not_the_gradients():
    def reported(values, mask, data):
        wrong = local_token_mean(values, mask, data).detach()
        right = token_mean(values, mask, data)
        return right - right.detach() + wrong

    report = quick(UserLoss(reported))
    assert [finding.name for finding in report.findings] == ["reported loss"]
    assert not report.ok


def test_errors_and_missing_graphs_on_some_cuts():
    def refuses(values, mask, data):
        if len(mask) < 10:
            raise ValueError("too few rows")
        return token_mean(values, mask, data)

    def constant_if_empty(values, mask, data):
        return token_mean(values, mask, data) if bool(mask.any()) else values.new_zeros(())

    report = quick(UserLoss(refuses))
    assert not report.ok
    assert any("too few rows" in (row.failure or "") for row in report.rows)
    report = quick(UserLoss(constant_if_empty))
    assert [finding.name for finding in report.findings] == ["empty micro-batch"]
    assert "without a graph" in report.sentence


def test_what_is_no_loss_is_refused():
    with pytest.raises(ContractError, match="expects \\(loss, metrics\\)"):
        quick(lambda *, model_output, data, dp_group: model_output["log_probs"].values().sum())
    with pytest.raises(KeyError, match="missing"):
        quick(lambda *, model_output, data, dp_group: (data["missing"], {}))
    with pytest.raises(ConfigError, match="micro_batches"):
        check_invariance(UserLoss(token_mean), micro_batches=(0,))


def test_every_cause_is_documented():
    assert set(FAULTS.values()) <= set(CAUSES)
    page = (Path(__file__).parent.parent / "docs" / "verify.md").read_text()
    named = {name for line in page.splitlines() if line.startswith("### ") for name in line[4:].split(", ")}
    assert named >= set(CAUSES)


# ----------------------------------------------------------------------------------------------------
# Our losses


@pytest.mark.parametrize("mode", MODES)
def test_ours_pass_with_every_metric(mode):
    """All twelve numbers of pieces, three layouts, both engines; strict without asking."""
    settings = in_mode(mode, entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.05)
    pieces = {} if mode in ("token-mean", "prompt-mean") else {"micro_batches": (1, 3), "dp_sizes": (1, 2)}
    report = assert_invariant(EnginePolicyLoss(LossConfig(**settings)), **pieces)
    assert report.strict
    assert report.findings == ()
    assert {row.cut.layout for row in report.rows} == {"nested", "padded", "packed"}
    assert {row.cut.engine for row in report.rows} == {"fsdp", "megatron", "megatron per token"}
    pieces = {(row.cut.micro_batches, len(row.cut.ranks)) for row in report.rows if row.cut.kind == "even"}
    assert len(pieces) == (11 if mode in ("token-mean", "prompt-mean") else 3)
    assert "actor/pg_clipfrac" in report.rows[0].metrics
    assert report.max_relative_error < 1e-10


def test_assert_invariant_raises_with_the_table():
    with pytest.raises(AssertionError, match="local mean") as caught:
        assert_invariant(UserLoss(local_token_mean), micro_batches=(1, 2), dp_sizes=(1,))
    assert "gradient ×" in str(caught.value)


# ----------------------------------------------------------------------------------------------------
# The instrument


def test_mini_batch_is_ragged_with_holes_and_masked_sequences():
    batch = make_mini_batch(36, seed=3)
    lengths = batch.response_lengths.tolist()
    assert (min(lengths), max(lengths)) == (1, 24)
    assert batch.valid_counts.count(0) == 2
    holes = [n - v for n, v in zip(lengths, batch.valid_counts, strict=True) if v]
    assert sum(holes) > 10
    ratio = (batch.log_probs - batch.token_fields["old_log_probs"]).exp()
    assert float(ratio.min()) < 0.8
    assert float(ratio.max()) > 3.0
    # No prompt group without a token: whether such a group counts is a choice that the totals here do not make.
    assert int(batch.prompt_num_tokens.min()) > 0


def test_cuts_deal_every_sequence_once():
    batch = make_mini_batch(20)
    cuts = [*all_cuts(batch, (1, 2, 4), (1, 2), 0, ("nested", "padded"), (60,), [])]
    for cut in cuts:
        assert sorted(i for rank in cut.ranks for rows in rank for i in rows) == list(range(20)), cut.label
        assert len({len(rank) for rank in cut.ranks}) == 1
    assert {cut.kind for cut in cuts} == {"even", "uneven", "dynamic", "budget", "order", "layout", "width", "engine"}
    last = uneven(batch, 4, 1, 0)[0][-1]
    assert [batch.valid_counts[i] for i in last] == [0]
    for rows in dynamic(batch, 1, 0, max_tokens=60)[0]:
        assert sum(int(batch.prompt_lengths[i] + batch.response_lengths[i]) for i in rows) <= 60


def test_padded_layout_is_what_verl_makes():
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    batch, rows = make_mini_batch(12), (4, 0, 7)
    ours = build(batch, rows, "padded", 30).data
    attention = ours["attention_mask"]
    theirs = left_right_2_no_padding(
        TensorDict(
            {
                "input_ids": attention.clone(),
                "attention_mask": attention,
                "response_mask": ours["response_mask"],
                "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            },
            batch_size=[3],
        )
    )
    for name in ("input_ids", "position_ids"):
        assert torch.equal(ours[name].values(), theirs[name].values())
        assert torch.equal(ours[name].offsets(), theirs[name].offsets().long())
    for name in ("max_seq_len", "max_response_len", "indices"):
        assert torch.equal(torch.as_tensor(tu.get(ours, name)), torch.as_tensor(tu.get(theirs, name)))
    assert torch.equal(ours["loss_mask"], theirs["loss_mask"])


@pytest.mark.parametrize("layout", ["nested", "padded"])
def test_token_ids_stand_where_a_model_reads_them(layout):
    """Every token has an id of its own; a model reads them packed, a trainer's reward function row by row."""
    batch = make_mini_batch(8)
    sizes = (batch.prompt_lengths + batch.response_lengths).tolist()
    batch = replace(batch, input_ids=torch.arange(1, sum(sizes) + 1))
    rows = (5, 0, 5)
    data = build(batch, rows, layout).data
    starts = [0, *accumulate(sizes)]
    assert [ids.tolist() for ids in data["input_ids"].unbind()] == [
        list(range(starts[i] + 1, starts[i + 1] + 1)) for i in rows
    ]
    assert [p.tolist() for p in data["position_ids"].unbind()] == [list(range(sizes[i])) for i in rows]
    for name, first, count in (("prompts", 0, batch.prompt_lengths), ("responses", None, batch.response_lengths)):
        for i, ids in zip(rows, data[name].unbind(), strict=True):
            begin = starts[i] + 1 + (first if first is not None else int(batch.prompt_lengths[i]))
            assert [x for x in ids.tolist() if x] == list(range(begin, begin + int(count[i])))
    with pytest.raises(FieldShapeError, match="input_ids"):
        replace(batch, input_ids=torch.ones(3))


def test_metrics_are_reduced_as_verl_reduces_them():
    from verl.utils.metric import Metric

    def emitted(rank, micro):
        number = float(10 * rank + micro)
        return {
            "sum": Metric("sum", number),
            "mean": Metric("mean", number),
            "top": Metric("max", number),
            "admin_x": number,
            "dominance_max": number,
            "plain": number,
        }

    reduced, _ = reduce_metrics([[emitted(rank, micro) for micro in range(3)] for rank in range(2)])
    assert reduced == {"sum": 18.0, "mean": 6.0, "top": 12.0, "admin_x": 0.0, "dominance_max": 12.0, "plain": 6.0}
    with pytest.raises(ContractError, match="different names"):
        reduce_metrics([[{"a": 1.0}], [{"b": 1.0}]])


def test_engines_put_the_pieces_together():
    """A loss that keeps the contract gives the same gradient; one that ignores dp_size shows which axis it is."""
    batch = make_mini_batch(12)
    loss = UserLoss(token_mean)
    reference = run(loss, batch, whole(batch))
    for engine in ("fsdp", "megatron", "megatron per token"):
        got = run(loss, batch, Cut("even", even(batch, 2, 2), engine=engine))
        assert torch.allclose(got.log_prob_gradient, reference.log_prob_gradient, rtol=1e-12)
        assert got.loss == pytest.approx(reference.loss)


def test_deviation_measures_size_and_bias():
    reference = torch.tensor([1.0, -1.0, 2.0, 0.0])
    off = Deviation.between(torch.tensor([2.0, -1.0, 2.0, 0.0]), reference)
    assert (off.largest, off.mean) == (0.5, 0.25)
    assert off.error == pytest.approx(6**-0.5)
    assert Deviation.between(reference, reference) == Deviation(1.0, 0.0, 0.0, 0.0)
    assert Deviation.between(reference * torch.nan, reference).worst == float("inf")
    assert Deviation.between(reference, reference * 0).worst == 1
    assert Deviation.between(reference * 1e-14, reference * 0, nothing=1e-12).worst == 0


def test_recorded_mini_batch_with_wrong_totals(tmp_path):
    batch = make_mini_batch(12)
    recorded = MiniBatch.from_dict(
        batch.to_dict() | {"totals": {"batch_num_tokens": 7, "dp_size": 1}, "cut": [[[0, 1, 2, 3], [*range(4, 12)]]]}
    )
    path = tmp_path / "batch.pt"
    torch.save(recorded.to_dict(), path)
    report = quick(UserLoss(token_mean), batch=load_mini_batch(str(path)))
    assert [finding.name for finding in report.findings] == ["totals that do not describe this mini-batch"]
    assert "batch_num_tokens is 7" in report.sentence
    assert any(row.cut.kind == "recorded" for row in report.rows)
    assert not report.ok


def test_mini_batches_that_contradict_themselves():
    plain = make_mini_batch(8).to_dict()
    with pytest.raises(FieldShapeError, match="log_probs"):
        MiniBatch.from_dict(plain | {"log_probs": torch.zeros(3)})
    with pytest.raises(FieldShapeError, match="cut"):
        MiniBatch.from_dict(plain | {"cut": [[[0, 1]]]})
    with pytest.raises(MissingFieldError, match="response_mask"):
        MiniBatch.from_dict({k: v for k, v in plain.items() if k != "response_mask"})
    with pytest.raises(MissingFieldError, match="misspelled"):
        MiniBatch.from_dict(plain | {"misspelled": 1})


def test_report_as_numbers_and_as_a_figure(tmp_path):
    import json

    report = quick(UserLoss(zero_over_zero))
    plain = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert plain["ok"] is False
    assert len(plain["rows"]) == len(report.rows)
    assert plain["max_relative_error"] == "inf"
    draw([report], str(tmp_path / "figure.png"))
    assert (tmp_path / "figure.png").stat().st_size > 5000
    assert report.curve(1)[3] == pytest.approx(1.0)


def test_a_small_recorded_batch_leaves_cuts_out():
    report = check_invariance(UserLoss(token_mean), make_mini_batch(5), token_budgets=(10, 40, 10**6))
    assert report.ok
    assert max(row.cut.micro_batches * len(row.cut.ranks) for row in report.rows) <= 5
    assert {label for label, _ in report.skipped} >= {"token budget 10", "token budget 1000000"}
