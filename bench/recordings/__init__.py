"""Recordings of real cards that other people made public, and what frugal's model of the allocator makes of them."""
