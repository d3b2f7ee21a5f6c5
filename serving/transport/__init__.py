"""Carries messages and performs the effects of nodes. May import nodes and what is below."""
