"""Targets: the models whose output must not change."""
