"""Pure decisions of the engine: no jax, clock, thread, socket or file."""
