"""Tests of data that is read while training."""
