"""One engine: plan, execute, commit. Only `jax_executor` may import the model."""
