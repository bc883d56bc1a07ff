"""What a call costs, counted: host reads and ATen operations, whatever the number of sequences."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from batches import build, cut, make_sequences
from forms import LAYOUTS, Form, make_leaves
from torch.utils._python_dispatch import TorchDispatchMode

from trinity_loss import EnginePolicyLoss, LossConfig
from trinity_loss.bench.cases import Case, MeasuredBatch, make_micro_batch

#: Operations that wait for the device: they read a number or a size that only the data tell.
READS = {
    "aten._local_scalar_dense.default",
    "aten.nonzero.default",
    "aten._unique2.default",
    "aten.unique_dim.default",
    "aten.unique_consecutive.default",
    "aten.masked_select.default",
    "aten.item.default",
    "aten.equal.default",
    "aten.is_nonzero.default",
}
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum")


class Count(TorchDispatchMode):
    """Counts operations; boolean indexing and repeat_interleave without a size count as reads."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = str(func)
        self.operations[name] += 1
        self.reads += name in READS
        if name == "aten.index.Tensor":
            self.reads += any(index is not None and index.dtype == torch.bool for index in args[1])
        if name.startswith("aten.repeat_interleave"):
            self.reads += kwargs.get("output_size") is None
        return func(*args, **kwargs)


@pytest.fixture
def host_reads(monkeypatch):
    """Counts `tolist`, which a dispatch mode does not see."""
    calls = []
    plain = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: calls.append(1) or plain(self))
    return calls


def engine_call(sequences: int, layout: str, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Arguments of a loss call with one micro-batch of that many sequences."""
    parts = cut(make_sequences(sequences, seed=4, max_length=9))
    batch = build(parts, Form(layout, dtype=dtype))[0][0]
    names = ("log_probs", "entropy")
    outputs = {name: batch.lay_out(leaf) for name, leaf in zip(names, make_leaves(parts.samples, dtype), strict=True)}
    assert all(output.requires_grad for output in outputs.values())
    return {"model_output": outputs, "data": batch.data}


def counted(sequences: int, layout: str, config: LossConfig) -> Count:
    call, loss_fn = engine_call(sequences, layout), EnginePolicyLoss(config)
    with Count() as count:
        loss_fn(**call)[0].backward()
    return count


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_one_host_read(mode, layout, host_reads):
    config = LossConfig(loss_agg_mode=mode, entropy_coeff=0.01, use_kl_loss=True)
    host_reads.clear()
    count = counted(9, layout, config)
    assert len(host_reads) == 1
    assert count.reads == 0, count.operations


@pytest.mark.parametrize("loss_mode", ["gspo", "gmpo", "cispo", "bypass_mode"])
def test_one_host_read_for_losses_that_look_at_sequences(loss_mode, host_reads):
    # The bypass mode reports those metrics itself.
    config = LossConfig(loss_mode=loss_mode, rollout_metrics=None if loss_mode == "bypass_mode" else "geometric")
    host_reads.clear()
    count = counted(9, "nested", config)
    assert len(host_reads) == 1
    assert count.reads == 0, count.operations


def test_the_counter_sees_a_read():
    """The test above can fail: what it forbids is counted."""
    values = torch.arange(4.0)
    with Count() as count:
        values[values > 1]
        torch.repeat_interleave(values, torch.tensor([1, 2, 1, 1]))
        values.sum().item()
        torch.nonzero(values)
    assert count.reads == 4


@pytest.mark.parametrize("mode", MODES)
def test_operations_do_not_grow_with_sequences(mode):
    config = LossConfig(loss_agg_mode=mode, entropy_coeff=0.01, use_kl_loss=True)
    few, many = (sum(counted(n, "nested", config).operations.values()) for n in (8, 64))
    assert few == many
    # A third of what verl's ppo_loss dispatches at 8 sequences, 732 + 491.
    assert few <= 407


@pytest.mark.parametrize("layout", ["nested", "packed"])
@pytest.mark.parametrize("mode", MODES)
def test_nothing_of_tokens_times_sequences(mode, layout):
    """The largest tensor that any operation makes holds a few numbers per token."""
    config = LossConfig(loss_agg_mode=mode, entropy_coeff=0.01, use_kl_loss=True)
    call = engine_call(64, layout)
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    with Largest():
        EnginePolicyLoss(config)(**call)[0].backward()
    flat = call["data"]["response_mask"]
    tokens = flat._values.numel() if layout == "nested" else flat.numel()
    prompts = 3 * 64
    # All fields that are read, side by side: log-prob, old log-prob, advantage, reference, weight, entropy.
    assert largest <= 6 * tokens + prompts
    assert tokens * 64 > 5 * (6 * tokens + prompts)


def outcome(batch: MeasuredBatch, mode: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    config = LossConfig(loss_agg_mode=mode, entropy_coeff=0.01, use_kl_loss=True)
    loss, _ = EnginePolicyLoss(config)(model_output=batch.model_output(), data=batch.data)
    loss.backward()
    return loss.detach(), batch.log_probs.grad, batch.entropy.grad


@pytest.mark.parametrize("mode", MODES)
def test_bit_identical_from_run_to_run(mode):
    batch = make_micro_batch(Case(30, 300, 0.4))
    for first, second in zip(outcome(batch, mode), outcome(batch, mode), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("mode", MODES)
def test_bf16_gives_the_float32_result_of_the_same_values(mode):
    batch = make_micro_batch(Case(30, 300, 0.4))
    low = {name: getattr(batch, name).detach().bfloat16() for name in ("log_probs", "entropy")}
    narrow = replace(batch, **{name: values.clone().requires_grad_() for name, values in low.items()})
    wide = replace(batch, **{name: values.float().requires_grad_() for name, values in low.items()})
    (loss, *gradients), (expected, *wide_gradients) = outcome(narrow, mode), outcome(wide, mode)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, expected)
    for gradient, wide_gradient in zip(gradients, wide_gradients, strict=True):
        assert torch.equal(gradient, wide_gradient.bfloat16())
