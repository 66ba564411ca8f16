"""A draft head as a directory: `config.json` and `model.safetensors` are all of it, and no pickle is ever opened.

config.json is written last, so a directory that has one is complete. The tree's paths stand in growth order, best
first: the first n - 1 are the best tree of n nodes, so a smaller tree is a prefix. Heads that others published are read
from their own layouts (see `catalogue.PUBLISHED`).
"""

from headstart.checkpoint.loading import as_policy, inspect, is_head, load, load_head
from headstart.checkpoint.record import DraftSize, Loaded
from headstart.checkpoint.saving import save

__all__ = ["DraftSize", "Loaded", "as_policy", "inspect", "is_head", "load", "load_head", "save"]
