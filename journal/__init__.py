"""What a run writes and shows: its directory, its log, its screen."""
