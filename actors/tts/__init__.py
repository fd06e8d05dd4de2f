"""Speech decoder (EAR-TTS): one text id and the codes of the frame before -> the codec codes of one frame."""
