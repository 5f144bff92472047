"""Tests of reading a run from its folder."""
