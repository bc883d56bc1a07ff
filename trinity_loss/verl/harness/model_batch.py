"""A mini-batch in which every wrong denominator shows.

Lengths differ by an order of magnitude, masks have holes, some sequences have no token left in the mask,
and advantages differ per sequence: an average over a micro-batch's own tokens is far off.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from trinity_loss.verl.harness.engine_case import BatchSpec
from trinity_loss.verl.harness.model import VOCABULARY

if TYPE_CHECKING:
    from tensordict import TensorDict

RESPONSE_LENGTHS = (1, 24, 5, 17, 2, 12, 3, 8)
PROMPT_WIDTH, RESPONSE_WIDTH = 6, max(RESPONSE_LENGTHS)
PER_RESPONSE_TOKEN = ("response_mask", "old_log_probs", "ref_log_prob", "advantages")


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
        prompt = int(torch.randint(2, PROMPT_WIDTH + 1, (), generator=random))
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


def make_batch(spec: BatchSpec) -> TensorDict:
    """The mini-batch as a verl trainer hands it to the actor's training worker.

    Args:
        spec: Its size and layout.

    Returns:
        A TensorDict of ``spec.rows`` rows with everything that the engine and the loss read.
    """
    from tensordict import NonTensorData, NonTensorStack
    from verl.utils import tensordict_utils as tu

    rows = ragged_rows(spec)
    data = _padded(rows) if spec.layout == "padded" else _nested(rows)
    uids = [f"prompt-{index // spec.rows_per_prompt}" for index in range(spec.rows)]
    data["uid"] = NonTensorStack.from_list([NonTensorData(uid) for uid in uids])
    tu.assign_non_tensor(
        data,
        temperature=1.0,
        calculate_entropy=spec.entropy,
        global_batch_size=spec.rows,
        mini_batch_size=spec.rows,
        epochs=1,
    )
    return data


def _nested(rows: list[dict[str, torch.Tensor]]) -> TensorDict:
    """The v1 trainer's layout: every field jagged, ``loss_mask`` the same as ``response_mask``."""
    from tensordict import TensorDict

    def jagged(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)

    fields = {key: jagged([row[key] for row in rows]) for key in rows[0]}
    tokens = [torch.cat([row["prompts"], row["responses"]]) for row in rows]
    fields["input_ids"] = jagged(tokens)
    fields["position_ids"] = jagged([torch.arange(len(row)) for row in tokens])
    fields["loss_mask"] = fields["response_mask"]
    return TensorDict(fields, batch_size=[len(rows)])


def _padded(rows: list[dict[str, torch.Tensor]]) -> TensorDict:
    """The v0 trainer's layout: prompts padded on the left, responses on the right, then verl's conversion."""
    from tensordict import TensorDict
    from verl.workers.utils.padding import left_right_2_no_padding

    def left(row: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(row, (PROMPT_WIDTH - len(row), 0))

    def right(row: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(row, (0, RESPONSE_WIDTH - len(row)))

    fields = {key: torch.stack([right(row[key]) for row in rows]) for key in ("responses", *PER_RESPONSE_TOKEN)}
    fields["prompts"] = torch.stack([left(row["prompts"]) for row in rows])
    fields["input_ids"] = torch.cat([fields["prompts"], fields["responses"]], dim=1)
    fields["attention_mask"] = torch.stack(
        [torch.cat([left(torch.ones_like(row["prompts"])), right(torch.ones_like(row["responses"]))]) for row in rows]
    )
    fields["position_ids"] = (fields["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
    return left_right_2_no_padding(TensorDict(fields, batch_size=[len(rows)]))
