"""Webhooks and e-mail (a later release)."""
