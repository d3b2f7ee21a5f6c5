"""Fast array operations; know nothing of models or requests. May import jax and numpy."""
