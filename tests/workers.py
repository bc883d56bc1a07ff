"""verl's workers without an engine: what a trainer sends is a micro-batch, and what the loss says comes back."""

import pickle
from contextlib import nullcontext

from batches import build, cut
from forms import Form, make_leaves
from hydra import compose, initialize_config_module
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers import engine_workers
from verl.workers.utils.losses import ppo_loss

POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"
OURS = f"{POLICY_LOSS}._target_=trinity_loss.verl.PolicyLossConfig"


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
    """In the place of verl's class of that name: a batch is one mini-batch, and that one micro-batch."""

    def __init__(self, config=None):
        self.engine, self.loss_fn, self.log_probs = Engine(), None, None

    def set_loss_fn(self, loss_fn):
        self.loss_fn = loss_fn

    def load_checkpoint(self, local_path):
        pass

    def train_mini_batch(self, data: TensorDict):
        return self.train_batch(data)

    def train_batch(self, data: TensorDict):
        loss, metrics = self.loss_fn(model_output={"log_probs": self.log_probs}, data=data, dp_group=None)
        metrics = {key: [value] for key, value in metrics.items()} | {"loss": loss.item()}
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


def train(worker, samples, **options):
    """One step with these sequences; returns the metrics, the loss among them."""
    parts = cut(tuple(samples))
    ((batch,),) = build(parts, Form("nested", **options))
    log_probs, _ = make_leaves(parts.samples)
    worker.log_probs = batch.lay_out(log_probs)
    return tu.get(worker.train_mini_batch(batch.data), "metrics")
