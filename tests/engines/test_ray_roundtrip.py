"""The loss reaches a worker as Ray sends it: through Ray's pickle, into a process that has never seen it."""

import os
import pickle
import sys

import pytest
import torch
from engine_losses import MODES, config, ours
from tensordict import TensorDict

from trinity_loss.verl.harness.ray_fsdp import start_ray

ray = pytest.importorskip("ray")


def micro_batch():
    """Two jagged sequences of 2 + 3 and 1 + 2 tokens, and the model's output for them."""

    def jagged(*rows):
        return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)

    data = TensorDict(
        {
            "prompts": jagged([5, 6], [7]),
            "responses": jagged([1, 2, 3], [4, 5]),
            "response_mask": jagged([1, 0, 1], [1, 1]),
            "old_log_probs": jagged([-1.0, -2.0, -1.5], [-0.5, -3.0]),
            "ref_log_prob": jagged([-1.1, -1.9, -1.6], [-0.7, -2.0]),
            "advantages": jagged([1.0, 1.0, 1.0], [-2.0, -2.0]),
            "prompt_num_tokens": torch.tensor([2, 2]),
            "trajectory_num_tokens": torch.tensor([2, 4]),
        },
        batch_size=[2],
    )
    totals = {"batch_num_tokens": 9, "global_batch_size": 4, "batch_num_prompts": 3, "batch_num_trajectories": 3}
    for name, count in {"dp_size": 2, **totals}.items():
        data.set_non_tensor(name, count)
    output = {
        "log_probs": jagged([-9.0, -1.2, -2.0, -1.0, -9.0], [-0.6, -2.5, -9.0]),
        "entropy": jagged([0.0, 1.2, 2.0, 1.0, 0.0], [0.6, 2.5, 0.0]),
    }
    return output, data


def evaluate(loss):
    """The loss and its metrics as floats."""
    output, data = micro_batch()
    value, metrics = loss(model_output=output, data=data, dp_group=None)
    return float(value), {key: getattr(metric, "values", metric) for key, metric in metrics.items()}


@pytest.fixture
def private_ray(monkeypatch):
    # A worker inherits this; it has to find the functions of this file.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    start_ray(num_cpus=1)
    yield
    ray.shutdown()


@pytest.mark.parametrize("mode", MODES)
def test_pickle(mode):
    loss = ours(mode)
    copy = pickle.loads(pickle.dumps(loss))
    assert copy.config == loss.config == pickle.loads(pickle.dumps(config(mode)))
    assert evaluate(copy) == evaluate(loss)


@pytest.mark.engine
@pytest.mark.usefixtures("private_ray")
def test_ray():
    losses = [ours(mode) for mode in MODES]
    there = ray.remote(lambda sent: ([evaluate(loss) for loss in sent], sent))
    results, back = ray.get(there.remote(losses), timeout=200)
    assert results == [evaluate(loss) for loss in losses]
    assert [loss.config for loss in back] == [loss.config for loss in losses]
