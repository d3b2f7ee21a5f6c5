"""The meaning of each operation in plain jax.numpy; also what runs on a CPU."""
