"""Hydra configuration fragments; add ``pkg://trinity_loss.verl.conf`` to ``hydra.searchpath``."""
