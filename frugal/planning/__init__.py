"""Arithmetic: what to run. No torch, no device, no clock, no randomness."""
