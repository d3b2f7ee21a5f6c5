"""KV memory beyond the device: tiers, what moves between them, and who decides. Imports core."""
