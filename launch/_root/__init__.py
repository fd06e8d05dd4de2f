"""vcpipe: NemotronLabs-VoiceChat as a pipeline of actor processes."""

__version__ = "0.1.0"
