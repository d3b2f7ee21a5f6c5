"""One service each, as a state machine. May import engine, kv, core, observe, config, clock."""
