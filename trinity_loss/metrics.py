"""The metrics that are public: importance sampling (:mod:`trinity_loss.importance_sampling`)."""

from trinity_loss.importance_sampling import importance_sampling_metrics

__all__ = ["importance_sampling_metrics"]
