"""Draft vocabularies: which target ids a head may propose, and how its columns map to them."""
