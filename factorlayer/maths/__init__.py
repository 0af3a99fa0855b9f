"""What a layer is: its sizes, its chain of contractions, its definition, and projections onto it. No engine."""
