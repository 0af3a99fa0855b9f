"""Which implementation is faster for a layer where it runs: predicted, or timed and kept, and looked up by auto."""
