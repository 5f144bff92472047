"""Requests, settings, clusters and calibrations: the input of a plan. No torch."""
