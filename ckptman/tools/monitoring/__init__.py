"""What became of a run and of its hours: its history, the ledger, its status, the report."""
