"""The operations as Pallas kernels for NVIDIA GPUs (Mosaic GPU backend)."""
