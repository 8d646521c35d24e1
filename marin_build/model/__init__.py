"""The Llama family as small flax.nnx modules, and its counts in closed form."""
