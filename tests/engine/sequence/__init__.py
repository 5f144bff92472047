"""Tests of sequences that are split over ranks."""
