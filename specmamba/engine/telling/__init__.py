"""What clients and statistics are told of steps, behind their decisions."""
