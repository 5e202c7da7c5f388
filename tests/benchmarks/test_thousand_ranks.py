"""benchmarks/thousand_ranks.py, with few ranks: every part has its row."""

import thousand_ranks


def test_every_part_has_a_row() -> None:
    names = [row.name for row in thousand_ranks.rows(ranks=32, per_node=2, samples=40_000)]
    for part in ("placement", "consensus", "straggler", "page", "heartbeats", "keep-alive", "order of"):
        assert any(part in name for name in names), part
