"""Training of the small model that ships with the project."""
