"""Training of draft heads: from files of chats to supervised tokens, batches and checkpoints."""
