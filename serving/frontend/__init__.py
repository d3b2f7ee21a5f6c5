"""HTTP in front of the nodes. May import transport, nodes, core, observe, config and clock."""
