"""Truth: what is finished, who is building, and whether the bytes are still those that were made."""
