"""Counts of the mini-batch: one declaration goes through worker, loss and instrument."""

import multiprocessing
import time
from dataclasses import dataclass, replace

import pytest
import torch
from batches import build, cut, make_sequences, run, sequence
from forms import NO_TOTALS, Form, group_tokens, totals_of
from oracle import AGGREGATIONS, COUNTS, GROUPS, MODES, OF_VERL
from ours import in_mode
from tensordict import NonTensorData, NonTensorStack, TensorDict

from trinity_loss import LossConfig, aggregate_loss
from trinity_loss.aggregation import PromptMean, Ratio, SeqMeanTokenSum
from trinity_loss.errors import BatchError, ConfigError, FieldShapeError, TotalsError
from trinity_loss.invariance import check_invariance
from trinity_loss.invariance.minibatch import MiniBatch
from trinity_loss.loss import EnginePolicyLoss, TrinityPolicyLoss
from trinity_loss.totals import Count, GroupCount, Totals, count_names, find_count, read_totals, register_count
from trinity_loss.verl.counting import Counting
from trinity_loss.verl.selecting import attach_selection
from trinity_loss.verl.steps import Steps

LONG = Count("tests_num_long_sequences", "worker", lambda rows: (rows.tokens.counts > 2).sum())
SESSIONS = GroupCount("tests_num_sessions", "session_num_tokens", "session_ids", lambda rows: rows.required("session"))
for count in (LONG, SESSIONS):
    register_count(count)
OF_TESTS = (LONG.name, SESSIONS.name)


@dataclass(frozen=True)
class LongMean(SeqMeanTokenSum):
    """The sum over all tokens, divided by the number of sequences of more than two tokens."""

    @property
    def total(self):
        return LONG.name

    def local_count(self, tokens):
        return (tokens.counts > 2).sum()


@dataclass(frozen=True)
class SessionMean(PromptMean):
    """Mean over the tokens of a session, mean over sessions."""

    @property
    def total(self):
        return SESSIONS.name


def rows(*lengths, **fields):
    """Padded rows of so many counted tokens, as a trainer sends them to a worker."""
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return TensorDict({"response_mask": mask, **fields}, batch_size=[len(lengths)])


def counted(data, config, **kwargs):
    Counting().attach(data, config, None, **kwargs)
    return data


LONG_MEAN = LossConfig(loss_agg_mode=f"{__name__}:{LongMean.__name__}")


def test_a_count_of_ones_own_reaches_worker_loss_and_instrument():
    data = counted(rows(3, 1, 4), LONG_MEAN)
    assert read_totals(data).get(LONG.name) == 2

    loss = EnginePolicyLoss(LONG_MEAN)
    fields = dict.fromkeys(("old_log_probs", "advantages"), torch.ones(3, 4))
    log_probs = torch.ones(3, 4, requires_grad=True)
    values = [
        loss(
            model_output={"log_probs": log_probs[i : i + 1]},
            data={"response_mask": data["response_mask"][i : i + 1], "dp_size": 1, LONG.name: 2}
            | {name: value[i : i + 1] for name, value in fields.items()},
        )[0].item()
        for i in range(3)
    ]
    assert sum(values) == -4  # eight tokens of advantage 1 over two long sequences

    assert check_invariance(loss).ok


def test_a_count_is_taken_before_the_loss_rejects():
    """Two sequences of three tokens, one of which the loss rejects: five losses of -1 over two long sequences."""
    samples = (
        sequence(3, old_log_probs=[-1.0, -1.0, -4.0], advantages=1.0),
        sequence(3, advantages=1.0),
    )
    arguments = {"rollout_rs": "token_k2", "rollout_rs_threshold": "1"}
    config = replace(LONG_MEAN, loss_mode="bypass_mode", loss_args=arguments)
    for loss, totals in ((TrinityPolicyLoss(config), NO_TOTALS), (EnginePolicyLoss(config), ((LONG.name, 2),))):
        assert run(loss, cut(samples), "nested", totals=totals).loss == pytest.approx(-5 / 2, rel=1e-12)
    pieces = run(EnginePolicyLoss(config), cut(samples, 2), "nested", totals=((LONG.name, 2),))
    assert pieces.loss == pieces.metrics["actor/pg_loss"] == pytest.approx(-5 / 2, rel=1e-12)


def test_nothing_is_counted_though_there_are_tokens():
    """A mean over no long sequence is 0, alone as with the mini-batch's count."""
    samples = (sequence(2, advantages=1.0), sequence(1, advantages=1.0))
    for loss, totals in ((TrinityPolicyLoss, NO_TOTALS), (EnginePolicyLoss, ((LONG.name, 0),))):
        got = run(loss(LONG_MEAN), cut(samples), "nested", totals=totals)
        assert got.loss == got.metrics["actor/pg_loss"] == 0
        assert not got.log_prob_grad.any()
    assert Ratio(torch.ones(()), torch.zeros(())).value() == 0


