"""See `bench.runs`."""

from bench.runs import (  # noqa: F401  # until every test imports it from there
    TINY,
    command,
    environment,
    frugal_train,
    plan,
    prepared,
    records,
    torchrun,
)
