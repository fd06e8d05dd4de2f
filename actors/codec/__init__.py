"""The codec: speech as 31 codes a frame, and back."""
