"""From text to batches: raw text, tokenizers, Arrow shards, mixtures, and the loader."""
