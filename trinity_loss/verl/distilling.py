"""Our loss in the place of verl's ``distillation_ppo_loss``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from trinity_loss.loss import EnginePolicyLoss
from trinity_loss.loss_config import LossConfig
from trinity_loss.micro_batch import check_teacher
from trinity_loss.row_values import MicroBatchData


class DistillingPolicyLoss(EnginePolicyLoss):
    """The loss with a teacher, as verl's engines call it.

    They call it a second time, in their logits processor, for the divergence over the teacher's most likely tokens:
    verl's own function makes it there, per token and so under any cut.

    Args:
        config: What the loss is, its distillation too.
        of_logits: verl's ``distillation_ppo_loss``, bound to its configurations.
    """

    def __init__(self, config: LossConfig, of_logits: Callable[..., Any]) -> None:
        super().__init__(config)
        self._of_logits = of_logits

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.config, self._of_logits)

    def __call__(
        self,
        *,
        data: MicroBatchData,
        model_output: Mapping[str, Any] | None = None,
        dp_group: Any = None,
        student_logits: Tensor | None = None,
        **of_logits: Any,
    ) -> Any:
        """Loss and metrics of a micro-batch; with ``student_logits`` what verl makes of these, by name.

        Raises:
            MissingFieldError: There are logits, but no teacher to compare them with.
        """
        if student_logits is None:
            return super().__call__(model_output=model_output or {}, data=data, dp_group=dp_group)
        assert self.config.distillation is not None
        check_teacher(self.config.distillation, data)
        return self._of_logits(student_logits=student_logits, data=data, **of_logits)
