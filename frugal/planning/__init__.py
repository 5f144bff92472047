"""Arithmetic from a request to a plan. No torch, no device, no clock, no randomness."""
