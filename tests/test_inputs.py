"""What used to go wrong without a word: inputs that were read as something else."""

import pytest
from test_questions import ROW, fault, write

from tasks.task import read_instruction


@pytest.mark.parametrize("text, clean", [
    ("\ufeffSea\u00adrch\u200b first.\x0c", "Search first."),
    ("One.\r\nTwo.\u2028Three.\x85Four.", "One.\nTwo.\nThree.\nFour."),
])  # fmt: skip
def test_invisible_characters_are_taken_out_and_line_ends_of_all_kinds_are_line_ends(
    tmp_path, text, clean
):
    (tmp_path / "i.txt").write_bytes(text.encode())
    assert read_instruction(str(tmp_path / "i.txt")) == clean


def test_ids_that_collide_with_their_source_before_them_are_refused(tmp_path):
    ids = [("1", "nq"), ("1", "hotpotqa"), ("nq-1", "popqa")]
    rows = [ROW | {"id": id, "data_source": source} for id, source in ids]
    assert "make the ids unique" in fault(write(tmp_path / "q.jsonl", *rows))
