"""What the docs show of faults is what was kept."""

import json

from bench.reliability import faults, nodes
from tests import readme

DOCS = readme.text("reliability")


def test_the_kept_faults_of_one_host() -> None:
    kept = [faults.Outcome(**each) for each in json.loads(faults.RESULTS.read_text())["outcomes"]]
    assert f"All {len(kept)} kinds resumed bit for bit" in " ".join(DOCS.split())
    assert all(each.is_exact and (each.seconds or 0) < 60 for each in kept)


def test_the_kept_table_of_two_hosts() -> None:
    kept = [nodes.Outcome(**each) for each in json.loads(nodes.RESULTS.read_text())["outcomes"]]
    assert nodes.table(kept) in DOCS
    assert all(each.gone_seconds < 60 for each in kept)
