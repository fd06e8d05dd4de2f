"""Clients of a realtime server: a recording (``client``) and a microphone (``microphone``), behind ``vcpipe talk``."""
