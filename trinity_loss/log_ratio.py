"""The log-ratio of two policies, and the one limit that it is clamped to before an exponential."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trinity_loss.tokens import ResponseTokens

#: verl clamps every log-ratio to ±20 before it takes the exponential.
LOG_RATIO_LIMIT = 20.0


def limited(log_ratio: Tensor) -> Tensor:
    """The log-ratio clamped to ±20."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def limited_exp(log_ratio: Tensor) -> Tensor:
    """The ratio of a log-ratio clamped to ±20."""
    return limited(log_ratio).exp()


@dataclass(frozen=True, eq=False)
class LogRatio:
    """The log-ratio of the training policy to the rollout policy, and what its metrics are averaged over.

    Attributes:
        tokens: The response tokens.
        values: Training log-prob minus rollout log-prob [N], 0 at uncounted tokens.
    """

    tokens: ResponseTokens
    values: Tensor

    @property
    def token_weights(self) -> Tensor:
        """1.0 at tokens that count [N]."""
        return self.tokens.indicator(self.values.dtype)

    @property
    def nonempty(self) -> Tensor:
        """bool [S]: sequences with a token that counts."""
        return self.tokens.counts > 0

    @property
    def sequence_weights(self) -> Tensor:
        """What a sequence weighs in a mean over sequences, [S] in float64.

        1 where it has a token that counts. Where the mode of a term is one of trajectories its share of the tokens of
        its trajectory, so that a trajectory weighs 1, however many rows it has.
        """
        counts = self.tokens.counts
        trajectories = self.tokens.groups.get("batch_num_trajectories")
        if trajectories is None:
            return self.nonempty.to(torch.float64)
        return counts / trajectories.num_tokens.clamp(min=1).to(torch.float64)

    def of_sequence(self, level: str) -> Tensor:
        """Log-ratio of each sequence [S]: summed, or averaged at level ``geometric``."""
        if level == "geometric":
            return self.tokens.mean_per_sequence(self.values)
        return self.tokens.sum_per_sequence(self.values * self.token_weights)

    def weights(self, level: str) -> Tensor:
        """Importance weight of each token [N], before truncation."""
        if level == "token":
            return limited_exp(self.values)
        return self.tokens.per_token(limited_exp(self.of_sequence(level)))