def test_a_count_of_ones_own_is_expected_by_the_instrument():
    ones = torch.ones(4)
    batch = MiniBatch(torch.tensor([1, 1]), torch.tensor([3, 1]), ones, -ones)
    assert batch.counted_totals[LONG.name] == 1


@pytest.mark.parametrize("name", ["batch_num_tokens", "dp_size"])
def test_a_name_that_is_taken_is_refused(name):
    with pytest.raises(ConfigError, match=f"'{name}' exists already"):
        register_count(Count(name, "worker", lambda rows: rows.tokens.num_tokens))


def test_an_unknown_total_is_refused():
    with pytest.raises(ConfigError, match=r"total is 'batch_num_words'; expected one of batch_num_tokens, "):
        find_count("batch_num_words")


def test_ids_of_ones_own_groups_reach_the_mode_alone():
    """Sessions 7, 5 and 7 with losses 1 and 3, 5, and 4: (8/3 + 5) / 2."""
    losses, mask = torch.tensor([[1.0, 3.0], [5.0, 0.0], [4.0, 0.0]]), torch.tensor([[1, 1], [1, 0], [1, 0]])
    ids = torch.tensor([7, 5, 7])
    mode = f"{__name__}:{SessionMean.__name__}"
    assert aggregate_loss(losses, mask, mode, session_ids=ids).value().item() == pytest.approx((8 / 3 + 5) / 2)
    with pytest.raises(ConfigError, match="session_ids, which loss_agg_mode 'prompt-mean' does not take"):
        aggregate_loss(losses, mask, "prompt-mean", prompt_ids=ids, session_ids=ids)


def test_pairs_are_half_of_the_sequences():
    assert Totals(counts={"global_batch_size": 6}).get("batch_num_pairs") == 3
    assert Totals().get("batch_num_pairs") is None
    with pytest.raises(TotalsError, match="global_batch_size is 5; a loss of pairs needs an even number"):
        Totals(counts={"global_batch_size": 5}).get("batch_num_pairs")


def test_every_count_is_in_the_oracle():
    """A count that the oracle does not know is a count without a test."""
    known = map(find_count, count_names())
    of_rows = {
        count.name: getattr(count, "of_rows", getattr(count, "keys", None))
        for count in known
        if not getattr(count, "of_mixture", False)  # Those are in test_mixtures.py.
    }
    ours = {name for name, of in of_rows.items() if of is not None and of.__module__ == "trinity_loss.totals"}
    assert ours == {*COUNTS, *GROUPS}


@pytest.mark.parametrize("count_empty", [True, False])
@pytest.mark.parametrize("layout", ["nested", "padded"])
@pytest.mark.parametrize("mode", MODES)
def test_the_worker_counts_as_the_oracle_does(mode, layout, count_empty):
    """What it attaches in each mode, beside what verl sends: every count, and the groups that the mode divides by."""
    samples = (*make_sequences(9, seed=3, masked=2), sequence(2, mask=[0, 0], uid="pad-0", advantages=1.0))
    config = LossConfig(**in_mode(mode, count_empty_sequences=count_empty))
    ((micro,),) = build(cut(samples), Form(layout, totals=NO_TOTALS))
    Counting().attach(micro.data, config, None)
    right = totals_of(samples, 1, Form(counts=True, groups=True, count_empty_groups=count_empty))
    total = AGGREGATIONS[mode].total
    names = (set(COUNTS) - set(OF_VERL)) | ({total} & set(GROUPS))
    attached = read_totals(micro.data).counts
    assert {name: count for name, count in attached.items() if name not in OF_TESTS} == {n: right[n] for n in names}
    if total in GROUPS:
        per_row = GROUPS[total].per_row
        assert micro.data[per_row].tolist() == [group_tokens(samples, i)[per_row] for i in range(len(samples))]


def test_the_worker_counts_what_the_modes_need():
    data = counted(rows(3, 0, 2, 1, uid=NonTensorStack("a", "b", "pad-1", "a")), LossConfig())
    totals = read_totals(data)
    assert {name: totals.get(name) for name in ("batch_num_valid_tokens", "batch_num_nonempty_sequences")} == {
        "batch_num_valid_tokens": 6,
        "batch_num_nonempty_sequences": 3,
    }
    assert totals.get("batch_num_real_sequences") == 3
    assert totals.get("batch_num_prompts") is None


