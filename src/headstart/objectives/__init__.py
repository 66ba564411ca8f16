"""What a head is trained for: per-position losses, and one place that weighs and reduces them."""
