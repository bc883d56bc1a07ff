"""Every row of ``docs/bad-inputs.md``: what is wrong, what is raised, and what the message says.

The table is read here and compared with what happens, so neither can drift: a row without an input, an input
without a row, another class or other words fail. ``…`` in the table stands for anything.
"""

import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict
from verl import DataProto

from trinity_loss import EnginePolicyLoss, LossConfig, TrinityPolicyLoss, errors
from trinity_loss.metric_set import finish_metrics

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "bad-inputs.md"
MASK = [[1, 1, 0], [1, 1, 1]]
FIELDS = ("old_log_probs", "advantages", "ref_log_prob", "rollout_log_probs", "rollout_is_weights")


def jagged(*rows: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(r, dtype=dtype) for r in rows], layout=torch.jagged)


def strided(*rows: list[float]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this layout is a prototype.
        return torch.nested.nested_tensor([torch.tensor(r) for r in rows], layout=torch.strided)


@dataclass
class Given:
    """Two responses of two and three tokens, the whole mini-batch, before something is done to them."""

    layout: str = "dense"
    data: dict[str, Any] = field(default_factory=dict)
    output: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    alone: bool = False
    group: Any = None

    def __post_init__(self) -> None:
        whole = torch.full((2, 3), -1.0)
        if self.layout == "nested":
            self.data = {name: jagged([-1.0, -1.0], [-1.0, -1.0, -1.0]) for name in FIELDS}
            self.data["response_mask"] = jagged([1, 1], [1, 1, 1], dtype=torch.int64)
            self.data["prompts"] = jagged([5], [5, 6], dtype=torch.int64)
            self.output = {"log_probs": jagged([-1.0] * 3, [-1.0] * 5), "entropy": jagged([1.0] * 3, [1.0] * 5)}
        else:
            self.data = {name: whole.clone() for name in FIELDS} | {"response_mask": torch.tensor(MASK)}
            self.output = {"log_probs": whole.clone(), "entropy": -whole}
        if self.layout == "padded":
            self.data["prompts"] = torch.ones(2, 2, dtype=torch.int64)
            self.data["attention_mask"] = torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
            self.output["log_probs"] = jagged([-1.0] * 3, [-1.0] * 5)
            del self.output["entropy"]
        if self.layout == "packed":
            self.data["segment_ids"] = torch.tensor([[1, 1, 0], [4, 4, 4]])
        self.data |= {"batch_num_tokens": 5, "global_batch_size": 2, "dp_size": 1, "uid": ["a", "b"]}

    def run(self) -> tuple[torch.Tensor, dict[str, Any]]:
        loss = (TrinityPolicyLoss if self.alone else EnginePolicyLoss)(LossConfig(**self.settings))
        value, metrics = loss(model_output=self.output, data=self.data, dp_group=self.group)
        numbers = {k: m if isinstance(m, float) else m.aggregate() for k, m in metrics.items()}
        finish_metrics(numbers)
        return value, numbers


#: Name of a row, and the input that it is about.
inputs: dict[str, Callable[[], Given]] = {}


def bad(name: str, change: Callable[[Given], Any], layout: str = "dense", alone: bool = False, **settings: Any) -> None:
    """An input under the name of its row: what is made of a good one."""

    def make() -> Given:
        given = Given(layout, alone=alone, settings=settings)
        change(given)
        return given

    assert name not in inputs, name
    inputs[name] = make


def drop(key: str) -> Callable[[Given], Any]:
    return lambda given: (given.data if key in given.data else given.output).pop(key)


def put(key: str, value: Any) -> Callable[[Given], Any]:
    def change(given: Given) -> None:
        (given.output if key in given.output else given.data)[key] = value

    return change


def spoil(key: str, value: float, place: tuple[int, int] = (1, 2)) -> Callable[[Given], Any]:
    def change(given: Given) -> None:
        tensor = (given.output if key in given.output else given.data)[key]
        if tensor.is_nested:
            tensor = tensor.unbind()[place[0]]
            tensor[place[1]] = value
        else:
            tensor[place] = value

    return change


KL = {"use_kl_loss": True}
PROMPTS = {"loss_agg_mode": "prompt-mean"}
TRAJECTORIES = {"loss_agg_mode": "trajectory-mean"}
WEIGHTS = {"row_weights": "loss_weight"}
MIX = {"loss_mode": "mix"}
SEQUENCES = {"loss_agg_mode": "seq-mean-token-sum"}
PAIRS = {"loss_mode": "dpo"}


def prompts(**counts: Any) -> Callable[[Given], Any]:
    good = {"batch_num_prompts": 2, "prompt_num_tokens": torch.tensor([2, 3])}
    return lambda given: given.data.update(good | counts)


def sessions(**given: Any) -> Callable[[Given], Any]:
    return lambda given_: given_.data.update({"session_id": [0, 1]} | given)


def trajectories(**counts: Any) -> Callable[[Given], Any]:
    good = {"batch_num_trajectories": 2, "trajectory_num_tokens": torch.tensor([2, 3])}
    return lambda given: given.data.update(good | counts)


def both(*changes: Callable[[Given], Any]) -> Callable[[Given], Any]:
    return lambda given: [change(given) for change in changes]


def as_data_proto(given: Given) -> None:
    given.data = DataProto.from_dict({k: v for k, v in given.data.items() if isinstance(v, torch.Tensor)})


# What is missing.
bad("session-without-a-uid", both(sessions(), drop("uid")), alone=True, **TRAJECTORIES)
bad("no-row-weights", lambda given: None, **WEIGHTS)
bad("no-expert-mask", lambda given: None, **MIX)
bad("no-step", put("expert_mask", [1, 0]), loss_mode="mix_chord", loss_args={"mu_warmup_steps": 2})
bad("no-teacher", lambda given: None, distillation={"loss_mode": "k3"})
bad("no-divergence-from-a-teacher", lambda given: None, distillation={"loss_mode": "forward_kl_topk"})
bad("no-mapping", as_data_proto)
bad("no-log-probs", drop("log_probs"))
bad("no-response-mask", drop("response_mask"))
bad("no-old-log-probs", drop("old_log_probs"))
bad("no-advantages", drop("advantages"))
bad("no-ref-log-prob", drop("ref_log_prob"), **KL)
bad("no-field-of-the-loss", drop("ref_log_prob"), **PAIRS)
bad("no-entropy", drop("entropy"), entropy_coeff=0.1)
bad("entropy-without-a-graph", lambda given: given.output["log_probs"].requires_grad_(), entropy_coeff=0.1)
bad("log-probs-without-a-graph", lambda given: given.output["entropy"].requires_grad_(), entropy_coeff=0.1)
bad("no-rollout-log-probs", drop("rollout_log_probs"), rollout_metrics="token")
bad("no-prompts", drop("prompts"), "nested")
bad("no-attention-mask", drop("attention_mask"), "padded")
bad("no-uid", drop("uid"), count_padding_rows=False)
bad("no-prompt-ids", lambda given: None, "packed", alone=True, **PROMPTS)
# What is too much.
bad("extra-field", put("something_else", torch.ones(7)))
bad("extra-output", lambda given: given.output.update(hidden_states=torch.ones(2, 3, 8)))
# What has another shape.
bad("field-too-wide", put("advantages", torch.ones(2, 4)))
bad("field-of-one-row", put("advantages", torch.ones(1, 3)))
bad("field-per-row", put("advantages", torch.ones(2)))
bad("field-per-packed-row", put("advantages", torch.ones(2, 1)), "packed")
bad("field-jagged", put("old_log_probs", jagged([1.0, 1.0], [1.0, 1.0, 1.0])))
bad("field-dense", put("old_log_probs", torch.ones(2, 3)), "nested")
bad("field-of-other-lengths", put("old_log_probs", jagged([1.0] * 3, [1.0] * 2)), "nested")
bad("field-too-long", put("old_log_probs", jagged([1.0] * 3, [1.0] * 3)), "nested")
bad("mask-flat", put("response_mask", torch.ones(6)))
bad("mask-of-three-dimensions", put("response_mask", torch.ones(2, 3, 1)))
bad("mask-beyond-attention", put("response_mask", torch.ones(2, 3)), "padded")
bad("attention-mask-with-a-hole", put("attention_mask", torch.tensor([[0, 1, 1, 0, 1], [1, 1, 1, 1, 1]])), "padded")
bad("attention-mask-too-narrow", put("attention_mask", torch.ones(2, 4, dtype=torch.int64)), "padded")
bad("log-probs-too-wide", put("log_probs", torch.ones(2, 4)))
bad("log-probs-dense", put("log_probs", torch.ones(2, 3)), "nested")
bad("log-probs-of-another-batch", put("log_probs", jagged([1.0] * 8)), "nested")
bad("log-probs-of-other-lengths", put("log_probs", jagged([1.0] * 4, [1.0] * 4)), "nested")
bad("log-probs-jagged-beside-segments", put("log_probs", jagged([1.0] * 3, [1.0] * 5)), "packed")
bad("log-probs-with-a-last-dimension", put("log_probs", torch.ones(2, 3, 1)))
bad("entropy-too-long", put("entropy", torch.ones(2, 4)))
bad("prompts-of-another-batch", put("prompts", jagged([5], [5], [6], dtype=torch.int64)), "nested")
bad("prompts-flat", put("prompts", torch.ones(4, dtype=torch.int64)), "padded")
bad("prompt-empty", put("prompts", jagged([], [5, 6, 7], dtype=torch.int64)), "nested")
bad("segments-too-wide", put("segment_ids", torch.ones(2, 4, dtype=torch.int64)), "packed")
bad("uid-too-few", put("uid", ["a"]), count_padding_rows=False)
bad("uid-too-few-for-groups", put("uid", ["a"]), alone=True, **PROMPTS)
bad("prompt-ids-too-many", put("prompt_ids", torch.tensor([1, 2, 3])), alone=True, **PROMPTS)
bad("prompt-counts-too-many", prompts(prompt_num_tokens=torch.tensor([2, 3, 4])), **PROMPTS)
bad("prompt-counts-too-small", prompts(prompt_num_tokens=torch.tensor([2, 1])), **PROMPTS)
bad("half-a-pair", put("global_batch_size", 3), **PAIRS)
bad("packed-pairs", lambda given: None, "packed", **PAIRS)
bad("trajectory-ids-too-many", put("trajectory_ids", torch.tensor([1, 2, 3])), alone=True, **TRAJECTORIES)
bad(
    "trajectory-ids-differ-in-a-segment",
    put("trajectory_ids", torch.tensor([[1, 1, 0], [2, 2, 3]])),
    "packed",
    alone=True,
    **TRAJECTORIES,
)
bad(
    "trajectory-counts-differ-in-a-segment",
    trajectories(trajectory_num_tokens=torch.tensor([[2, 2, 0], [3, 3, 4]])),
    "packed",
    **TRAJECTORIES,
)
bad("trajectory-counts-too-small", trajectories(trajectory_num_tokens=torch.tensor([2, 1])), **TRAJECTORIES)
bad("session-too-few", sessions(session_id=[0]), alone=True, **TRAJECTORIES)
bad("row-weights-too-few", put("loss_weight", torch.ones(1)), **WEIGHTS)
bad("row-weights-too-few-in-a-list", put("loss_weight", [1.0]), **WEIGHTS)
bad("expert-mask-too-few", put("expert_mask", torch.ones(1)), **MIX)
bad("expert-mask-differs-in-a-segment", put("expert_mask", torch.tensor([[1, 1, 0], [0, 0, 1]])), "packed", **MIX)
# What has another type.
bad("trajectory-ids-of-floats", put("trajectory_ids", torch.tensor([1.0, 2.0])), alone=True, **TRAJECTORIES)
bad("row-weights-text", put("loss_weight", "heavy"), **WEIGHTS)
bad("row-weights-of-texts", put("loss_weight", ["1", "2"]), **WEIGHTS)
bad("expert-mask-of-texts", put("expert_mask", ["yes", "no"]), **MIX)
bad("field-a-list", put("advantages", [[1.0] * 3] * 2))
bad("field-text", put("old_log_probs", "old"))
bad("field-strided", put("advantages", strided([1.0] * 2, [1.0] * 3)), "nested")
bad("field-of-complex-numbers", put("advantages", torch.ones(2, 3, dtype=torch.complex64)))
bad("field-of-integers", put("advantages", torch.tensor([[-1] * 3] * 2)))
bad("mask-a-list", put("response_mask", MASK))
bad("mask-strided", put("response_mask", strided([1.0] * 2, [1.0] * 3)), "nested")
bad("mask-nan", put("response_mask", torch.tensor(MASK) * math.nan))
bad("mask-nan-nested", put("response_mask", jagged([1.0, math.nan], [1.0] * 3)), "nested")
bad("mask-of-numbers", put("response_mask", torch.tensor(MASK) * 0.25))
bad("log-probs-a-list", put("log_probs", [[-1.0] * 3] * 2))
bad("log-probs-strided", put("log_probs", strided([1.0] * 3, [1.0] * 5)), "nested")
bad("log-probs-of-integers", put("log_probs", torch.ones(2, 3, dtype=torch.int64)))
bad("entropy-a-number", put("entropy", 1.0))
bad("attention-mask-of-floats", put("attention_mask", torch.ones(2, 5)), "padded")
bad("segments-of-floats", put("segment_ids", torch.ones(2, 3)), "packed")
bad("segments-a-list", put("segment_ids", [[1, 1, 0], [4, 4, 4]]), "packed")
bad("prompt-counts-of-floats", prompts(prompt_num_tokens=torch.tensor([2.5, 3.0])), **PROMPTS)
bad("prompt-counts-a-list", prompts(prompt_num_tokens=[2, 3]), **PROMPTS)
# Totals.
bad("no-totals", lambda given: [given.data.pop(k) for k in ("batch_num_tokens", "global_batch_size", "dp_size")])
bad("no-dp-size", drop("dp_size"))
bad("no-token-count", drop("batch_num_tokens"))
bad("no-sequence-count", drop("global_batch_size"), **SEQUENCES)
bad("no-token-count-on-two-ranks", both(drop("batch_num_tokens"), put("dp_size", 2)))
bad("no-sequence-count-on-two-ranks", both(drop("global_batch_size"), put("dp_size", 2)), **SEQUENCES)
bad("no-prompt-count", put("prompt_num_tokens", torch.tensor([2, 3])), **PROMPTS)
bad("no-tokens-per-prompt", put("batch_num_prompts", 2), **PROMPTS)
bad("no-nonempty-count-on-two-ranks", put("dp_size", 2), **SEQUENCES, count_empty_sequences=False)
bad("no-real-count-on-two-ranks", put("dp_size", 2), **SEQUENCES, count_padding_rows=False)
bad("no-valid-count-on-two-ranks", put("dp_size", 2), count_rejected_tokens=False)
bad("token-count-zero", put("batch_num_tokens", 0))
bad("token-count-negative", put("batch_num_tokens", -5))
bad("token-count-too-small", put("batch_num_tokens", 4))
bad("token-count-a-fraction", put("batch_num_tokens", 4.5))
bad("token-count-nan", put("batch_num_tokens", math.nan))
bad("token-count-infinite", put("batch_num_tokens", math.inf))
bad("token-count-true", put("batch_num_tokens", True))
bad("token-count-text", put("batch_num_tokens", "5"))
bad("token-count-per-row", put("batch_num_tokens", torch.tensor([2, 3])))
bad("token-count-a-tensor", put("batch_num_tokens", torch.tensor([5])))
bad("token-count-numpy", put("batch_num_tokens", np.int32(5)))
bad("token-count-wrapped", put("batch_num_tokens", NonTensorData(5)))
bad("sequence-count-zero", put("global_batch_size", 0), **SEQUENCES)
bad("sequence-count-negative", put("global_batch_size", -2), **SEQUENCES)
bad("sequence-count-too-small", put("global_batch_size", 1), **SEQUENCES)
bad("prompt-count-zero", prompts(batch_num_prompts=0), **PROMPTS)
bad("prompt-count-too-small", prompts(batch_num_prompts=1), **PROMPTS)
bad("no-trajectory-count", put("trajectory_num_tokens", torch.tensor([2, 3])), **TRAJECTORIES)
bad("no-tokens-per-trajectory", put("batch_num_trajectories", 2), **TRAJECTORIES)
bad("trajectory-count-zero", trajectories(batch_num_trajectories=0), **TRAJECTORIES)
bad("trajectory-count-too-small", trajectories(batch_num_trajectories=1), **TRAJECTORIES)
bad("no-count-of-usual-rows-on-two-ranks", both(put("expert_mask", [1, 0]), put("dp_size", 2)), **MIX)
bad("no-positive-count-on-two-ranks", put("dp_size", 2), nll_on_positives=0.1)
bad("dp-size-zero", put("dp_size", 0))
bad("dp-size-negative", put("dp_size", -1))
bad("dp-size-a-fraction", put("dp_size", 1.5))
# Numbers that are none, where the mask counts them.
bad("log-probs-nan", spoil("log_probs", math.nan))
bad("log-probs-nan-nested", spoil("log_probs", math.nan, (1, 3)), "nested")
bad("old-log-probs-infinite", spoil("old_log_probs", -math.inf))
bad("old-log-probs-nan-packed", spoil("old_log_probs", math.nan), "packed")
bad("advantages-infinite", spoil("advantages", math.inf, (0, 1)))
bad("advantages-nan-per-row", put("advantages", torch.tensor([[1.0], [math.nan]])))
bad("ref-log-prob-nan", spoil("ref_log_prob", math.nan), **KL)
bad("entropy-nan", spoil("entropy", math.nan), entropy_coeff=0.1)
bad("weights-nan", spoil("rollout_is_weights", math.nan))
bad("rollout-log-probs-nan", spoil("rollout_log_probs", math.nan), rollout_metrics="token")
bad("advantages-nan-neutral", spoil("advantages", math.nan), nonfinite="neutral")
bad("weights-infinite-neutral", spoil("rollout_is_weights", math.inf), nonfinite="neutral")
bad("row-weights-negative", put("loss_weight", torch.tensor([1.0, -0.5])), **WEIGHTS)
bad("row-weights-nan", put("loss_weight", torch.tensor([[1.0], [math.nan]])), **WEIGHTS)
bad("row-weights-infinite-nested", put("loss_weight", jagged([1.0] * 2, [1.0, 1.0, math.inf])), "nested", **WEIGHTS)
bad("row-weights-nan-where-masked", put("loss_weight", torch.tensor([[1, 1, math.nan], [1, 1, 1]])), **WEIGHTS)
bad("expert-mask-a-half", put("expert_mask", torch.tensor([1.0, 0.5])), **MIX)
bad("log-probs-nan-where-masked", spoil("log_probs", math.nan, (0, 2)))


# Nothing at all.
def narrow(width: int) -> Callable[[Given], Any]:
    def change(given: Given) -> None:
        for mapping in (given.data, given.output):
            mapping.update({k: v[:, :width] for k, v in mapping.items() if isinstance(v, torch.Tensor)})

    return change


bad("width-zero", narrow(0))
bad("width-zero-packed", narrow(0), "packed")
bad("responses-empty", lambda given: given.data.update(
    {k: jagged([], []) for k in FIELDS} | {"response_mask": jagged([], [], dtype=torch.int64)},
) or given.output.update(log_probs=jagged([-1.0], [-1.0] * 2), entropy=jagged([1.0], [1.0] * 2)), "nested")  # fmt: skip
bad("rows-zero", lambda given: [
    m.update({k: v[:0] for k, v in m.items() if isinstance(v, torch.Tensor)}) for m in (given.data, given.output)
])  # fmt: skip
bad("mask-all-zero", put("response_mask", torch.zeros(2, 3)))


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """A process group of this process alone."""
    import torch.distributed as dist

    started = not dist.is_initialized()
    if started:
        store = tmp_path_factory.mktemp("group") / "store"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield dist.group.WORLD
    if started:
        dist.destroy_process_group()


bad("dp-size-not-the-group", put("dp_size", 2))

#: Rows whose test is another one, in ``tests/engines``: real ranks, of which one fails.
ELSEWHERE = {
    "error-on-one-rank": "tests/engines/test_fsdp_engine.py::test_an_error_on_one_rank_ends_the_step",
    "rows-of-one-rank-cannot-be-counted": "tests/test_totals.py::test_an_error_of_one_rank_is_raised_on_every_rank",
}


def rows() -> dict[str, tuple[str, str, str]]:
    """The table: name to input, what is raised, and the message or what happens."""
    found = {}
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 4 and cells[0].startswith("`"):
            name = cells[0].strip("`")
            assert name not in found, f"{name} stands in the table twice"
            found[name] = tuple(cells[1:])
    return found


def test_the_table_has_every_input():
    assert set(rows()) == set(inputs) | set(ELSEWHERE)


@pytest.mark.parametrize("name", inputs)
def test_bad_input(name, one_rank):
    _, raised, message = rows()[name]
    given = inputs[name]()
    if name == "dp-size-not-the-group":
        given.group = one_rank
    outputs = [t for t in given.output.values() if isinstance(t, torch.Tensor) and t.is_floating_point()]
    if not name.endswith("-without-a-graph"):
        for tensor in outputs:
            tensor.requires_grad_()
    if raised == "accepted":
        is_accepted(given, message)
        return
    with pytest.raises(getattr(errors, raised.strip("`"))) as caught:
        given.run()
    assert type(caught.value).__name__ == raised.strip("`")
    words = message.strip("`").replace("\\|", "|")
    pattern = ".*".join(re.escape(part) for part in words.split("…"))
    assert re.fullmatch(pattern, str(caught.value), re.DOTALL), (words, str(caught.value))


def is_accepted(given, promise):
    """The loss is a finite number with a graph; the table says which, and which metric is what."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss, metrics = given.run()
    assert loss.requires_grad
    loss.backward()
    assert all(math.isfinite(x) for x in (loss.item(), *metrics.values()))
    promised = dict(re.findall(r"`([\w/]+) = (-?[\d.]+)`", promise))
    assert "loss" in promised
    for key, number in promised.items():
        assert (loss.item() if key == "loss" else metrics[key]) == pytest.approx(float(number))


@pytest.mark.parametrize("name", ["no-totals", "no-token-count", "no-sequence-count"])
def test_a_missing_count_is_said_once(name, monkeypatch):
    monkeypatch.setattr("trinity_loss.loss._warned", set())
    with pytest.warns(UserWarning, match="its loss is the mean over its own tokens or sequences"):
        inputs[name]().run()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inputs[name]().run()


@pytest.mark.parametrize("name", ELSEWHERE)
def test_elsewhere_exists(name):
    """The rows that real engines test name a test that is there."""
    path, _, test = ELSEWHERE[name].partition("::")
    assert f"def {test}(" in (ROOT / path).read_text()
    assert test in rows()[name][2]


def test_errors_are_the_same_out_of_a_tensordict():
    """Engines hand over a TensorDict; what it lacks is named in the same words."""
    given = Given()
    del given.data["advantages"], given.data["uid"]
    given.data = TensorDict(given.data, batch_size=[])
    with pytest.raises(errors.MissingFieldError, match=r"no 'advantages'.*it has batch_num_tokens, dp_size"):
        given.run()
