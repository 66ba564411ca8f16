"""Drafters: whatever proposes tokens. Learned heads are driven by one of them; lookup needs no training."""
