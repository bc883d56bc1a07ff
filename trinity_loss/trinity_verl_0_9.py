"""Lets Trinity-RFT 0.6.0, which is written for verl 0.8, train with verl 0.9; with verl 0.8 it does nothing.

:func:`install` belongs in a plugin file, as :mod:`trinity_loss.trinity_rft` explains. It bridges three gaps, and
says so in the log:

- verl's dataclasses have lost fields that Trinity-RFT fills in (``router_replay`` of an actor, ``mbridge_config`` of
  FSDP's checkpoints, ``grad_offload`` and ``load_weight`` of Megatron): these are left out. What a user writes in
  ``trainer_config`` stays, so that verl refuses a name that it does not know;
- verl asks ``profiler.tool_config`` for its entries, where Trinity-RFT says None: it becomes empty;
- verl reads ``pad_size`` of what ``prepare_model_inputs`` returns, which Trinity-RFT's own version leaves out where
  nothing was padded: it is 0. That happens in the training workers, which load no plugins: verl imports this module
  there (``model.external_lib``), and the import does it.
"""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from typing import Any

import verl
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from packaging.version import Version
from trinity.trainer.verl import config as trinity_config
from trinity.trainer.verl import monkey_patch
from trinity.utils.log import get_logger

_stock_build = trinity_config.build_verl_config


def is_needed() -> bool:
    """Whether verl is newer than what Trinity-RFT is written for."""
    return Version(verl.__version__) >= Version("0.9.0.dev0")


def build_verl_config(global_config: Any) -> DictConfig:
    """Trinity-RFT's configuration of verl, as verl 0.9 has it."""
    left_out: list[str] = []
    trainer = replace(global_config.trainer, trainer_config=None)
    config, own = (
        OmegaConf.to_container(_stock_build(given), resolve=True)
        for given in (global_config, replace(global_config, trainer=trainer))
    )
    config = _bridged(config, own, "", left_out)
    libraries = config["model"]["external_lib"] or []
    config["model"]["external_lib"] = [*([libraries] if isinstance(libraries, str) else libraries), __name__]
    get_logger(__name__).warning(
        "trinity_loss: verl %s is newer than Trinity-RFT expects; left out: %s; profiler.tool_config is empty, not "
        "None; prepare_model_inputs returns a pad_size",
        verl.__version__,
        ", ".join(sorted(left_out)),
    )
    return OmegaConf.create(config, flags={"allow_objects": True})


def _bridged(node: Any, own: Any, path: str, left_out: list[str]) -> Any:
    """A configuration without the fields of ``own``, what Trinity-RFT fills in, that verl does not have."""
    if not isinstance(node, dict) or not isinstance(own, dict):
        return node
    lost: set[str] = set()
    if "_target_" in node:
        known = {field.name for field in fields(get_class(node["_target_"]))}
        # verl renames what starts like this before it makes a dataclass of it.
        lost = {key for key in own if key not in known | {"_target_"} and not key.startswith("log_prob_")}
    left_out += [f"{path}{key}" for key in lost]
    if "tool_config" in node and node["tool_config"] is None:
        node = node | {"tool_config": {}}
    return {k: _bridged(v, own.get(k), f"{path}{k}.", left_out) for k, v in node.items() if k not in lost}


def _patch_engine() -> None:
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    monkey_patch.patch_verl_engine()  # Trinity-RFT's version is in its place; a second call does nothing.
    prepare = FSDPEngineWithLMHead.prepare_model_inputs

    def prepare_model_inputs(self: Any, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        inputs, outputs = prepare(self, micro_batch)
        return inputs, {"pad_size": 0} | outputs

    FSDPEngineWithLMHead.prepare_model_inputs = prepare_model_inputs  # type: ignore[method-assign]


def install() -> None:
    """Makes Trinity-RFT configure verl with :func:`build_verl_config`. A second call changes nothing."""
    if is_needed():
        # Trinity-RFT's trainer, which imports the name, may be imported already.
        for name in (trinity_config.__name__, "trinity.trainer.verl.trainer"):
            if name in sys.modules:
                sys.modules[name].build_verl_config = build_verl_config  # type: ignore[attr-defined]


if is_needed():
    _patch_engine()
