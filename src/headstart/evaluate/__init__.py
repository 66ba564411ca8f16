"""What a drafter gains on this machine: tokens per step without a target pass, wall clock, and where a step goes."""
