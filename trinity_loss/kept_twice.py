"""Options that verl keeps in two places, of which it reads one: where they differ, a sentence for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from trinity_loss.verl.policy_options import CORRECTION, unread_corrections

_ACTOR, _MODEL, _ROLLOUT = (f"actor_rollout_ref.{name}" for name in ("actor", "model", "rollout"))
_POLICY_LOSS, _OF_TRAINER = f"{_ACTOR}.policy_loss", "algorithm.rollout_correction"
#: The section of an engine's own options, where it is not called as the strategy is.
_ENGINE_SECTIONS = {"fsdp": "fsdp_config", "fsdp2": "fsdp_config"}
#: Where verl reads what stands in several sections; elsewhere it is the engine's.
_READ_FROM = {"strategy": _ACTOR, "use_remove_padding": _MODEL, "use_fused_kernels": _MODEL}
#: One option under two names: the one that nothing reads, and the other.
_RENAMED = ((f"{_ACTOR}.rollout_n", f"{_ROLLOUT}.n"), (f"{_ACTOR}.grad_clip", f"{_ACTOR}.optim.clip_grad"))
#: Options of an engine that verl's worker writes over.
_WRITTEN_OVER = {
    "use_dynamic_bsz": f"{_ACTOR}.use_dynamic_bsz",
    "max_token_len_per_gpu": f"{_ACTOR}.ppo_max_token_len_per_gpu",
    "micro_batch_size_per_gpu": f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    "infer_max_token_len_per_gpu": f"{_ROLLOUT}.log_prob_max_token_len_per_gpu",
    "infer_micro_batch_size_per_gpu": f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",
}
#: Who has a clip range, and whether it trains with it.
_CLIPPING = {_ACTOR: None, "distillation.distillation_loss": "distillation.enabled"}


def option_traps(config: DictConfig, *, ours: bool) -> list[str]:
    """What of a composed configuration verl reads from another place than where it was said."""
    return [*_sections(config), *_renamed(config), *_clip_ranges(config), *_corrections(config, ours)]


def _sections(config: DictConfig) -> Iterator[str]:
    """Options of one name in the sections of actor, engine and model."""
    strategy = OmegaConf.select(config, f"{_ACTOR}.strategy")
    engine = f"{_ACTOR}.{_ENGINE_SECTIONS.get(strategy, strategy)}"
    sections = {
        place: found for place in (_ACTOR, engine, _MODEL) if (found := OmegaConf.select(config, place)) is not None
    }
    for place, section in sections.items():
        defaults = _defaults(section)
        for name, value in section.items():
            read = _READ_FROM.get(name, engine)
            if place == engine and name in _WRITTEN_OVER:
                if value != (other := OmegaConf.select(config, _WRITTEN_OVER[name])):
                    yield _differ(f"{place}.{name}", value, _WRITTEN_OVER[name], other)
                continue
            if place == read or name in _WRITTEN_OVER or name.startswith("_") or name not in sections.get(read, {}):
                continue
            other = sections[read][name]
            if hasattr(value, "keys"):  # A part with a switch, such as `qat`.
                if value.get("enable") and not other.get("enable"):
                    yield _differ(f"{place}.{name}.enable", value.enable, f"{read}.{name}.enable", other.get("enable"))
                continue
            if name == "ulysses_sequence_parallel_size" and place == _ACTOR and value > 1:
                continue  # Above 1 verl copies it.
            if value not in (other, defaults.get(name)):
                yield _differ(f"{place}.{name}", value, f"{read}.{name}", other)


def _defaults(section: Any) -> dict[str, Any]:
    """What the dataclass of a section has where nobody says anything."""
    made = get_class(section._target_) if section.get("_target_") else None
    return {f.name: f.default for f in fields(made)} if is_dataclass(made) else {}


def _renamed(config: DictConfig) -> Iterator[str]:
    for place, read in _RENAMED:
        value, other = OmegaConf.select(config, place), OmegaConf.select(config, read)
        unsaid = _defaults(OmegaConf.select(config, place.rpartition(".")[0])).get(place.rpartition(".")[2])
        if None not in (value, other) and value not in (other, unsaid):
            yield _differ(place, value, read, other)
    dynamic, of_rollout = (
        OmegaConf.select(config, key) for key in (f"{_ACTOR}.use_dynamic_bsz", f"{_ROLLOUT}.log_prob_use_dynamic_bsz")
    )
    if dynamic != of_rollout:
        yield (
            f"{_ACTOR}.use_dynamic_bsz is {dynamic} and {_ROLLOUT}.log_prob_use_dynamic_bsz is {of_rollout}: verl's "
            "worker fails at its start"
        )
    rows = f"{_ACTOR}.ppo_micro_batch_size"
    if (
        not dynamic
        and OmegaConf.select(config, rows) is not None
        and OmegaConf.select(config, f"{rows}_per_gpu") is None
    ):
        yield (
            f"{rows} is {OmegaConf.select(config, rows)}, but verl's worker reads {rows}_per_gpu, and fails at the "
            "first step"
        )


def _clip_ranges(config: DictConfig) -> Iterator[str]:
    for place, switch in _CLIPPING.items():
        section = OmegaConf.select(config, place)
        if section is None or (switch and not OmegaConf.select(config, switch)):
            continue
        both = (section.clip_ratio_low, section.clip_ratio_high)
        if None not in both and section.clip_ratio not in (*both, _defaults(section).get("clip_ratio")):
            yield (
                f"{place}.clip_ratio is {section.clip_ratio}, but clip_ratio_low and clip_ratio_high are read, which "
                f"are {both[0]} and {both[1]}"
            )


def _differ(place: str, value: Any, read: str, other: Any) -> str:
    return f"{place} is {value}, but verl reads {read}, which is {other}"


def _corrections(config: DictConfig, ours: bool) -> Iterator[str]:
    """Rollout correction: the trainer reads ``algorithm``, the loss ``policy_loss``, and verl copies it too late."""
    said, own = (OmegaConf.select(config, key) or {} for key in (_OF_TRAINER, f"{_POLICY_LOSS}.rollout_correction"))
    loss_mode, bypass = OmegaConf.select(config, f"{_POLICY_LOSS}.loss_mode"), bool(said.get("bypass_mode"))
    asked = [name for name in ("bypass_mode", "rollout_is", "rollout_rs") if said.get(name)]
    if asked and not OmegaConf.select(config, f"{_ROLLOUT}.calculate_log_probs"):
        what = "verl fails at the first step" if bypass else "verl corrects nothing, and does not say so"
        yield f"{_OF_TRAINER}.{asked[0]} is {said[asked[0]]}, but {_ROLLOUT}.calculate_log_probs is not True: {what}"
    if bypass and not ours:
        unread = [name for name in said if name in CORRECTION and own.get(name, said[name]) != said[name]]
        if loss_mode != "bypass_mode" or not own or unread:
            yield (
                f"{_OF_TRAINER}.bypass_mode is True, but verl makes its actor before it says so there: "
                f"{_POLICY_LOSS}.loss_mode=bypass_mode +{_POLICY_LOSS}.rollout_correction=${{{_OF_TRAINER}}} makes it "
                "reach the loss"
            )
    if said:
        yield from unread_corrections(loss_mode, own, said)
