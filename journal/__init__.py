"""Everything around a run: its directory, its log, its servers."""
