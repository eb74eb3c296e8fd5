"""Around evaluate.py: the benchmarks' files, models of every kind, intervals and tests."""
