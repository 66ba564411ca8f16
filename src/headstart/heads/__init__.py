"""Draft heads: one file per family."""
