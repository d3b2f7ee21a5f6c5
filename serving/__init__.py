"""Requests, KV storage and services around the model. May import deepinfer_jax and sharding."""
