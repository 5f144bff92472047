"""Configurations of other trainers: their real batch, whether they fit, and their known faults."""
