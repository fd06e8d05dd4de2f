"""The frame clock, the pipes and the processes: everything between a user's PCM and the stages. Never imports MLX."""
