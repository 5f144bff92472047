"""Measure a real run on this machine, in bytes and seconds."""
