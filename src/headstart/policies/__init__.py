"""Policies: which tree a drafter grows from the candidates it is given."""
