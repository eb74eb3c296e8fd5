"""What used to go wrong without a word: inputs that were read as something else."""

from test_questions import ROW, fault, write


def test_ids_that_collide_with_their_source_before_them_are_refused(tmp_path):
    ids = [("1", "nq"), ("1", "hotpotqa"), ("nq-1", "popqa")]
    rows = [ROW | {"id": id, "data_source": source} for id, source in ids]
    assert "make the ids unique" in fault(write(tmp_path / "q.jsonl", *rows))
