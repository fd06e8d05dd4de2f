"""The language stage: Nemotron-H with a text head and a function head, one position a frame."""
