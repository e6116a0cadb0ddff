"""The policy, pure: no clock, no randomness, no input or output."""