@pytest.mark.parametrize(
    ("settings", "prompts"),
    [({}, 3), ({"count_empty_sequences": False}, 2), ({"count_padding_rows": False}, 2)],
)
def test_the_worker_counts_prompts(settings, prompts):
    data = rows(3, 0, 2, 1, uid=NonTensorStack("a", "b", "pad-1", "a"))
    counted(data, LossConfig(loss_agg_mode="prompt-mean", **settings))
    assert read_totals(data).get("batch_num_prompts") == prompts
    assert data["prompt_num_tokens"].tolist() == [4, 0, 2, 4]


def test_the_worker_counts_an_experts_rows_where_the_loss_asks():
    """What stands under that name for another loss is nobody's concern."""
    data = rows(3, 0, 2, 1, uid=["a", "b", "pad-1", "a"], loss_mask=torch.ones(4, 3), expert_mask=[1, 1, 0, 0])
    found = counted(data, LossConfig(loss_mode="mix"))
    kinds = {kind: [found[f"batch_num_{kind}_{what}"] for what in WHAT] for kind in ("usual", "expert")}
    assert kinds == {"usual": [6, 3, 2, 2, 1], "expert": [6, 3, 2, 1, 2]}
    other = counted(rows(3, 0, 2, 1, expert_mask=torch.ones(4, 3)), LossConfig())
    assert not any("usual" in name or "expert_" in name for name in other if name != "expert_mask")


def test_a_part_of_a_group_is_told_once():
    counting, config = Counting(), LossConfig(loss_agg_mode="prompt-mean")
    counting.begin(rows(1, 1, 1, uid=["a", "a", "b"]), config, None)
    with pytest.warns(UserWarning, match="1 of 2 prompts of this mini-batch are only a part of their group"):
        counting.attach(rows(1, 1, uid=["a", "b"]), config, None)
    counting.attach(rows(1, 1, uid=["a", "b"]), config, None)


ROWS = [["a", "b"], ("a", "b"), NonTensorStack("a", "b"), NonTensorData(["a", "b"], batch_size=[2])]


@pytest.mark.parametrize("uid", ROWS, ids=lambda uid: type(uid).__name__)
def test_values_per_row_in_every_form(uid):
    data = counted(rows(3, 1, uid=uid), LossConfig(loss_agg_mode="prompt-mean"))
    assert data["prompt_num_tokens"].tolist() == [3, 1]


@pytest.mark.parametrize(
    "uid", [NonTensorData({"a": 1}, batch_size=[2]), NonTensorData(["a"], batch_size=[2]), torch.zeros(2, 2)], ids=str
)
def test_another_form_is_refused(uid):
    with pytest.raises(FieldShapeError, match=r"^uid .*expected one"):
        counted(rows(3, 1, uid=uid), LossConfig(loss_agg_mode="prompt-mean"))


def count(data, config, group):
    Counting().attach(data, config, group)


def select(data, config, group):
    attach_selection(data, TrinityPolicyLoss(config), None, group, Steps())


def _attach_on_a_rank(rank, file, pipe, config, batches, attach):
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=len(batches))
    try:
        attach(batches[rank], config, torch.distributed.group.WORLD)
        pipe.send(read_totals(batches[rank]).counts)
    except Exception as error:
        pipe.send((type(error), str(error)))


@pytest.fixture
def on_ranks(tmp_path, monkeypatch):
    """What ranks on gloo have attached to their rows, or what each raised."""
    monkeypatch.setattr("trinity_loss.verl.counting.get_device_id", lambda: "cpu")

    monkeypatch.setattr("trinity_loss.verl.selecting.get_device_id", lambda: "cpu")

    def run(config, *batches, attach=count):
        fork = multiprocessing.get_context("fork")
        ends, processes, store = [], [], tmp_path / f"store-{len(list(tmp_path.iterdir()))}"
        for rank in range(len(batches)):
            ours, theirs = fork.Pipe()
            given = (rank, store, theirs, config, batches, attach)
            processes.append(fork.Process(target=_attach_on_a_rank, args=given))
            processes[-1].start()
            ends.append(ours)
        said = [end.recv() if end.poll(60) else None for end in ends]
        for process in processes:
            process.join(10)
            process.kill()
        return said

    return run


