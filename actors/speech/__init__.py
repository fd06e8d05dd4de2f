"""Speech turns: from text that arrives piece by piece to the id of every frame, and when a turn is over. No MLX."""
