"""Which array dimension lives on which mesh axis. May import jax and numpy."""
