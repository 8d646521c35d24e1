"""Identity: what a recipe says, what it depends on, and the fingerprint that names it."""
