"""The blocks of the model, one concept a file."""
