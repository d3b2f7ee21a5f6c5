"""The model and its compiled steps. May import pallas_kernels and sharding."""
