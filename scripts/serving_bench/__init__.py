"""What the benchmark of the service is made of: a server without a model, and its clients."""
