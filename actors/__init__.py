"""The four actors. A network is imported only inside its own actor's process."""
