"""Fleets in virtual time. May import transport, nodes, engine, kv, core, observe, config, clock."""
