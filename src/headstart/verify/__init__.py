"""Verifiers: which drafted tokens stay. Each declares the proposals it is exact for."""
