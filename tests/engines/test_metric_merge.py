"""Metrics through verl's own merge, between two real processes: all-gather, reduction over ranks, the driver."""

import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from batches import cut, make_sequences
from oracle import evaluate, importance_metrics
from verl.utils.metric import Metric

from trinity_loss.errors import ConfigError
from trinity_loss.metric_set import finish_metrics
from trinity_loss.verl.metric_reduction import reduce_over_ranks

RANK = """
import os, pickle, sys
import torch.distributed as dist
from batches import build, cut, make_sequences
from forms import Form, make_leaves
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import append_to_dict
from verl.workers.engine_workers import allgather_dict_into_dict
from trinity_loss import EnginePolicyLoss, LossConfig
from trinity_loss.verl.metric_reduction import reduce_over_ranks

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
parts = cut(make_sequences(11, seed=2), 3, 2, "uneven")
config = LossConfig(
    loss_agg_mode="seq-mean-token-mean", entropy_coeff=0.01, use_kl_loss=True, rollout_metrics="sequence"
)
log_probs, entropy = make_leaves(parts.samples)
metrics = {}
for batch in build(parts, Form("nested"))[rank]:
    output = {"log_probs": batch.lay_out(log_probs), "entropy": batch.lay_out(entropy)}
    append_to_dict(metrics, EnginePolicyLoss(config)(model_output=output, data=batch.data)[1])
of_mini_batch = allgather_dict_into_dict(data=metrics, group=dist.group.WORLD)
reduce_over_ranks(of_mini_batch)
constants = {k: [x for xs in v for x in xs] for k, v in of_mini_batch.items() if isinstance(v, list)}
of_step = {}
append_to_dict(of_step, of_mini_batch | constants)
if rank == 0:
    pickle.dump({k: float(v) for k, v in reduce_metrics(of_step).items()}, open(sys.argv[1], "wb"))
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_two_processes_report_the_whole_mini_batch(tmp_path):
    path = tmp_path / "metrics.pickle"
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parent.parent),
    }
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(path)], env=environment | {"RANK": str(rank)})
        for rank in range(2)
    ]
    assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    metrics = pickle.loads(path.read_bytes())

    samples = make_sequences(11, seed=2)
    settings = {"loss_agg_mode": "seq-mean-token-mean", "entropy_coeff": 0.01, "use_kl_loss": True}
    expected = evaluate(samples, **settings).metrics
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, rel=1e-10)
    assert metrics["actor/micro_batches"] == len(cut(samples, 3, 2, "uneven").ranks[0])
    assert not [key for key in metrics if key.startswith("trinity_loss/moments")]

    def counted(field: str) -> list[list[float]]:
        return [[x for x, m in zip(getattr(s, field), s.mask, strict=True) if m] for s in samples]

    whole = importance_metrics(counted("old_log_probs"), counted("rollout_log_probs"), level="sequence")
    reported = {key: metrics["rollout_corr/" + key] for key in whole}
    assert reported == pytest.approx(whole, rel=1e-10)


def test_moments_of_two_contracts_do_not_mix():
    metrics = {"trinity_loss/moments/std/count/spread": 2.0, "trinity_loss/moments/std/sum/spread": 4.0}
    with pytest.raises(ConfigError, match="two contracts"):
        finish_metrics(metrics)


def test_ranks_that_reduce_differently_do_not_mix():
    with pytest.raises(ConfigError, match=r"'actor/pg_loss' is reduced as \['sum', 'max'\]"):
        reduce_over_ranks({"actor/pg_loss": [Metric("sum", 1.0), Metric("max", 1.0)]})
    longer = Metric("sum", 1.0)
    longer.append(2.0)
    with pytest.raises(ValueError, match="same number of values"):
        reduce_over_ranks({"actor/pg_loss": [longer, Metric("sum", 1.0)]})