WHAT = ("tokens", "valid_tokens", "rows", "nonempty_rows", "real_rows")
TRAJECTORIES = {"loss_agg_mode": "trajectory-mean"}
SESSION = {"session_id": torch.tensor([0, 1])}
WEIGHTS = {"loss_weight": torch.ones(2)}
EXPERT = {"expert_mask": torch.tensor([True, False])}
REFUSED = {
    "a session without a uid": (TRAJECTORIES, SESSION | {"uid": NonTensorStack("a", "b")}, SESSION, "no 'uid'"),
    "too few sessions": (
        TRAJECTORIES,
        SESSION | {"uid": NonTensorStack("a", "b")},
        {"session_id": NonTensorData([0], batch_size=[2]), "uid": NonTensorStack("a", "b")},
        "session_id has 1 entries",
    ),
    "trajectories that are no integers": (
        TRAJECTORIES,
        {"trajectory_ids": torch.tensor([0, 1])},
        {"trajectory_ids": torch.tensor([0.5, 1.5])},
        "trajectory_ids has dtype torch.float32; expected integers",
    ),
    "advantages of another shape": ({}, {}, {"advantages": torch.ones(2, 7)}, "advantages holds 14 values"),
    "a negative weight": (
        {"row_weights": "loss_weight"},
        WEIGHTS,
        {"loss_weight": torch.tensor([1.0, -1.0])},
        "loss_weight has a weight that is negative or not finite",
    ),
    "a weight that is infinite": (
        TRAJECTORIES | {"row_weights": "loss_weight"},
        WEIGHTS,
        {"loss_weight": torch.full((2, 1), torch.inf)},
        "loss_weight has a weight that is negative or not finite",
    ),
    "no teacher": (
        {"distillation": {"loss_mode": "k3"}},
        {"teacher_logprobs": torch.zeros(2, 4, 1)},
        {},
        "no 'teacher_logprobs', expected what the teacher says of the token there at each place of prompt and "
        "response; distillation.enabled=True makes verl's agent loop ask the teacher for it; it has response_mask",
    ),
    "a teacher that does not say of which tokens": (
        {"distillation": {"loss_mode": "forward_kl_topk", "use_task_rewards": False}},
        dict.fromkeys(("teacher_logprobs", "teacher_ids"), torch.zeros(2, 4, 32)),
        {"teacher_logprobs": torch.zeros(2, 4, 32)},
        "no 'teacher_ids', expected what the teacher says of its k most likely tokens at each place",
    ),
    "no mark of an expert's rows": (
        {"loss_mode": "mix"},
        EXPERT,
        {},
        "the micro-batch has no 'expert_mask', expected one",
    ),
    "a mark that is none": (
        {"loss_mode": "mix_chord"},
        EXPERT,
        {"expert_mask": torch.tensor([0, 2])},
        "expert_mask holds a number that is neither 0 nor 1",
    ),
    "marks of another number": (
        {"loss_mode": "mix"},
        EXPERT,
        {"expert_mask": torch.zeros(2, 2)},
        "expert_mask has shape [2, 2]; expected one number, 0 or 1, per row, 2 in all",
    ),
    "no weight": ({"row_weights": "loss_weight"}, WEIGHTS, {}, "row_weights is 'loss_weight', but the batch has no"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_error_of_one_rank_is_raised_on_every_rank(on_ranks, name):
    """Within seconds, though the other rank has nothing wrong and would wait for it."""
    settings, good, bad, says = REFUSED[name]
    started = time.monotonic()
    said = on_ranks(LossConfig(**settings), rows(3, 1, **good), rows(2, 2, **bad))
    assert time.monotonic() - started < 20
    assert said[0] == said[1], said
    kind, text = said[0]
    assert issubclass(kind, BatchError)
    assert says in text
    assert text.endswith("(on data-parallel rank 1)")


@pytest.mark.parametrize("lacks", ["advantages", "input_ids", "old_log_probs", None])
def test_none_chooses_among_tokens_while_another_has_failed(on_ranks, lacks):
    config = LossConfig(loss_mode="kl_cov", selection_pass="old_log_probs")
    batches = [rows(3, 1, **dict.fromkeys(("advantages", "old_log_probs"), torch.ones(2, 3))) for _ in range(2)]
    for batch in batches:
        batch["input_ids"] = torch.nested.nested_tensor_from_jagged(torch.arange(6), offsets=torch.tensor([0, 4, 6]))
    if lacks is not None:
        del batches[1][lacks]
    said = on_ranks(config, *batches, attach=select)
    assert said[0] == said[1]
    if lacks is not None:
        assert lacks in said[0][1]
        assert said[0][1].endswith("(on data-parallel rank 1)")


def test_ranks_without_an_error_add_up(on_ranks):
    given = {**SESSION, "uid": NonTensorStack("a", "b")}
    advantages = {"advantages": torch.tensor([[1.0, -1.0, 2.0], [3.0, 4.0, 5.0]])}
    batches = rows(3, 1, **given, **advantages), rows(3, 2, **given)
    for settings, groups in (({}, {}), (TRAJECTORIES, {"batch_num_trajectories": 2})):
        said = on_ranks(LossConfig(**settings), *(batch.clone() for batch in batches))
        assert said[0] == said[1]
        counts = {"batch_num_valid_tokens": 9, "batch_num_positive_tokens": 3} | groups
        assert {name: said[0][name] for name in counts} == counts
