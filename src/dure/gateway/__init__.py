"""OpenAI-compatible proxy in front of backfill replicas (a later release)."""
