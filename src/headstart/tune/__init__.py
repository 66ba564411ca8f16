"""Choosing what a recipe leaves open, from measurements."""
