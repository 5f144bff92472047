"""See `bench.ranks`."""

from bench.ranks import Ranks, free_port  # noqa: F401  # until every test imports it from there
