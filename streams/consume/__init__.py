"""From records to effects: decide, settle in one transaction, then move on."""
