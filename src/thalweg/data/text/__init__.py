"""Text: where it comes from, how it becomes tokens, where they are kept and what they are compared with."""
