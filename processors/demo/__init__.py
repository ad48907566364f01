"""``streams demo``: the shop under load, with failures on purpose, and an audit at the end."""
