"""Proof on the user's own model that speculation changes nothing: greedy identity, the sampled law, and controls that
show that the proof would notice."""
