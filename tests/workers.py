"""verl's workers without an engine: what a trainer sends is a micro-batch, and what the loss says comes back."""

import pickle
from contextlib import nullcontext

import numpy as np
import torch
from batches import build, cut
from forms import Form, make_leaves
from hydra import compose, initialize_config_module
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.py_functional import append_to_dict
from verl.workers import engine_workers
from verl.workers.utils.losses import ppo_loss

POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"
OURS = f"{POLICY_LOSS}._target_=trinity_loss.verl.PolicyLossConfig"


def jagged_rows(rows):
    """A jagged tensor of these rows."""
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


class Engine:
    """One rank on its own."""

    def get_data_parallel_group(self):
        return None

    def get_data_parallel_rank(self):
        return 0

    def get_data_parallel_size(self):
        return 1

    def is_mp_src_rank_with_outputs(self):
        return True


class TrainingWorker:
    """In the place of verl's class of that name: a batch is one mini-batch, and that ``pieces`` micro-batches."""

    def __init__(self, config=None):
        self.engine, self.loss_fn, self.log_probs, self.pieces = Engine(), None, None, 1

    def set_loss_fn(self, loss_fn):
        self.loss_fn = loss_fn

    def load_checkpoint(self, local_path):
        pass

    def train_mini_batch(self, data: TensorDict):
        return self.train_batch(data)

    def train_batch(self, data: TensorDict):
        rows = [part.tolist() for part in np.array_split(range(len(data)), min(self.pieces, len(data)))]
        log_probs = self.log_probs.unbind() if len(rows) > 1 else None
        losses, metrics = [], {}
        for picked in rows:
            piece = data if log_probs is None else tu.index_select_tensor_dict(data, picked)
            output = self.log_probs if log_probs is None else jagged_rows([log_probs[i] for i in picked])
            loss, found = self.loss_fn(model_output={"log_probs": output}, data=piece, dp_group=None)
            losses.append(loss.item())
            append_to_dict(metrics, found)
        metrics |= {"loss": sum(losses)}
        return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": metrics})


class Outer(engine_workers.ActorRolloutRefWorker):
    """verl's worker up to where it makes its training worker, from a configuration as Ray hands it over."""

    def __init__(self, config):
        self.config = pickle.loads(pickle.dumps(config.actor_rollout_ref))

    def init_model(self, bind):
        actor = omega_conf_to_dataclass(self.config.actor)
        self.actor = self.actor_worker_cls(config=None)
        self.actor.set_loss_fn(bind(actor))
        return self.actor

    def update_weights(self, global_steps=None, mode="auto"):
        return nullcontext()  # verl's is a coroutine: whatever comes back is passed on.


def composed(*overrides: str):
    """A configuration of verl's trainer with our loss."""
    everything = [OURS, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", *overrides]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=everything)


def by_keyword(actor):
    """The loss as verl binds it."""
    from functools import partial

    return partial(ppo_loss, config=actor)


def started(*overrides: str, bind=by_keyword):
    """A worker of that configuration as it stands before its first step, and its training worker."""
    outer = Outer(composed(*overrides))
    return outer, outer.init_model(bind)


def train(worker, samples, *, more=(), **options):
    """One step with these sequences, and fields beside theirs; returns the metrics, the loss among them."""
    parts = cut(tuple(samples))
    ((batch,),) = build(parts, Form("nested", **options))
    log_probs, _ = make_leaves(parts.samples)
    worker.log_probs = batch.lay_out(log_probs)
    for name, value in dict(more).items():
        batch.data[name] = value
    return tu.get(worker.train_mini_batch(batch.data), "metrics")
