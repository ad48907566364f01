"""What did not pass at once: retries, dead letters, redrive."""
