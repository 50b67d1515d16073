"""Images become a detector; a detector becomes verdicts."""
