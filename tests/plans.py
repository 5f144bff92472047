"""See `bench.plans`."""

from bench.plans import plan_by_hand  # noqa: F401  # until every test imports it from there
