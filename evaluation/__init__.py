"""Around evaluate.py and ask.py: agents of every kind, the benchmarks' files, intervals and
tests."""
