"""Perception: speech as encoder frames for the language model, and as text."""
