"""A mini-batch in which every wrong denominator shows.

Lengths differ by an order of magnitude, masks have holes, some sequences have no token left in the mask,
and advantages differ per sequence: an average over a micro-batch's own tokens is far off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trinity_loss.invariance.layouts import build
from trinity_loss.invariance.minibatch import MiniBatch
from trinity_loss.totals import EXPERT_MASK
from trinity_loss.verl.harness.engine_case import BatchSpec
from trinity_loss.verl.harness.model import VOCABULARY

if TYPE_CHECKING:
    from tensordict import TensorDict

RESPONSE_LENGTHS = (1, 24, 5, 17, 2, 12, 3, 8)
LONGEST_PROMPT = 6


def ragged_rows(spec: BatchSpec) -> list[dict[str, torch.Tensor]]:
    """The sequences themselves, one dictionary each, without padding.

    Returns:
        Per row: ``prompts`` [p] and ``responses`` [r] int64, ``response_mask`` [r] int64, and
        ``old_log_probs``, ``ref_log_prob``, ``advantages`` [r] float32.
    """
    random = torch.Generator().manual_seed(spec.seed)

    def noise(size: int, scale: float) -> torch.Tensor:
        return torch.randn(size, generator=random) * scale

    rows = []
    for index in range(spec.rows):
        length = RESPONSE_LENGTHS[index % len(RESPONSE_LENGTHS)]
        prompt = int(torch.randint(2, LONGEST_PROMPT + 1, (), generator=random))
        mask = torch.ones(length, dtype=torch.int64)
        if length > 4:  # a tool's answer inside the response
            mask[2:4] = 0
        if index in spec.empty_rows:
            mask.zero_()
        # Near a uniform policy's log-probability, so that ratios lie on both sides of the clipping range.
        old = -torch.tensor(float(VOCABULARY)).log() + noise(length, 0.3)
        rows.append(
            {
                "prompts": torch.randint(2, VOCABULARY, (prompt,), generator=random),
                "responses": torch.randint(2, VOCABULARY, (length,), generator=random),
                "response_mask": mask,
                "old_log_probs": old,
                "ref_log_prob": old + noise(length, 0.2),
                "advantages": noise(1, 1.0).expand(length).clone(),
            }
        )
    return rows


def teacher_fields(spec: BatchSpec, input_ids: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """What a teacher says at each place of prompts and responses [M]: ids int32 and log-probs float32 [M, k]."""
    assert input_ids is not None
    random = torch.Generator().manual_seed(spec.seed + 1)
    log_probs = torch.randn(input_ids.numel(), VOCABULARY, generator=random).log_softmax(-1)
    # Where a model's output stands: one place to the left of the token.
    ids = input_ids.roll(-1)[:, None] if spec.teacher == 1 else log_probs.topk(spec.teacher).indices
    return {"teacher_ids": ids.to(torch.int32), "teacher_logprobs": log_probs.gather(1, ids)}


def _expert_mask(spec: BatchSpec) -> dict[str, torch.Tensor]:
    if not spec.expert_rows:
        return {}
    return {EXPERT_MASK: torch.tensor([index in spec.expert_rows for index in range(spec.rows)])}


def make_batch(spec: BatchSpec) -> TensorDict:
    """The mini-batch as a verl trainer hands it to the actor's training worker.

    Args:
        spec: Its size and layout.

    Returns:
        A TensorDict of ``spec.rows`` rows with everything that the engine and the loss read.
    """
    from verl.utils import tensordict_utils as tu

    rows = ragged_rows(spec)
    whole = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    batch = MiniBatch(
        prompt_lengths=torch.tensor([len(row["prompts"]) for row in rows]),
        response_lengths=torch.tensor([len(row["responses"]) for row in rows]),
        response_mask=whole["response_mask"],
        log_probs=whole["old_log_probs"],  # The model computes its own.
        token_fields={name: whole[name] for name in ("old_log_probs", "ref_log_prob", "advantages")},
        sequence_fields=_expert_mask(spec),
        uids=[f"prompt-{index // spec.rows_per_prompt}" for index in range(spec.rows)],
        input_ids=torch.cat([row[name] for row in rows for name in ("prompts", "responses")]),
    )
    data = build(batch, range(spec.rows), spec.layout).with_totals({}, worker=False)
    if spec.teacher:
        for name, values in teacher_fields(spec, batch.input_ids).items():
            data[name] = torch.nested.nested_tensor_from_jagged(values, offsets=data["input_ids"].offsets())
        tu.assign_non_tensor(data, distillation_use_topk=spec.teacher > 1, distillation_only=spec.taught_alone)
    tu.assign_non_tensor(
        data,
        temperature=1.0,
        calculate_entropy=spec.entropy,
        global_batch_size=spec.rows,
        mini_batch_size=spec.rows,
        epochs=1,
    )
    return data
